"""Seconds a request costs on each endpoint: its own wait, and what others wait because of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import msgspec

from extproc.decision import Late, Priced
from extproc.endpoint import Candidate, Residency
from extproc.scheduling.plugins import Signal
from extproc.scheduling.turn import Turn

#: What costs are made of, in the order they are added up.
_TERMS = ("queue", "prefill", "adapter", "memory", "slowdown")

#: Shares of an adapter's load time by residency, in the order of `Residency`: loading is due
#: unless it is there; nobody knows is half.
_TO_LOAD = (1.0, 1.0, 0.5, 1.0, 0.0, 0.0)

# Looking a member up in its enum takes as long as all the rest of a comparison.
_RESIDENT, _IDLE, _FULL = Residency.RESIDENT, Residency.IDLE, Residency.FULL


class EstimatedTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`cost = queue + prefill + adapter + memory + slowdown`, in seconds, from learnt rates.

    For a request of L prompt tokens, m of them cached on the candidate, with p = `prefill_s`,
    d = `decode_s` and o expected answer tokens, on a candidate with Q queued tokens and n requests
    (own ones now, others' as of the last scrape):

    - queue = Q p: work that is there already.
    - prefill = u p with u = L - m, at least one token.
    - adapter: the load time where the adapter is not resident; where every slot is in use also the
      wait for one, half an answer at the present speed.
    - memory = o s max(0, (k + u + o/2) / K - `kv_ceiling`), with s = `Rates.iteration_s(n)`
      the seconds between tokens, k the tokens held of K: nothing until the cache is full, then the time until
      running answers free what is missing. k is the smaller of what the scrape says plus what was
      sent since, and what the open requests can hold at most: a late scrape forgets those that
      ended.
    - slowdown = o d n + `others_share` n (u p + o d + adapter): this answer's own tokens come
      slower in a larger batch, and every answer in it waits for this prefill, this adapter and one
      more sequence in each iteration.

    The form of an iteration is that of engines report 5.1. Its context term is only in s: in the
    slowdown it would send requests away from prefixes (simulated first tokens 2 % later, a point of
    cache hits fewer). What nobody knows costs nothing, for everybody alike.

    Attributes:
        others_share: Seconds of this request that weigh as much as one second of all requests
            beside it. Waits spread over running answers hurt less than a late first token, and
            requests that only queue do not wait for it at all; simulated throughput and waits
            change by under 5 % between 0.15 and 0.5, and 0 loses a third of the cache hits.
        kv_ceiling: Share of the KV cache above which admission stalls. 0.97 leaves room for the
            answers that are growing.
    """

    kind: ClassVar[str] = "estimated-time"
    needs: ClassVar[frozenset[Signal]] = frozenset(
        {
            Signal.QUEUED,
            Signal.RATES,
            Signal.RESIDENCY,
            Signal.PREFIX,
            Signal.KV_USAGE,
            Signal.IN_FLIGHT,
        }
    )

    others_share: float = 0.3
    kv_ceiling: float = 0.97

    def price(self, turn: Turn, candidates: Sequence[Candidate]) -> Priced:
        """See the class."""
        tokens, most = turn.request.prompt_tokens, turn.request.max_tokens
        others, ceiling = self.others_share, self.kv_ceiling
        costs: list[float] = []
        add = costs.append
        # `_parts` summed, written out: this runs for every candidate of every request, and calls
        # would take most of its time. So would arithmetic that mixes floats with integers.
        whole = float(max(tokens, 1))
        longest = 0.0 if most is None else float(most)
        for c in candidates:
            rates = c.rates
            per_token = rates.prefill_s
            answer = rates.output_tokens
            if most is not None and longest < answer:
                answer = longest
            uncached = whole
            matched = c.matched_tokens
            if matched:
                uncached = float(tokens - matched) if matched < tokens else 1.0
            work = uncached * per_token
            decode = answer * rates.decode_s
            batch = c.requests
            cost = c.queued_tokens * per_token + work
            place = c.residency
            if place is _RESIDENT or place is _IDLE:
                slowdown = batch * (decode + others * (work + decode))
            else:
                adapter = _TO_LOAD[place] * rates.adapter_load_s
                slowdown = batch * (decode + others * (work + decode + adapter))
                if place is _FULL:
                    adapter += 0.5 * answer * rates.iteration_s(batch)
                cost += adapter
            load = c.load
            usage = load.kv_usage
            if usage is not None:
                blocks, size = load.kv_blocks, load.block_tokens
                if blocks and size:
                    capacity = blocks * size
                    wanted = uncached + 0.5 * answer
                    if usage * capacity + c.unseen_tokens + wanted > ceiling * capacity:
                        cost += self._stall(c, wanted, answer)
            add(cost + slowdown)
        return Priced(self.kind, "s", costs, Late(partial(self._terms, tokens, most, candidates)))

    def _terms(
        self, tokens: int, most: int | None, candidates: Sequence[Candidate]
    ) -> Sequence[tuple[str, Sequence[float]]]:
        """What costs are made of; only computed when somebody asks why."""
        parts = [self._parts(tokens, most, c) for c in candidates]
        return [(name, [each[i] for each in parts]) for i, name in enumerate(_TERMS)]

    def _parts(
        self, tokens: int, most: int | None, c: Candidate
    ) -> tuple[float, float, float, float, float]:
        """The terms of one candidate, in the order of `_TERMS`."""
        rates = c.rates
        answer = rates.output_tokens if most is None else min(rates.output_tokens, most)
        uncached = max(1, tokens - c.matched_tokens)
        prefill = uncached * rates.prefill_s
        decode = answer * rates.decode_s
        adapter = _TO_LOAD[c.residency] * rates.adapter_load_s
        slowdown = c.requests * (decode + self.others_share * (prefill + decode + adapter))
        if c.residency is _FULL:
            adapter += 0.5 * answer * rates.iteration_s(c.requests)
        memory = self._stall(c, uncached + 0.5 * answer, answer)
        return c.queued_tokens * rates.prefill_s, prefill, adapter, memory, slowdown

    def _stall(self, c: Candidate, wanted: float, answer: float) -> float:
        """Seconds until `wanted` more KV tokens are free; see the class."""
        usage, capacity = c.load.kv_usage, c.load.kv_tokens
        if usage is None or not capacity:
            return 0.0
        held = usage * capacity + c.unseen_tokens
        if held + wanted <= self.kv_ceiling * capacity:
            return 0.0
        if c.in_flight:
            mean = c.prompt_tokens / c.in_flight + 0.5 * answer
            held = min(held, c.requests * mean)
        excess = (held + wanted) / capacity - self.kv_ceiling
        if excess <= 0.0:
            return 0.0
        rates = c.rates
        return answer * rates.iteration_s(c.requests) * excess
