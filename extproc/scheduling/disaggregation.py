"""Disaggregation: chooses endpoints that compute parts of a request before the one that serves it.

Encode turns images, videos and audio into embeddings, prefill computes the prompt, decode generates
the tokens. The profile that routes chooses the endpoint for decode, to which the data plane sends the
request. A decider says for each of the other stages whether another endpoint does it, which the
stage's own profile chooses; to keep a stage is to leave it to the serving endpoint. A sidecar of the
serving endpoint, such as that of llm-d, asks these endpoints first; headers of the request name them.
Upstream: `profilehandler/disagg`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal, Protocol

import msgspec

from extproc.decision import Decision, Disaggregation
from extproc.endpoint import Candidate
from extproc.scheduling.framework import (
    Plugin,
    PluginParameters,
    SchedulingContext,
    Signal,
    UpstreamParameters,
)
from extproc.scheduling.profile import SchedulerProfile

#: Reasons why the serving endpoint does a stage itself, beside those of the deciders.
NO_ENDPOINT = "no-endpoint"
SAME_ENDPOINT = "same-endpoint"
OTHER_API = "other-api"

#: Surfaces of which the sidecar of llm-d splits requests (`pkg/sidecar/proxy/proxy.go`).
_SPLIT_APIS: Final = frozenset({"chat", "completions", "messages", "responses", "generate"})


def find_serving_stage(stages: Disaggregation) -> Literal["", "decode", "prefill-decode"]:
    """Return what the serving endpoint computes; empty for all."""
    if stages.prefill is not None:
        return "decode"
    return "" if stages.encode is None else "prefill-decode"


class Decider(Plugin, Protocol):
    """Says whether another endpoint does a stage of a request."""

    def find_reason_to_keep(self, decode: Decision) -> str:
        """Return why the serving endpoint does the stage; empty where another one may."""

    def compare(self, decode: Decision, part: Decision) -> str:
        """Return why the serving endpoint does it after `part` chose another; empty where that does."""


class _Decider:
    """A decider that does not compare endpoints."""

    needs: ClassVar[frozenset[Signal]] = frozenset()

    def compare(self, decode: Decision, part: Decision) -> str:
        """Choose the other endpoint."""
        return ""


class AlwaysPrefill(_Decider, UpstreamParameters, frozen=True):
    """Another endpoint computes every prompt.

    Upstream: `profilehandler/disagg/always_disagg_pd_decider.go`.
    """

    kind: ClassVar[str] = "always-disagg-pd-decider"

    def find_reason_to_keep(self, decode: Decision) -> str:
        """Never keep a prompt."""
        return ""


class AlwaysMultimodal(_Decider, UpstreamParameters, frozen=True):
    """Another endpoint encodes images, videos and audio.

    Upstream: `profilehandler/disagg/always_disagg_mm_decider.go`.
    """

    kind: ClassVar[str] = "always-disagg-multimodal-decider"

    def find_reason_to_keep(self, decode: Decision) -> str:
        """Keep requests without media."""
        return "" if decode.request.media else "no-media"


class PrefixBased(_Decider, UpstreamParameters, frozen=True):
    """Another endpoint computes long prompts that the serving one has not cached.

    Upstream: `profilehandler/disagg/prefix_based_pd_decider.go`.

    Attributes:
        non_cached_tokens: Prompt tokens from which on another endpoint computes them, without those
            that are predicted as cached on the serving one; 0 keeps all prompts, as upstream.
        prompt_tokens: Prompt tokens below which a prompt is kept; 0 for no such bound.
    """

    kind: ClassVar[str] = "prefix-based-pd-decider"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    non_cached_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0

    def find_reason_to_keep(self, decode: Decision) -> str:
        """Keep prompts that are short, or cached but for a short end."""
        if not self.non_cached_tokens:
            return "disabled"
        tokens = decode.request.prompt_tokens
        if tokens < max(self.prompt_tokens, self.non_cached_tokens):
            return "short"
        return "cached" if tokens - decode.matched_tokens < self.non_cached_tokens else ""


class EstimatedTimeDecider(PluginParameters, frozen=True):
    """Another endpoint computes a prompt where that costs less time.

    Compared are the seconds until the first token: there with the transfer of the KV cache, and here
    with those that the answers lose which run here meanwhile. Both profiles need the cost
    `estimated-time`; without a prediction, another endpoint computes the prompt.

    Attributes:
        transfer_tokens_per_s: Speed at which the KV cache of a prompt reaches the serving endpoint
            (tokens/s). 200,000: 128 kB per token, as of an 8B model with 16-bit values, over 200
            Gbit/s.
        transfer_ms: Duration of a transfer without tokens (milliseconds).
        others_share: Seconds of the request that weigh as much as one second of every answer that runs
            on the serving endpoint. 0.1: simulated (docs/guides/disaggregation.md), 0.02 brings first
            tokens a tenth earlier and makes later tokens a sixth slower, 0.5 the reverse.
    """

    kind: ClassVar[str] = "estimated-time-pd-decider"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.PREFIX})

    transfer_tokens_per_s: Annotated[float, msgspec.Meta(gt=0)] = 200_000.0
    transfer_ms: Annotated[float, msgspec.Meta(ge=0)] = 5.0
    others_share: Annotated[float, msgspec.Meta(ge=0)] = 0.1

    def find_reason_to_keep(self, decode: Decision) -> str:
        """Keep prompts that are cached as a whole."""
        return "" if decode.request.prompt_tokens > decode.matched_tokens else "cached"

    def compare(self, decode: Decision, part: Decision) -> str:
        """Keep a prompt that costs no more on the serving endpoint."""
        here_s, there_s = decode.predicted_ttft_s, part.predicted_ttft_s
        chosen = decode.find_chosen()
        if here_s is None or there_s is None or chosen is None:
            return ""
        candidate = decode.scored_candidates[chosen]
        uncached = decode.request.prompt_tokens - decode.matched_tokens
        prefill_s = uncached * candidate.rates.prefill_s
        here_s += self.others_share * candidate.estimated_requests * prefill_s
        transfer_s = self.transfer_ms / 1e3 + uncached / self.transfer_tokens_per_s
        return "slower" if there_s + transfer_s >= here_s else ""


class Stage(msgspec.Struct, frozen=True):
    """A stage that other endpoints than the serving one may do.

    Attributes:
        profile: Chooses the endpoint, or several for encode.
        decider: Says for each request whether another endpoint does the stage.
    """

    profile: SchedulerProfile
    decider: Decider

    def choose(
        self,
        context: SchedulingContext,
        groups: Sequence[Sequence[Candidate]],
        decode: Decision,
    ) -> tuple[Decision | None, str]:
        """Choose other endpoints for the stage; None and why where the serving one does it."""
        if reason := self.decider.find_reason_to_keep(decode):
            return None, reason
        reason = NO_ENDPOINT
        for candidates in groups:
            chosen = self.profile.run(context, candidates)
            if not isinstance(chosen, Decision):
                continue
            serving = decode.endpoints[0].host_port
            others = [e for e in chosen.endpoints if e.host_port != serving]
            if not others or others[0] is not chosen.endpoints[0]:
                reason = SAME_ENDPOINT
                continue
            if not (reason := self.decider.compare(decode, chosen)):
                return msgspec.structs.replace(chosen, endpoints=others), ""
        return None, reason


class DisaggregatedStages(msgspec.Struct, frozen=True):
    """The stages of a pool that other endpoints may do; None for one that the serving one does."""

    prefill: Stage | None = None
    encode: Stage | None = None

    @property
    def by_name(self) -> dict[str, Stage]:
        """The stages that there are, by name."""
        stages = msgspec.structs.asdict(self)
        return {name: stage for name, stage in stages.items() if stage is not None}

    @property
    def profiles(self) -> tuple[SchedulerProfile, ...]:
        """The profiles of the stages."""
        return tuple(stage.profile for stage in self.by_name.values())

    @property
    def needs(self) -> frozenset[Signal]:
        """Every signal that the profiles and the deciders read."""
        stages = self.by_name.values()
        return frozenset().union(*(stage.profile.needs | stage.decider.needs for stage in stages))

    def choose(
        self,
        context: SchedulingContext,
        groups: Sequence[Sequence[Candidate]],
        decode: Decision,
    ) -> Decision:
        """Add the endpoints of the stages to the decision for decode.

        Args:
            groups: Endpoints that the profiles of the stages choose among; those of the first group
                that leaves any.
        """
        stages, request, replace = Disaggregation(), context.request, msgspec.structs.replace
        if request.api not in _SPLIT_APIS:
            reasons = {f"{name}_reason": OTHER_API for name in self.by_name}
            return replace(decode, disaggregation=replace(stages, **reasons))
        context = replace(context, peer=decode.endpoints[0])
        if self.encode is not None:
            media = replace(request, prompt_tokens=0, prompt_bytes=0, max_tokens=1)
            alone = replace(context, request=media, blocks=())
            part, reason = self.encode.choose(alone, groups, decode)
            stages = replace(stages, encode=part, encode_reason=reason)
        rank = decode.endpoints[0].rank
        if rank is not None:  # the sidecar passes its header on
            groups = [[c for c in group if _has_rank(c, rank.index)] for group in groups]
        if self.prefill is not None:
            # Prefill ends with the first token.
            alone = replace(context, request=replace(request, max_tokens=1))
            part, reason = self.prefill.choose(alone, groups, decode)
            if part is not None:  # its header has a single endpoint
                part = replace(part, endpoints=part.endpoints[:1])
            stages = replace(stages, prefill=part, prefill_reason=reason)
        return replace(decode, disaggregation=stages)


def _has_rank(candidate: Candidate, index: int) -> bool:
    """True if an endpoint has the data-parallel rank of this number, or is no rank."""
    rank = candidate.endpoint.rank
    return rank is None or rank.index == index
