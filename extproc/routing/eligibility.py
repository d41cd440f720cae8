"""Eligibility: endpoints that the data plane allows, that serve the model and are healthy.

For flow control the same is known as bits of an int (`ModelBitsets`): bit n stands for the n-th
member.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.decision import (
    NO_ENDPOINTS,
    NO_ENDPOINTS_YET,
    Decision,
    Deferral,
    Rejection,
    model_not_found,
)
from extproc.endpoint import Endpoint
from extproc.pool import endpoint_health, snapshot
from extproc.pool.endpoint_health import HealthState
from extproc.pool.snapshot import EndpointSnapshot, ModelIndex, ModelMatch, Pool
from extproc.request import HttpRequest, InferenceRequest

#: Why endpoints are put aside.
FAILING: Final = "failing"
WARMING: Final = "warming"
PROBE: Final = "probe"

#: Reason, without endpoints, where all of them fail and the least bad are tried.
LEAST_BAD: Final = "least-bad"

#: A reason, and who was put aside for it.
ExclusionReason = tuple[str, Sequence[Endpoint]]


class EligibleEndpoints(msgspec.Struct, frozen=True, gc=False):
    """Endpoints that a request may be sent to, and the excluded endpoints by reason.

    Attributes:
        members: Eligible endpoints in pool order, at least one.
        excluded_by_model: Endpoints that do not serve the model.
        model_unlisted: No allowed endpoint lists the model, and all of them listed theirs.
        excluded_by_health: Further excluded endpoints by reason: `failing` for endpoints whose
            requests fail or that are out of reach, `warming` for recent endpoints in slow start;
            `least-bad`, with none, where all fail, or all that the profile may choose.
        overdue: Members that a request is to probe before it may go to the others; empty where there
            are no others.
        valid_until: Monotonic seconds before which the same snapshot gives the same endpoints to
            equal requests; minus infinity where it may not, because of chance or of a probe.
    """

    members: Sequence[EndpointSnapshot]
    excluded_by_model: Sequence[Endpoint] = ()
    model_unlisted: bool = False
    excluded_by_health: Sequence[ExclusionReason] = ()
    overdue: Sequence[EndpointSnapshot] = ()
    valid_until: float = -math.inf

    def with_exclusions(self, decision: Decision) -> Decision:
        """The decision with the excluded endpoints too; the same object where there are none."""
        if not (self.excluded_by_model or self.model_unlisted or self.excluded_by_health):
            return decision
        return msgspec.structs.replace(
            decision,
            excluded_by_model=self.excluded_by_model,
            model_unlisted=self.model_unlisted,
            excluded_by_health=(*self.excluded_by_health, *decision.excluded_by_health),
        )

    def with_least_bad(self, pool: Pool) -> EligibleEndpoints:
        """With the best of those that are excluded by health, which thereby are eligible."""
        excluded = {e.address for _, endpoints in self.excluded_by_health for e in endpoints}
        members = [m for m in pool.members if m.endpoint.address in excluded]
        best = {member.endpoint.address for member in snapshot.healthiest(members)}
        eligible = best.union(member.endpoint.address for member in self.members)
        left = [m.endpoint for m in members if m.endpoint.address not in best]
        return msgspec.structs.replace(
            self,
            members=[m for m in pool.members if m.endpoint.address in eligible],
            excluded_by_health=(*(((FAILING, left),) if left else ()), (LEAST_BAD, ())),
            overdue=(),
        )

    @property
    def has_excluded(self) -> bool:
        """True if endpoints are excluded by their health."""
        return any(endpoints for _, endpoints in self.excluded_by_health)


def find_eligible(
    pool: Pool,
    request: InferenceRequest,
    *,
    respect_subset: bool,
    reject_unlisted: bool,
    may_defer: bool,
    health: endpoint_health.OutlierDetectionSettings,
    now: float,
    rng: random.Random,
) -> EligibleEndpoints | Deferral | Rejection:
    """Find the endpoints that a request may be sent to.

    Args:
        request: Model, adapter and subset count.
        reject_unlisted: Reject models that no endpoint serves, if all served models are known.
        may_defer: Whether a request may wait for the first endpoint.

    Returns:
        The endpoints; a deferral or 503 when none is allowed, or 404.
    """
    subset = request.subset if respect_subset else None
    split = pool.serving.match(request.model, request.adapter)
    members = pool.allowed(subset, split)
    unlisted = False
    excluded_by_model: Sequence[Endpoint] = ()
    if members:
        excluded_by_model = _excluded_by_model(pool, subset, split)
    else:
        members = pool.allowed(subset)
        if not members:
            # An endpoint that comes helps only requests without a subset hint.
            return NO_ENDPOINTS_YET if may_defer and subset is None else NO_ENDPOINTS
        if reject_unlisted:
            return model_not_found(request.target, pool.serving.names)
        unlisted = True
    excluded_by_health: tuple[ExclusionReason, ...] = ()
    overdue: Sequence[EndpointSnapshot] = ()
    valid_until = math.inf
    if pool.unhealthy_or_doubtful:
        members, overdue, excluded_by_health, valid_until = _healthy(
            members, now, max_wait_s=health.base_s
        )
    if now - pool.newest < health.slow_start_s:
        members, waiting = _slow_start(members, now, health, rng, num_overdue=len(overdue))
        excluded_by_health += waiting
        valid_until = -math.inf
    return EligibleEndpoints(
        members, excluded_by_model, unlisted, excluded_by_health, overdue, valid_until
    )


def _healthy(
    members: Sequence[EndpointSnapshot], now: float, *, max_wait_s: float
) -> tuple[
    Sequence[EndpointSnapshot], Sequence[EndpointSnapshot], tuple[ExclusionReason, ...], float
]:
    """Members to choose from, those of them to probe, excluded ones by reason, and until when.

    One that no request has tried for `max_wait_s` since it was due is to be probed.
    """
    candidates: list[EndpointSnapshot] = []
    overdue: list[EndpointSnapshot] = []
    excluded: list[Endpoint] = []
    valid_until = math.inf
    for member in members:
        record = member.condition
        if record.state and record.until > now:
            excluded.append(member.endpoint)
            valid_until = min(valid_until, record.until)
            continue
        if record.state > HealthState.SUSPECT:
            probe_at = record.until + max_wait_s
            if probe_at <= now:
                overdue.append(member)
            else:
                valid_until = min(valid_until, probe_at)
        candidates.append(member)
    if not candidates:
        candidates = list(snapshot.healthiest(members))
        on_probe = {member.endpoint.address for member in candidates}
        excluded = [endpoint for endpoint in excluded if endpoint.address not in on_probe]
        if candidates:
            reasons = ((FAILING, excluded),) if excluded else ()
            return candidates, (), (*reasons, (LEAST_BAD, ())), valid_until
    reasons = ((FAILING, excluded),) if excluded else ()
    if len(overdue) == len(candidates):
        overdue = []
    return candidates, overdue, reasons, -math.inf if overdue else valid_until


def _slow_start(
    members: Sequence[EndpointSnapshot],
    now: float,
    health: endpoint_health.OutlierDetectionSettings,
    rng: random.Random,
    *,
    num_overdue: int,
) -> tuple[Sequence[EndpointSnapshot], tuple[ExclusionReason, ...]]:
    """Admit a recent endpoint as candidate with probability f + (1 - f) t / T.

    t is the seconds since it came or came back, T `slow_start_s`, f `slow_start_floor`. When chance
    would leave no endpoint, or only those to probe, all stay.
    """
    slow_start_s, floor = health.slow_start_s, health.slow_start_floor
    candidates: list[EndpointSnapshot] = []
    excluded: list[Endpoint] = []
    for member in members:
        age = now - member.condition.since
        if (
            age < slow_start_s
            and member.condition.state <= HealthState.SUSPECT
            and rng.random() >= floor + (1.0 - floor) * age / slow_start_s
        ):
            excluded.append(member.endpoint)
        else:
            candidates.append(member)
    if excluded and len(candidates) > num_overdue:
        return candidates, ((WARMING, excluded),)
    return members, ()


def _excluded_by_model(
    pool: Pool, subset: Sequence[str] | None, split: ModelMatch | None
) -> Sequence[Endpoint]:
    if split is None:
        return ()
    if subset is None:
        return split.others
    allowed = {member.endpoint.address for member in pool.allowed(subset)}
    return tuple([endpoint for endpoint in split.others if endpoint.address in allowed])


def choose_rescue(
    members: Sequence[EndpointSnapshot], raw: HttpRequest, *, why: str
) -> Decision | Rejection:
    """Choose the endpoint with least requests in flight, after routing failed with a bug.

    Args:
        members: Endpoints that the request may be sent to.
        why: Name of what was raised; put into the decision.
    """
    if not members:
        message = f"the decision failed ({why}) and there is no endpoint to fall to"
        return Rejection(500, message, cause="bug")
    chosen = min(members, key=lambda member: member.account.in_flight)
    return Decision(
        request=InferenceRequest(api="opaque", subset=raw.subset),
        endpoints=(chosen.endpoint,),
        picker="rescue",
        degraded=f"route raised {why}",
    )


class ModelBitsets:
    """Eligible endpoints as bits, regardless of load and health; see `eligibility`.

    It stands for as long as neither the endpoints nor their lists of models change.
    """

    def __init__(self, pool: Pool, *, respect_subset: bool, reject_unlisted: bool) -> None:
        self.serving: ModelIndex = pool.serving
        self._honors_subset = respect_subset
        self._rejects_unlisted = reject_unlisted
        self._all = (1 << len(pool.members)) - 1
        self._by_token: dict[str, int] = {}
        for at, member in enumerate(pool.members):
            self._by_token[member.endpoint.address] = 1 << at
        for at, member in enumerate(pool.members):
            endpoint = member.endpoint
            ranked = () if endpoint.rank is None else (endpoint.host_port,)
            for token in (endpoint.ip, *ranked):
                self._by_token[token] = self._by_token.get(token, 0) | 1 << at
        #: The last split and its bits: names that no endpoint lists share one.
        self._last: tuple[ModelMatch | None, int] = (None, self._all)

    def bits_for(self, model: str, adapter: str = "", subset: Sequence[str] | None = None) -> int:
        """Bits of the endpoints that a request may be sent to; 0 for none."""
        allowed = self._all
        if subset is not None and self._honors_subset:
            allowed = 0
            for token in subset:
                allowed |= self._by_token.get(snapshot.normalize_token(token), 0)
        split = self.serving.match(model, adapter)
        bits = allowed & self._bits(split)
        return bits or (0 if self._rejects_unlisted else allowed)

    def bits_of_addresses(self, addresses: Sequence[str]) -> int:
        """Bits of the endpoints of these addresses."""
        bits = 0
        for address in addresses:
            bits |= self._by_token.get(address, 0)
        return bits

    def _bits(self, split: ModelMatch | None) -> int:
        if split is None:
            return self._all
        if split is not self._last[0]:
            bits = 0
            for at in split.positions:
                bits |= 1 << at
            self._last = (split, bits)
        return self._last[1]
