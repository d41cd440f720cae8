"""Traffic and fleet of a recording, as the simulator takes them.

Prompts become keys of 16 tokens from the block hashes: two prompts share a key as far as they share
blocks. The end of a prompt behind its last full block is its own, except that the next turn of a
conversation repeats it, and the answer behind it as far as its engine found it in its cache.
"""

from __future__ import annotations

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
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec
from extproc.simulator.traffic import (
    SessionBuilder,
    Traffic,
    TrafficRequest,
    inner_key,
    own_key,
    require_short_gaps,
)

#: Seconds after which an endpoint that is no candidate for a model any more is taken to have left.
_LEFT_AFTER_S: Final = 60.0

#: Tokens of a prompt and of an answer at most, far more than engines take: a wrong usage fills no memory.
_MOST_TOKENS: Final = 10_000_000

#: Seconds of an iteration at least, by which the tokens of an answer are estimated.
_LEAST_ITERATION_S: Final = 1e-4


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
        self._candidates_s: dict[str, float] = {}
        self._last_used: dict[str, tuple[float, str]] = {}
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
        target = row.adapter or row.model
        if event.candidates:
            self._candidates_s[target] = event.unix_s
        for endpoint in (event.chosen, *[c.endpoint for c in event.candidates]):
            self._last_used[endpoint.address] = event.unix_s, target
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

        One has left if it is missing among the last candidates for the model that it served last: there
        may be no request for that model since. Addresses of simulated engines have the same order as
        text, in which rotations walk.
        """
        present = [state for state in states if self._is_present(state.endpoint.address)]
        present.sort(key=lambda state: state.endpoint.address)
        ranks = sorted(range(len(present)), key=engine_address)
        return [state for _, state in sorted(zip(ranks, present, strict=True), key=itemgetter(0))]

    def _is_present(self, address: str) -> bool:
        used = self._last_used.get(address)
        # Without candidates in the recording, nothing of endpoints is known.
        if used is None or not self._candidates_s:
            return False
        used_s, target = used
        return self._candidates_s.get(target, used_s) - used_s <= _LEFT_AFTER_S

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
        prompt_tokens = (end.prompt_tokens if end else None) or row.prompt_tokens
        prompt_tokens = min(max(1, prompt_tokens), _MOST_TOKENS)
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
            min(max(1, output_tokens), _MOST_TOKENS),
            keys.make(row, prompt_tokens, own=n),
            adapter=adapter,
            session=f"{row.session:x}" if row.session else "",
            opening=f"{seed:x}" if seed is not None else f"request {n}",
            priority=row.priority,
            model=row.model,
            profile=row.profile,
        )
        request = TrafficRequest(
            at,
            spec,
            answer_ended_s=None if end is None else item.unix_s - begin + end.total_s,
            ttft_s=None if end is None or end.ttft_s is None else row.queued_s + end.ttft_s,
            node=nodes.get(item.address, -1),
            cached_tokens=end.cached_tokens if end else None,
        )
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
            keys.append(inner_key(base, offset))
        return keys
