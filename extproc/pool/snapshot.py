"""Snapshot: the immutable state of all endpoints of a pool."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping, Sequence

import msgspec

from extproc.endpoint import (
    DEFAULT_STEP_TIMES,
    NO_LOAD,
    AdapterResidency,
    Candidate,
    Endpoint,
    Load,
    ServedModels,
    StepTimeModel,
)
from extproc.pool import plausibility
from extproc.pool.endpoint_health import HEALTHY, UNREACHABLE_AFTER, HealthState, HealthStatus
from extproc.pool.inflight import AdapterSlotState, InflightLoad
from extproc.pool.model_index import ModelIndex, ModelMatch


_DOUBTED = HealthState.SUSPECT
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
        endpoint: Its address and labels.
        account: Our own open requests there; the one part that moves between snapshots.
        load: The last scrape.
        foreign: Requests of others at that scrape: max(0, scraped - own).
        foreign_waiting: Of these, waiting.
        foreign_tokens: Uncached prompt tokens of those, at the usual work of a request.
        rates: How fast it is, as far as was learned.
        failures: Consecutive connection failures of the scraper.
        failure: The last scrape's failure, empty if it succeeded.
        models: The names it listed itself; None until it has.
        condition: Whether it takes part.
        flaws: What its last page lacks or gets wrong, bits of `plausibility`.
        progress: Since when its engine's counters stand as they do.
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
    def reachable(self) -> bool:
        """True when its last scrapes could connect, or none was tried."""
        return self.failures < UNREACHABLE_AFTER

    @property
    def up(self) -> bool:
        """True when scrapes or requests reach it, or nothing was tried."""
        return self.condition.state is not _DOWN

    @property
    def ejected(self) -> bool:
        """True when it is ejected: its requests fail, or it is out of reach."""
        return self.condition.state > _DOUBTED


class Pool(msgspec.Struct, frozen=True, gc=False):
    """All endpoints at one moment.

    Attributes:
        members: In the order discovery named them.
        positions: Address to index in `members`; the same object until the endpoints change.
        down: How many members are not up.
        unhealthy_or_doubtful: How many are not, or failed requests of late.
        newest: Monotonic seconds at which the last member came or came back; minus infinity when
            all were there from the start.
        adapters: Names known to be LoRA adapters.
        serving: Index of the models that members serve; the same object until endpoints or their models change.
        is_patchy: Whether pages differ in what they lack, or some are void however young they are.
    """

    members: tuple[EndpointSnapshot, ...]
    positions: Mapping[str, int]
    down: int = 0
    unhealthy_or_doubtful: int = 0
    newest: float = -math.inf
    adapters: frozenset[str] = frozenset()
    serving: ModelIndex = ModelIndex()
    is_patchy: bool = False

    def find(self, address: str) -> EndpointSnapshot | None:
        """The member at `ip:port`, if there is one."""
        at = self.positions.get(address)
        return None if at is None else self.members[at]

    def eligible(
        self, subset: Sequence[str] | None, split: ModelMatch | None = None
    ) -> Sequence[EndpointSnapshot]:
        """The members a request may go to and that take part, in pool order.

        When none of those it may go to takes part, the least bad ones do: those that can be
        reached, or all.

        Args:
            subset: As in `allowed`.
            split: As in `allowed`.
        """
        members = self.allowed(subset, split)
        return healthiest(members) if self.unhealthy_or_doubtful else members

    def allowed(
        self, subset: Sequence[str] | None, split: ModelMatch | None = None
    ) -> Sequence[EndpointSnapshot]:
        """The members a request may go to, whether they take part or not, in pool order.

        Args:
            subset: EPP protocol 004: None for no hint, else `ip:port` (one endpoint) or bare `ip`
                (all its ports) tokens; a token that matches no endpoint is ignored.
            split: Endpoints that serve the model, from `serving`; None for all.
        """
        members: Sequence[EndpointSnapshot] = self.members
        if split is not None:
            members = [self.members[at] for at in split.positions]
        if subset is not None:
            allowed = {normalize_token(token) for token in subset}
            members = [
                member
                for member in members
                if member.endpoint.address in allowed or member.endpoint.ip in allowed
            ]
        return members


def healthiest(members: Sequence[EndpointSnapshot]) -> Sequence[EndpointSnapshot]:
    """Members that are in; where none is, the best of suspect, ejected, out of reach."""
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
