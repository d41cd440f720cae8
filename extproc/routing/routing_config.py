"""Routing configuration of a pool: its profiles and settings, as a single value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from extproc.pool import inference_policy
from extproc.routing.usage_limit import UsageLimit
from extproc.scheduling.disaggregation import DisaggregatedStages
from extproc.scheduling.framework import Observer, Signal
from extproc.scheduling.kv_cache_source import KvCacheSource
from extproc.scheduling.load_bounds import SaturationRules
from extproc.scheduling.profile import HeaderProfiles, SchedulerProfile
from extproc.scheduling.shadow import ShadowScheduler


class RoutingSettings(msgspec.Struct, frozen=True):
    """Settings of routing.

    Attributes:
        stale_after_s: Age at which a scraped load counts as unknown.
        fallbacks: Further endpoints named after the chosen one.
        respect_subset: Keep to the endpoints the data plane allows. True, because ignoring the hint
            sends requests where they were not allowed.
        reject_unlisted: Reject requests for models that no endpoint serves, if all served models
            are known. False, because engines answer that themselves.
        busy_s: Wait above which an endpoint counts as busy (seconds); None where requests do not
            queue, and none is deferred.
        usage_limit: Ceilings at which requests that may queue are held; None for none.
        banded_priorities: Priorities that have ceilings while no request of theirs comes.
        kubeai_names: Read `model_adapter` as the adapter of a base model, where both are known.
    """

    stale_after_s: float
    fallbacks: int = 0
    respect_subset: bool = True
    reject_unlisted: bool = False
    kubeai_names: bool = True
    busy_s: float | None = None
    usage_limit: UsageLimit | None = None
    banded_priorities: tuple[int, ...] = ()


class RoutingConfig(msgspec.Struct, frozen=True):
    """Routing configuration that a reload replaces as a single value.

    Attributes:
        profile: Profile of models without one of their own.
        by_model: Profiles of single models.
        by_header: Profiles of requests that name one in a header, `profile` among them; None
            where no header is read.
        stages: Stages of requests of `profile` that other endpoints may do; None where the serving
            endpoint does all.
        kv_cache_source: Names endpoints to pull cached prompts from; None for none.
        saturation: Refuses priorities below 0; None where each profile does.
        shadow: Second profile that looks at requests routed by `profile`; None for none.
        hashes_prompts: Whether any profile reads prefixes, the shadow included; worked out, as are
            the next ones.
        credits_prefixes: Whether endpoints are charged for uncached tokens only: not where the shadow
            alone reads prefixes.
        tracks_conversations: Whether any profile that routes reads conversations.
        reads_first_message: Whether any profile reads the first user message, the shadow included.
        observers: Stateful plugins by name of the profile.
    """

    profile: SchedulerProfile
    by_model: Mapping[str, SchedulerProfile]
    settings: RoutingSettings
    policy: inference_policy.InferencePolicy = inference_policy.EMPTY_POLICY
    shadow: ShadowScheduler | None = None
    by_header: HeaderProfiles | None = None
    stages: DisaggregatedStages | None = None
    kv_cache_source: KvCacheSource | None = None
    saturation: SaturationRules | None = None
    hashes_prompts: bool = False
    credits_prefixes: bool = False
    tracks_conversations: bool = False
    reads_first_message: bool = False
    observers: Mapping[str, Sequence[Observer]] = {}

    def __post_init__(self) -> None:
        needs, force = self.needs, msgspec.structs.force_setattr
        read = needs if self.shadow is None else needs | self.shadow.needs
        force(self, "hashes_prompts", Signal.PREFIX in read)
        force(self, "credits_prefixes", self.shadow is None or Signal.PREFIX in needs)
        force(self, "tracks_conversations", Signal.CONVERSATIONS in needs)
        force(self, "reads_first_message", Signal.FIRST_USER_MESSAGE in read)
        observers = {profile.name: profile.observers for profile in self.profiles}
        force(self, "observers", observers)

    def find_profile_name(self, headers: Mapping[str, str]) -> str:
        """The profile that headers name; empty for none."""
        return "" if self.by_header is None else self.by_header.find_name(headers)

    @property
    def profiles(self) -> Sequence[SchedulerProfile]:
        """Every profile that routes."""
        named = () if self.by_header is None else self.by_header.profiles.values()
        staged = () if self.stages is None else self.stages.profiles
        return (self.profile, *self.by_model.values(), *named, *staged)

    @property
    def needs(self) -> frozenset[Signal]:
        """Every signal any profile reads that routes."""
        readers = (*self.profiles, self.stages, self.kv_cache_source)
        return frozenset().union(*(reader.needs for reader in readers if reader is not None))
