"""Traffic and fleet of a recording, as the simulator takes them.

Prompts become keys of 16 tokens from the block hashes: two prompts share a key as far as they share
blocks. The end of a prompt behind its last full block is its own, except that the next turn of a
conversation repeats it, and the answer behind it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final

import msgspec

from extproc.endpoint import AdapterResidency, StepTimeModel
from extproc.errors import ConfigError
from extproc.prefix_cache.blocks import Schedule
from extproc.recording import rows
from extproc.recording.reader import (
    RecordedDecision,
    RecordedEnd,
    RecordedEndpoint,
)
from extproc.request import BYTES_PER_TOKEN
from extproc.simulator import replay_fleet
from extproc.simulator.fleet.picker import engine_address
from extproc.simulator.fleet.scenario import EngineGroup
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, SimSession

#: Requests that are read at most (count); a simulation takes some 0.3 ms and 5 kB for each.
MAX_REQUESTS: Final = 1_000_000

#: Seconds before the last decision after which an endpoint that was no candidate is taken to have left.
_LEFT_AFTER_S: Final = 60.0

#: Seconds of an iteration at least, by which the tokens of an answer are estimated.
_LEAST_ITERATION_S: Final = 1e-4

#: Seconds between two arrivals at most: a night without requests is simulated, a change of the clock not.
_MAX_GAP_S: Final = 86_400.0

_MIX: Final = 0x9E3779B97F4A7C15
_KEY_MASK: Final = (1 << 60) - 1


class TrafficRequest(msgspec.Struct, gc=False):
    """One request of a recording. Mutable while it is read.

    Attributes:
        at: Seconds from the first request to its arrival.
        spec: What it asks of an engine.
        answer_ended_s: Seconds from the first request to its end; None while unknown.
        ttft_s: Measured seconds from the arrival to the first token; None where unknown.
        node: Index of the engine that it went to, in the order of the fleet; -1 where that left.
    """

    at: float
    spec: RequestSpec
    answer_ended_s: float | None = None
    ttft_s: float | None = None
    node: int = -1


class Traffic(msgspec.Struct, frozen=True):
    """Requests to simulate, and what was measured of them.

    Attributes:
        requests: Requests by time of arrival.
        sessions: Sessions of the requests, by time of their beginning.
        places: Place of each request among those of all sessions, one session after the other.
        adapter_names: LoRA adapters they name.
        num_estimated: Requests whose tokens of the answer are estimated (count).
        num_open: Of these, requests whose end is not in the recording (count).
        num_failed: Requests left out because they failed (count).
        knows_max_tokens: Whether the limits of requests are the lengths of their answers.
    """

    requests: Sequence[TrafficRequest]
    sessions: Sequence[SimSession]
    places: Sequence[int] = ()
    adapter_names: frozenset[str] = frozenset()
    num_estimated: int = 0
    num_open: int = 0
    num_failed: int = 0
    knows_max_tokens: bool = False

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].at if self.requests else 0.0

    def sessions_as_recorded(self) -> list[SimSession]:
        """Each request as a session that begins when it came, and goes to the engine it went to.

        None waits for an answer: requests of users who wait would come in another order, which
        decisions of a rotation do not fit.
        """
        return [
            SimSession([msgspec.structs.replace(request.spec, node=request.node)], at=request.at)
            for request in self.requests
        ]

    def sessions_with_recorded_start(self) -> list[SimSession]:
        """The sessions; the first request of each model may only go to the engine it went to."""
        nodes: dict[int, int] = {}
        started: set[str] = set()
        for place, request in zip(self.places, self.requests, strict=True):
            if request.spec.adapter not in started:
                nodes[place] = request.node
                started.add(request.spec.adapter)
        places = itertools.count()
        return [
            msgspec.structs.replace(
                session,
                specs=[
                    msgspec.structs.replace(spec, node=nodes.get(next(places), -1))
                    for spec in session.specs
                ],
            )
            for session in self.sessions
        ]

    def split(self, ratio: float) -> tuple[TrafficPart, TrafficPart]:
        """The sessions that begin first, with a share `ratio` of the requests, and the others."""
        wanted = ratio * len(self.requests)
        place = num_requests = 0
        while place < len(self.sessions) and num_requests < wanted:
            num_requests += len(self.sessions[place].specs)
            place += 1
        first, second = self.sessions[:place], self.sessions[place:]
        return _part(first, self.adapter_names), _part(second, self.adapter_names)


class TrafficPart(msgspec.Struct, frozen=True):
    """Sessions that are simulated by themselves; attributes as in `Traffic`."""

    sessions: Sequence[SimSession]
    places: Sequence[int]
    adapter_names: frozenset[str]


def _part(sessions: Sequence[SimSession], adapter_names: frozenset[str]) -> TrafficPart:
    begin = (sessions[0].at or 0.0) if sessions else 0.0
    shifted = [
        msgspec.structs.replace(session, at=(session.at or 0.0) - begin) for session in sessions
    ]
    num_requests = sum(len(session.specs) for session in sessions)
    return TrafficPart(shifted, range(num_requests), adapter_names)


class _Observed(msgspec.Struct, gc=False):
    """A decision and its end, without candidates. Mutable while the recording is read.

    Attributes:
        address: The chosen endpoint.
        output_tokens: Expected tokens of the answer.
        ttft_s: Expected seconds to the first token.
        iteration_s: Expected seconds between tokens.
    """

    unix_s: float
    row: rows.DecisionRow
    address: str
    output_tokens: float
    ttft_s: float
    iteration_s: float
    end: rows.EndRow | None = None


class TrafficReader:
    """Collects the requests and endpoints of a recording. Mutable; one pass.

    Args:
        pool: Name of the pool; None takes the only one.
        max_requests: Requests to take; further ones are left out.

    Attributes:
        is_cold: Whether the picker had learned nothing when the recording began.
    """

    def __init__(self, *, pool: str | None, where: str, max_requests: int) -> None:
        self._pool = pool
        self._where = where
        self._max_requests = max_requests
        self._observed: dict[tuple[int, int], _Observed] = {}
        self._pools: Counter[str] = Counter()
        self._adapters: set[str] = set()
        self._candidate_s: dict[str, float] = {}
        self.is_cold = False

    def read(
        self, events: Iterable[RecordedDecision | RecordedEnd]
    ) -> Iterator[RecordedDecision | RecordedEnd]:
        """Take in events; yields those of the pool, as they are."""
        for event in events:
            if isinstance(event, RecordedEnd):
                observed = self._observed.get(event.key)
                if observed is not None:
                    observed.end = event.row
            elif not self._take(event):
                continue
            yield event

    def _take(self, event: RecordedDecision) -> bool:
        """Take in a decision; returns whether it is of the pool."""
        row = event.row
        self._pools[row.pool] += 1
        if (self._pool is not None and row.pool != self._pool) or (
            len(self._observed) >= self._max_requests
        ):
            return False
        chosen = event.chosen_candidate
        rates = StepTimeModel() if chosen is None else chosen.rates
        if not self._observed:
            self.is_cold = not rates.evidence
        iteration_s = rates.iteration_s(1.0 if chosen is None else chosen.estimated_requests + 1.0)
        uncached = max(1, row.prompt_tokens - row.matched_tokens)
        queued = 0.0 if chosen is None else chosen.queued_tokens
        for candidate in event.candidates:
            self._candidate_s[candidate.endpoint.address] = event.unix_s
        self._observed[event.key] = _Observed(
            event.unix_s,
            msgspec.structs.replace(row, candidates=None),
            event.chosen.address,
            rates.output_tokens,
            (uncached + queued) * rates.prefill_s + iteration_s,
            iteration_s,
        )
        if row.adapter:
            self._adapters.add(row.adapter)
        elif any(c.residency is not AdapterResidency.RESIDENT for c in event.candidates):
            self._adapters.add(row.model)
        return True

    def fleet(
        self, states: Iterable[RecordedEndpoint], limits: Mapping[str, float]
    ) -> list[EngineGroup]:
        """Engines with the step times that were learned of the endpoints.

        Args:
            states: Endpoints as of the end of the recording.
            limits: Numbers of an engine by field of its profile; they come before what was learned.
        """
        return replay_fleet.build_fleet(self._present(states), limits)

    def _present(self, states: Iterable[RecordedEndpoint]) -> list[RecordedEndpoint]:
        """Endpoints that had not left at the end of the recording, in the order of the fleet.

        Addresses of simulated engines have the same order as text, in which rotations walk.
        """
        times = self._candidate_s
        newest = max(times.values(), default=0.0)
        present = [
            state
            for state in states
            if newest - times.get(state.endpoint.address, -math.inf) <= _LEFT_AFTER_S
        ]
        present.sort(key=lambda state: state.endpoint.address)
        ranks = sorted(range(len(present)), key=engine_address)
        return [state for _, state in sorted(zip(ranks, present, strict=True), key=itemgetter(0))]

    def traffic(self, schedule: Schedule, states: Collection[RecordedEndpoint]) -> Traffic:
        """The requests, as the simulator takes them.

        Args:
            schedule: Block boundaries of the recorded prompts.
            states: Endpoints as of the end of the recording.

        Raises:
            ConfigError: There are several pools, not the one that was named, no requests, or a gap.
        """
        is_known = len(self._pools) <= 1 if self._pool is None else self._pool in self._pools
        if self._pools and not is_known:
            names = ", ".join(sorted(filter(None, self._pools)))
            raise ConfigError(
                "--pool",
                wanted=f"one of the pools of {self._where}: {names}"
                if names
                else f"no name of a pool, as {self._where} has one pool without a name",
                got="none" if self._pool is None else repr(self._pool),
                fix="name the pool to replay" if names else "remove the flag",
            )
        observed = sorted(self._observed.values(), key=lambda o: o.unix_s - o.row.queued_s)
        require_short_gaps([o.unix_s - o.row.queued_s for o in observed], self._where)
        answered = [o for o in observed if not _is_failed(o)]
        if not answered:
            raise ConfigError(
                self._where,
                wanted="requests that were answered",
                got=f"{len(observed)} requests without a response below 400"
                if observed
                else "no decision",
                fix="record while there is traffic",
            )
        loads = [state.load for state in states]
        adapters = self._adapters.union(
            *(load.adapters or () for load in loads),
            *(load.waiting_adapters or () for load in loads),
        )
        present = self._present(states)
        nodes = {state.endpoint.address: n for n, state in enumerate(present)}
        return _build_traffic(
            answered, schedule, adapters, nodes, num_failed=len(observed) - len(answered)
        )


def require_short_gaps(times_s: Sequence[float], where: str) -> None:
    """Refuse a gap in which a simulation would scrape idle engines for minutes.

    Args:
        times_s: Times of arrival, ascending.

    Raises:
        ConfigError: Two requests are too far apart.
    """
    for before_s, after_s in itertools.pairwise(times_s):
        if after_s - before_s > _MAX_GAP_S:
            raise ConfigError(
                where,
                wanted=f"requests at most {_MAX_GAP_S / 3600:.0f} hours apart",
                got=f"a gap of {(after_s - before_s) / 3600:.0f} hours",
                fix="replay the parts by themselves; --requests N takes the first N requests",
            )


def _is_failed(observed: _Observed) -> bool:
    end = observed.end
    return end is not None and (not end.status or end.status >= "4")


def _build_traffic(
    observed: Sequence[_Observed],
    schedule: Schedule,
    adapters: set[str],
    nodes: Mapping[str, int],
    *,
    num_failed: int,
) -> Traffic:
    begin = observed[0].unix_s - observed[0].row.queued_s
    keys = _KeyMaker(schedule)
    builder = SessionBuilder()
    requests: list[TrafficRequest] = []
    limits: list[bool] = []
    num_estimated = 0
    for n, item in enumerate(observed):
        row, end = item.row, item.end
        at = item.unix_s - row.queued_s - begin
        prompt_tokens = max(1, (end.prompt_tokens if end else None) or row.prompt_tokens)
        output_tokens = end.output_tokens if end else None
        if output_tokens is None:
            num_estimated += 1
            output_tokens = _estimate_output(item)
        elif row.max_tokens is not None:
            limits.append(output_tokens == row.max_tokens)
        adapter = row.adapter or (row.model if row.model in adapters else "")
        seed = row.affinity_seed
        spec = RequestSpec(
            prompt_tokens,
            max(1, output_tokens),
            keys.make(row, prompt_tokens, own=n),
            adapter=adapter,
            session=f"{row.session:x}" if row.session else "",
            opening=f"{seed:x}" if seed is not None else f"request {n}",
            priority=row.priority,
        )
        request = TrafficRequest(at, spec, node=nodes.get(item.address, -1))
        if end is not None:
            request.answer_ended_s = item.unix_s - begin + end.total_s
            if end.ttft_s is not None:
                request.ttft_s = row.queued_s + end.ttft_s
        builder.add(request, conversation=row.session or seed or 0, chain=row.chain)
        requests.append(request)
    return Traffic(
        requests,
        builder.sessions(),
        builder.places(requests),
        frozenset(adapters),
        num_estimated=num_estimated,
        num_open=sum(item.end is None for item in observed),
        num_failed=num_failed,
        knows_max_tokens=len(limits) > 0 and sum(limits) >= 0.9 * len(limits),
    )


def _estimate_output(item: _Observed) -> int:
    """Tokens of an answer, from its time and the time of an iteration; the usual ones without one."""
    end, limit = item.end, item.row.max_tokens
    if end is None:
        tokens = item.output_tokens
    else:
        ttft_s = item.ttft_s if end.ttft_s is None else end.ttft_s
        iterations = max(0.0, end.total_s - ttft_s) / max(_LEAST_ITERATION_S, item.iteration_s)
        tokens = 1.0 + iterations
    return max(1, round(tokens if limit is None else min(tokens, limit)))


class _KeyMaker:
    """Makes block keys of 16 tokens from chains of block hashes."""

    def __init__(self, schedule: Schedule) -> None:
        self._cuts = schedule.cuts

    def make(self, row: rows.DecisionRow, prompt_tokens: int, *, own: int) -> list[int]:
        """Keys of the full blocks of a prompt.

        Args:
            prompt_tokens: Length of the prompt.
            own: Number of the request, for the keys behind its last block hash.
        """
        cuts, chain = self._cuts, row.chain
        ratio = row.prompt_bytes / prompt_tokens if row.prompt_bytes else BYTES_PER_TOKEN
        keys: list[int] = []
        depth, offset = 0, 0
        for n in range(prompt_tokens // KEY_TOKENS):
            at = bisect_left(cuts, (n + 1) * KEY_TOKENS * ratio, lo=max(depth, 1))
            offset = offset + 1 if at == depth else 0
            depth = at
            base = chain[depth - 1] if depth <= len(chain) else own_key(own, depth)
            keys.append((base ^ offset * _MIX) & _KEY_MASK)
        return keys


def own_key(own: int, n: int) -> int:
    """Key that no other request has."""
    return ((own + 1) * _MIX ^ (n + 1) * 0xC2B2AE3D27D4EB4F) & _KEY_MASK


#: Seconds that a picker may see the end of an answer later than its client, who goes on at once.
_END_LATENESS_S = 0.1


class SessionBuilder:
    """Puts requests into sessions: a turn that came after the answer before it waits for it.

    So a slower fleet is asked later, as by people who read an answer before they go on.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, str], tuple[int, TrafficRequest, Sequence[int]]] = {}
        self._sessions: list[list[TrafficRequest]] = []

    def add(self, request: TrafficRequest, *, conversation: int, chain: Sequence[int]) -> None:
        """Add a request; they come by time of arrival.

        Args:
            conversation: What turns of a conversation have in common; 0 for nothing.
            chain: Block hashes of the prompt.
        """
        key = (conversation, request.spec.adapter)
        known = self._open.get(key) if conversation else None
        if known is not None:
            number, before, chain_before = known
            ended_s = before.answer_ended_s
            if ended_s is not None and ended_s <= request.at + _END_LATENESS_S:
                if len(chain) >= len(chain_before) and [*chain[: len(chain_before)]] == [
                    *chain_before
                ]:
                    before.spec = _with_answer(before.spec)
                    keys, known_keys = request.spec.keys, before.spec.keys
                    keys = [*known_keys[: len(keys)], *keys[len(known_keys) :]]
                    request.spec = msgspec.structs.replace(request.spec, keys=keys)
                self._sessions[number].append(request)
                self._open[key] = number, request, chain
                return
        self._sessions.append([request])
        if conversation:
            self._open[key] = len(self._sessions) - 1, request, chain

    def sessions(self) -> list[SimSession]:
        """The sessions, by time of their beginning."""
        return [
            SimSession(
                [request.spec for request in turns],
                [
                    max(0.0, after.at - (before.answer_ended_s or 0.0))
                    for before, after in itertools.pairwise(turns)
                ],
                turns[0].at,
            )
            for turns in self._sessions
        ]

    def places(self, requests: Sequence[TrafficRequest]) -> list[int]:
        """See `Traffic`."""
        in_turn = (request for turns in self._sessions for request in turns)
        place_of = {id(request): place for place, request in enumerate(in_turn)}
        return [place_of[id(request)] for request in requests]


def _with_answer(spec: RequestSpec) -> RequestSpec:
    """A request whose keys go on over its answer, which a later prompt repeats."""
    begin, end = len(spec.keys), (spec.prompt_tokens + spec.output_tokens) // KEY_TOKENS
    salt = spec.keys[-1] if begin else spec.prompt_tokens
    keys = [*spec.keys, *(own_key(salt, n) for n in range(begin, end))]
    return msgspec.structs.replace(spec, keys=keys)
