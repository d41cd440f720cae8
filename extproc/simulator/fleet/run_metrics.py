"""Metrics of one run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.replica_lifetimes import ScalingSummary
from extproc.simulator.fleet.sim_request import SimRequest

#: Gaps between tokens are counted in bins this much apart (ratio); percentiles are as exact.
_BIN = math.log(1.01)

#: Failure of a request that is open when a simulation ends.
UNFINISHED: Final = "unfinished"


class DistributionSummary(msgspec.Struct, frozen=True):
    """A distribution in a few numbers; NaN where there is nothing.

    Attributes:
        mean: Mean of all values. All attributes have the unit of the values.
        p50: Median.
        p90: 90th percentile.
        p95: 95th percentile.
        p99: 99th percentile.
    """

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


class PerEndpoint(msgspec.Struct, frozen=True):
    """Metrics of one engine, of a run or as means over seeds.

    Attributes:
        requests: Requests it was sent (count).
        prompt_tokens: Prompt tokens of these requests.
        hit_ratio: Share of their prompt tokens that its cache had.
        preemptions: Recomputed sequences.
    """

    requests: float
    prompt_tokens: float
    hit_ratio: float
    preemptions: float


class RejectionSummary(msgspec.Struct, frozen=True):
    """Rejected requests and their `Retry-After` values.

    Attributes:
        rejected: Requests that were rejected with a Retry-After (count).
        latest_s: Seconds until the last of them was refused; 0 where none was.
        retry_after_s: Values of `Retry-After`, in seconds.
        retry_after_most_s: The longest of it; 0 where there is none.
    """

    rejected: int
    latest_s: float
    retry_after_s: DistributionSummary
    retry_after_most_s: int


class RunSummary(msgspec.Struct, frozen=True):
    """One run. Times in seconds, throughput per second from the first sending to the last answer.

    Attributes:
        duration_s: From the first sending to the last answer.
        requests: Answered requests.
        failed: Failed requests by reason, `unfinished` ones too.
        requests_per_s: Answered requests.
        output_tokens_per_s: Tokens of answers.
        total_tokens_per_s: Tokens of prompts and answers.
        ttft_s: Time to first token.
        tpot_s: Time per output token after the first.
        itl_s: Time between tokens, every gap for itself.
        e2e_s: Time to the last token.
        token_s: Time to the last token per token: what llmperf calls inter-token latency.
        hit_ratio: Share of prompt tokens that engines had cached.
        predicted_ratio: `hit_ratio` as pickers predicted it.
        requests_max_over_mean: Most requests of one engine over the mean.
        tokens_max_over_mean: Most prompt tokens of one engine over the mean.
        held_s: Mean time in the client, before any other time begins: where it is not 0 the limit of
            the client, not the fleet, sets the pace. NaN where nothing says.
        ttft_quantiles_s: Time to first token at 0, 1, ..., 100 percent (nearest rank); empty when
            nothing was answered.
        scaling: What became of replicas; None where they are always there.
        refusals: Rejected requests; None where there are none.
    """

    duration_s: float
    requests: int
    failed: dict[str, int]
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: DistributionSummary
    tpot_s: DistributionSummary
    itl_s: DistributionSummary
    e2e_s: DistributionSummary
    token_s: DistributionSummary
    hit_ratio: float
    predicted_ratio: float
    requests_max_over_mean: float
    tokens_max_over_mean: float
    endpoints: Sequence[PerEndpoint]
    held_s: float = math.nan
    ttft_quantiles_s: Sequence[float] = ()
    scaling: ScalingSummary | None = None
    refusals: RejectionSummary | None = None


class RunMetrics:
    """Collects ended requests. Mutable; one owner.

    Args:
        since_s: Requests sent before are left out.

    Attributes:
        num_answered: Requests with an answer, also those sent before (count).
    """

    def __init__(self, since_s: float = 0.0) -> None:
        self._since_s = since_s
        self.num_answered = 0
        self.requests: list[SimRequest] = []
        self._bins: Counter[int] = Counter()
        self._gap_sum = 0.0
        self._gaps = 0
        self._preemptions: list[int] = []
        self._scaling: ScalingSummary | None = None

    def add(self, sim_request: SimRequest) -> None:
        """Add an ended request."""
        self.num_answered += not sim_request.failure
        if sim_request.sent_at >= self._since_s:
            self.requests.append(sim_request)

    def gaps(self, seconds: float, count: int) -> None:
        """Count `count` inter-token gaps of the same length."""
        self._bins[round(math.log(seconds) / _BIN)] += count
        self._gap_sum += seconds * count
        self._gaps += count

    def forget_gaps(self) -> None:
        """Discard the gaps of the warm-up."""
        self._bins.clear()
        self._gap_sum = 0.0
        self._gaps = 0

    def close(self, nodes: Sequence[EngineNode], scaling: ScalingSummary | None = None) -> None:
        """Record final preemptions and the scaling history."""
        self._scaling = scaling
        self._preemptions = [node.preemptions + node.engine.preemptions for node in nodes]

    def summary(self) -> RunSummary:
        """The run in numbers; `close` comes first."""
        done = [sim_request for sim_request in self.requests if not sim_request.failure]
        failed = Counter(
            sim_request.failure for sim_request in self.requests if sim_request.failure
        )
        begin = min((sim_request.sent_at for sim_request in self.requests), default=0.0)
        end = max((sim_request.sent_at + sim_request.took_s for sim_request in done), default=begin)
        duration = max(end - begin, 1e-9)
        outputs = sum(sim_request.work.output_tokens for sim_request in done)
        prompts = sum(sim_request.work.prompt_tokens for sim_request in done)
        endpoints = self._endpoints()
        return RunSummary(
            duration_s=duration,
            requests=len(done),
            failed=dict(failed),
            requests_per_s=len(done) / duration,
            output_tokens_per_s=outputs / duration,
            total_tokens_per_s=(outputs + prompts) / duration,
            ttft_s=spread([sim_request.first_s for sim_request in done]),
            tpot_s=spread(
                [
                    (sim_request.took_s - sim_request.first_s)
                    / (sim_request.work.output_tokens - 1)
                    for sim_request in done
                    if sim_request.work.output_tokens > 1
                ]
            ),
            itl_s=self._between(),
            e2e_s=spread([sim_request.took_s for sim_request in done]),
            token_s=spread(
                [sim_request.took_s / sim_request.work.output_tokens for sim_request in done]
            ),
            hit_ratio=_share(sum(sim_request.cached_tokens for sim_request in done), prompts),
            predicted_ratio=_share(
                sum(sim_request.predicted_tokens for sim_request in done), prompts
            ),
            requests_max_over_mean=_over_mean([endpoint.requests for endpoint in endpoints]),
            tokens_max_over_mean=_over_mean([endpoint.prompt_tokens for endpoint in endpoints]),
            endpoints=endpoints,
            held_s=math.fsum(sim_request.held_s for sim_request in done) / len(done)
            if done
            else math.nan,
            ttft_quantiles_s=quantiles([sim_request.first_s for sim_request in done]),
            scaling=self._scaling,
            refusals=_refusals(self.requests),
        )

    def _endpoints(self) -> list[PerEndpoint]:
        size = len(self._preemptions)
        requests, prompts, cached = [0] * size, [0] * size, [0] * size
        for sim_request in self.requests:
            if sim_request.node >= 0:
                requests[sim_request.node] += 1
                prompts[sim_request.node] += sim_request.work.prompt_tokens
                cached[sim_request.node] += sim_request.cached_tokens
        return [
            PerEndpoint(requests[n], prompts[n], _share(cached[n], prompts[n]), again)
            for n, again in enumerate(self._preemptions)
        ]

    def _between(self) -> DistributionSummary:
        wanted = [share * self._gaps for share in (0.5, 0.9, 0.95, 0.99)]
        quantiles: list[float] = []
        num_gaps = 0
        for place in sorted(self._bins):
            num_gaps += self._bins[place]
            while len(quantiles) < len(wanted) and num_gaps >= wanted[len(quantiles)]:
                quantiles.append(math.exp(place * _BIN))
        if not self._gaps:
            return spread([])
        return DistributionSummary(self._gap_sum / self._gaps, *quantiles)


def _refusals(sim_requests: Sequence[SimRequest]) -> RejectionSummary | None:
    refused = [sim_request for sim_request in sim_requests if not math.isnan(sim_request.refused_s)]
    if not refused:
        return None
    delays = [sim_request.retry_after_s for sim_request in refused if sim_request.retry_after_s]
    return RejectionSummary(
        rejected=len(delays),
        latest_s=max(sim_request.refused_s for sim_request in refused),
        retry_after_s=spread([float(seconds) for seconds in delays]),
        retry_after_most_s=max(delays, default=0),
    )


def spread(values: list[float]) -> DistributionSummary:
    """Mean and percentiles (nearest rank) of values in any order."""
    if not values:
        return DistributionSummary(math.nan, math.nan, math.nan, math.nan, math.nan)
    ordered = sorted(values)
    at = [_rank(ordered, percent) for percent in (50, 90, 95, 99)]
    return DistributionSummary(sum(ordered) / len(ordered), *at)


def quantiles(values: list[float]) -> list[float]:
    """Values at 0, 1, ..., 100 percent (nearest rank); empty where there is nothing."""
    ordered = sorted(values)
    return [_rank(ordered, percent) for percent in range(101)] if ordered else []


def _rank(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0


def _over_mean(values: Sequence[float]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else math.nan
