"""Snapshot: the immutable state of all endpoints of a pool, and the index of their models.

A `ModelIndex` stands for as long as neither the endpoints nor their lists change, which is much
longer than a snapshot: what is worked out for a name is looked up from then on.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec

from extproc.endpoint import (
    DEFAULT_STEP_TIMES,
    NO_LOAD,
    DataParallelRank,
    Endpoint,
    Load,
    ServedModels,
    StepTimeModel,
    rank_address,
)
from extproc.pool import plausibility
from extproc.pool.endpoint_health import HEALTHY, UNREACHABLE_AFTER, HealthState, HealthStatus
from extproc.pool.inflight import InflightLoad

#: Answers remembered (count), so that adapters times base models cannot grow without end.
_MAX_CACHED_NAMES: Final = 16_384

#: Characters of a `model_adapter` name that is looked at: two names of the longest kind.
_MAX_ALIAS_LENGTH: Final = 1025


class ModelMatch(msgspec.Struct, frozen=True, gc=False):
    """Endpoints of a pool that may serve a request, and the others.

    Attributes:
        positions: Positions in `Pool.members` of endpoints that list the name or whose list is
            unknown, ascending.
        others: Endpoints whose list lacks the name.
    """

    positions: tuple[int, ...]
    others: tuple[Endpoint, ...]


class Alias(msgspec.Struct, frozen=True, gc=False):
    """Base model and adapter that one combined name stands for."""

    base: str
    adapter: str


class ModelIndex:
    """Endpoints that serve a model or adapter name.

    Args:
        listed: The endpoints in pool order, each with the names it listed; None for unknown.
    """

    def __init__(self, listed: Sequence[tuple[Endpoint, ServedModels | None]] = ()) -> None:
        self._listed = listed
        self._known: dict[str | tuple[str, str], ModelMatch | None] = {"": None}
        self._aliases: dict[str, Alias] = {}

    def match(self, model: str, adapter: str = "") -> ModelMatch | None:
        """Split the endpoints by their ability to serve a request.

        An adapter that no engine lists says nothing, because engines that take it in a field of its
        own need not list it: then the model decides.

        Args:
            model: Model of the request; empty for a request without a model.
            adapter: The adapter, where it is named apart from the model.

        Returns:
            None when every endpoint may.
        """
        try:
            return self._known[(model, adapter) if adapter else model]
        except KeyError:
            return self._compute_match(model, adapter)

    def parse_kubeai_name(self, name: str) -> Alias | None:
        """Read a name as KubeAI's `model_adapter` (docs/spec/prior-systems.md#adapter-names).

        It is one if no engine lists it as it stands, and an engine lists the part before an underscore
        as a base model and the part behind it as an adapter; the first such underscore counts.
        """
        alias = self._aliases.get(name)
        if alias is not None:
            return alias
        if "_" not in name or len(name) > _MAX_ALIAS_LENGTH or name in self.names:
            return None
        at = name.find("_")
        while at > 0:
            base, adapter = name[:at], name[at + 1 :]
            if base in self.bases and any(
                _lists(served, base, adapter) for _, served in self._listed
            ):
                alias = Alias(base, adapter)
                if len(self._aliases) < _MAX_CACHED_NAMES:
                    self._aliases[name] = alias
                return alias
            at = name.find("_", at + 1)
        return None

    def parse_sglang_name(self, name: str) -> Alias | None:
        """Read a name as SGLang's `model:adapter`, which engines of that kind take as it is.

        It is one if no engine lists it as it stands, and the part before the first colon is a base
        model; SGLang need not list its adapters.
        """
        base, colon, adapter = name.partition(":")
        if not colon or base not in self.bases or name in self.names:
            return None
        return Alias(base, adapter)

    @cached_property
    def bases(self) -> frozenset[str]:
        """Every base model any endpoint lists."""
        return frozenset().union(
            *(served.bases for _, served in self._listed if served is not None)
        )

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name any endpoint lists."""
        return self.bases.union(
            *(served.adapters for _, served in self._listed if served is not None)
        )

    @cached_property
    def max_model_len(self) -> int | None:
        """Longest context of any endpoint, in tokens; None where one of them lists none."""
        longest = 0
        for _, served in self._listed:
            if served is None or served.max_model_len is None:
                return None
            longest = max(longest, served.max_model_len)
        return longest or None

    @cached_property
    def _unlisted(self) -> ModelMatch | None:
        """Match for a name that no engine lists: endpoints without a list, or all of them."""
        return self._split([served is None for _, served in self._listed])

    def _compute_match(self, model: str, adapter: str) -> ModelMatch | None:
        if adapter:
            listing = [_lists(served, model, adapter) for _, served in self._listed]
            if not any(listing):
                return self.match(model)
        elif model in self.names:
            listing = [served is not None and model in served for _, served in self._listed]
        else:
            return self._unlisted
        pairs = zip(self._listed, listing, strict=True)
        match = self._split([lists or served is None for (_, served), lists in pairs])
        if len(self._known) < _MAX_CACHED_NAMES:
            self._known[(model, adapter) if adapter else model] = match
        return match

    def _split(self, may: Sequence[bool]) -> ModelMatch | None:
        if all(may):
            return None
        return ModelMatch(
            positions=tuple([at for at, yes in enumerate(may) if yes]),
            others=tuple(
                [endpoint for (endpoint, _), yes in zip(self._listed, may, strict=True) if not yes]
            ),
        )


def _lists(models: ServedModels | None, model: str, adapter: str) -> bool:
    """True if an engine lists an adapter, and the base model where the request names it."""
    return (
        models is not None and adapter in models.adapters and (not model or model in models.bases)
    )


_SUSPECT = HealthState.SUSPECT
_DOWN = HealthState.DOWN

#: Order of preference where no endpoint is in.
_RANKS = {
    HealthState.HEALTHY: 0,
    HealthState.SUSPECT: 1,
    HealthState.PROBING: 2,
    HealthState.EJECTED: 2,
    HealthState.DOWN: 3,
}


class EndpointSnapshot(msgspec.Struct, frozen=True, gc=False):
    """One endpoint with what is known of it.

    Attributes:
        account: Our own open requests there; the one part that moves between snapshots.
        foreign: Requests of others at that scrape: max(0, scraped - own).
        foreign_waiting: Of the foreign requests, those that wait in the engine (count).
        foreign_tokens: Uncached prompt tokens of those, at the usual work of a request.
        failures: Consecutive connection failures of the scraper (count).
        failure: The last scrape's failure, empty if it succeeded.
        models: The names it listed itself; None until it has.
        flaws: Missing or implausible values of its last page, bits of `plausibility`.
        progress: First of the pages on which its engine's counters did not change.
    """

    endpoint: Endpoint
    account: InflightLoad
    load: Load = NO_LOAD
    foreign: float = 0.0
    foreign_waiting: float = 0.0
    foreign_tokens: float = 0.0
    rates: StepTimeModel = DEFAULT_STEP_TIMES
    failures: int = 0
    failure: str = ""
    models: ServedModels | None = None
    condition: HealthStatus = HEALTHY
    flaws: int = 0
    progress: plausibility.ServiceProgress = plausibility.NO_PROGRESS

    @property
    def serves(self) -> ServedModels | None:
        """Models it listed; those of discovery until it has; None while unknown."""
        return self.endpoint.models if self.models is None else self.models

    @property
    def is_reachable(self) -> bool:
        """True when its last scrapes could connect, or none was tried."""
        return self.failures < UNREACHABLE_AFTER

    @property
    def is_up(self) -> bool:
        """True when scrapes or requests reach it, or nothing was tried."""
        return self.condition.state is not _DOWN

    @property
    def is_ejected(self) -> bool:
        """True when it is ejected: its requests fail, or it is out of reach."""
        return self.condition.state > _SUSPECT

    def relabel(self, endpoint: Endpoint) -> EndpointSnapshot:
        """It with what discovery says now; its list of models is dropped where that differs."""
        known = self.endpoint
        renamed = msgspec.structs.replace(
            endpoint, incarnation=known.incarnation, engine=known.engine
        )
        if renamed == known:
            return self
        models = self.models if renamed.models == known.models else None
        return msgspec.structs.replace(self, endpoint=renamed, models=models)


class Pool(msgspec.Struct, frozen=True, gc=False):
    """All endpoints at one moment.

    Attributes:
        members: Endpoints in the order of discovery.
        positions: Address to index in `members`; the same object until the endpoints change.
        down: Members that are not up (count).
        unhealthy_or_doubtful: Members that are not healthy, or whose requests failed lately
            (count).
        newest: Monotonic seconds at which the last member came or came back; minus infinity when
            all were there from the start.
        adapters: Names known to be LoRA adapters.
        serving: Index of the models that members serve; the same object until endpoints or their models change.
        has_unknown_values: Whether pages differ in what they lack, or some are void however young they are.
    """

    members: tuple[EndpointSnapshot, ...]
    positions: Mapping[str, int]
    down: int = 0
    unhealthy_or_doubtful: int = 0
    newest: float = -math.inf
    adapters: frozenset[str] = frozenset()
    serving: ModelIndex = ModelIndex()
    has_unknown_values: bool = False

    def with_member(self, member: EndpointSnapshot, *, adapters: frozenset[str]) -> Pool:
        """With another load, models or failures of one member, in the same condition."""
        at = self.positions[member.endpoint.address]
        before = self.members[at]
        members = (*self.members[:at], member, *self.members[at + 1 :])
        return msgspec.structs.replace(
            self,
            members=members,
            adapters=adapters,
            serving=self.serving if before.serves is member.serves else _index_models(members),
            has_unknown_values=self.has_unknown_values
            if before.flaws == member.flaws
            else _is_patchy(members),
        )

    def adapter_of(self, model: str, adapter: str = "") -> str:
        """The LoRA adapter of a request for a model, and maybe an adapter; empty for a base model."""
        return adapter or (model if model in self.adapters else "")

    def find(self, address: str) -> EndpointSnapshot | None:
        """The member of this address, if there is one."""
        at = self.positions.get(address)
        return None if at is None else self.members[at]

    def has_incarnation(self, endpoint: Endpoint) -> bool:
        """True while this incarnation of an endpoint is a member."""
        member = self.find(endpoint.address)
        return member is not None and member.endpoint.incarnation == endpoint.incarnation

    def count_requests(self) -> int:
        """Open requests (count); one whose stages have endpoints of their own counts once."""
        return sum([m.account.in_flight - m.account.count_parts() for m in self.members])

    def ranks_at(self, host_port: str) -> Sequence[EndpointSnapshot]:
        """The members behind `ip:port`: an engine, or its data-parallel ranks in order; else none."""
        at = self.positions.get(host_port)
        if at is not None:
            return self.members[at : at + 1]
        at = self.positions.get(rank_address(host_port, 0))
        if at is None:
            return ()
        rank = self.members[at].endpoint.rank
        return self.members[at : at + (1 if rank is None else rank.count)]

    def find_served(
        self,
        host_port: str,
        rank: DataParallelRank | None,
        *,
        fallbacks: Sequence[Endpoint] = (),
    ) -> EndpointSnapshot | None:
        """The member behind `ip:port` that took a request; None for an unknown address.

        Args:
            rank: Rank that was sent along. None: an engine with ranks chose by itself, and the one
                with the fewest requests of ours stands for it.
            fallbacks: Endpoints that were named with the request; one that left the pool since then
                has an account of its own, which no other request sees.
        """
        ranks = self.ranks_at(host_port)
        for fallback in fallbacks:
            if fallback.host_port != host_port:
                continue
            if not ranks or ranks[0].endpoint.engine != fallback.engine:
                return EndpointSnapshot(fallback, InflightLoad(fallback))
        if rank is not None and rank.index < len(ranks):
            return ranks[rank.index]
        return min(ranks, key=lambda member: member.account.in_flight, default=None)

    def eligible(self, subset: Sequence[str] | None) -> Sequence[EndpointSnapshot]:
        """The members a request may go to and that take part, in pool order.

        When none of those it may go to takes part, the least bad ones do: those that can be
        reached, or all.
        """
        members = self.allowed(subset)
        return healthiest(members) if self.unhealthy_or_doubtful else members

    def allowed(
        self, subset: Sequence[str] | None, model_match: ModelMatch | None = None
    ) -> Sequence[EndpointSnapshot]:
        """The members a request may go to, whether they take part or not, in pool order.

        Args:
            subset: EPP protocol 004: None for no hint, else `ip:port` (one engine, with all its
                ranks) or bare `ip` (all its ports) tokens; a token that matches no endpoint is
                ignored.
            model_match: Endpoints that serve the model, from `serving`; None for all.
        """
        members: Sequence[EndpointSnapshot] = self.members
        if model_match is not None:
            members = [self.members[at] for at in model_match.positions]
        if subset is not None:
            allowed = {normalize_token(token) for token in subset}
            members = [
                member
                for member in members
                if member.endpoint.host_port in allowed or member.endpoint.ip in allowed
            ]
        return members


def healthiest(members: Sequence[EndpointSnapshot]) -> Sequence[EndpointSnapshot]:
    """Healthy members; without any, the best of suspect, ejected and unreachable ones."""
    best = min((_RANKS[member.condition.state] for member in members), default=0)
    return [member for member in members if _RANKS[member.condition.state] == best]


def normalize_token(token: str) -> str:
    """A subset token as endpoints are spelled: IPv6 in its shortest form, bare without brackets."""
    if token.count(":") < 2:
        return token
    host, bracket, port = token.rpartition("]")
    if not bracket:
        host, port = token, ""
    try:
        ip = ipaddress.IPv6Address(host.removeprefix("["))
    except ValueError:
        return token
    return f"[{ip}]{port}" if port else str(ip)


def build_pool(
    members: tuple[EndpointSnapshot, ...], *, newest: float, adapters: frozenset[str]
) -> Pool:
    """A pool of these members, any of which may be new."""
    return Pool(
        members=members,
        positions={member.endpoint.address: at for at, member in enumerate(members)},
        down=sum(not member.is_up for member in members),
        unhealthy_or_doubtful=sum(bool(member.condition.state) for member in members),
        newest=newest,
        adapters=adapters,
        serving=_index_models(members),
        has_unknown_values=_is_patchy(members),
    )


def _is_patchy(members: Sequence[EndpointSnapshot]) -> bool:
    """True if pages differ in the values they lack, or some are not plausible."""
    flaws = {member.flaws for member in members}
    return len(flaws) > 1 or any(flaw & plausibility.VOID for flaw in flaws)


def _index_models(members: Sequence[EndpointSnapshot]) -> ModelIndex:
    return ModelIndex([(member.endpoint, member.serves) for member in members])
