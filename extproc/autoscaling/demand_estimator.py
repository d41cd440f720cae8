"""Estimates the demand of a scale target from counters of all endpoint pickers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from extproc.autoscaling.interface import Demand, Moment
from extproc.endpoint import DEFAULT_STEP_TIMES, StepTimeModel

_Positive = Annotated[float, msgspec.Meta(gt=0)]

#: Largest number of requests at one time, and largest total: sums over all pickers stay finite, and
#: a float counts by one up to 2**53.
MAX_REQUESTS: Final = 10_000_000
MAX_TOTAL: Final = 2.0**53

_Requests = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUESTS)]
_Total = Annotated[float, msgspec.Meta(ge=0, le=MAX_TOTAL)]

_NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Replicas = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

#: Share of what was known of answers that one more answer leaves; some fifty count.
_KEEP = 0.98

#: Busy replica seconds after which what was seen of throughput fades to 1/e, and those that the prior
#: of 1 is worth: with requests of half a minute, few end in less.
_FADE_S, _PRIOR_S = 1800.0, 300.0

#: Throughput beyond which something else was measured.
_LOWEST, _HIGHEST = 0.1, 10.0

#: Share of a new cold start in the mean.
_NEW = 0.5


class PickerCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of an endpoint picker for a target, exchanged as JSON; totals since its start.

    Numbers out of their ranges are refused where they are decoded.

    Attributes:
        held: Requests in its queue.
        in_flight: Requests it sent to endpoints and that have not ended.
        arrived: Requests that came (total), also those it held.
        prompt_tokens: Their uncached prompt tokens (total).
        answered: Requests that were answered (total).
        answer_tokens: Tokens of the answers (total).
    """

    held: _Requests = 0
    in_flight: _Requests = 0
    arrived: _Total = 0.0
    prompt_tokens: _Total = 0.0
    answered: _Total = 0.0
    answer_tokens: _Total = 0.0


class TargetObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas, scraped load and engine speed of a scale target.

    Attributes:
        spec: Replicas requested in its spec.
        available: Replicas that answer.
        waiting: Requests that wait in engines, as scraped.
        running: Requests in batches of engines, as scraped.
        rates: Step times of its engines; None while no engine has shown any.
        engines: Engines of a replica: its ports or data-parallel ranks (count); 0 while unknown.
    """

    spec: int
    available: int
    waiting: float = 0.0
    running: float = 0.0
    rates: StepTimeModel | None = None
    engines: int = 0


class EstimatorState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a `DemandEstimator`, JSON that another process can restore.

    Numbers out of their ranges are refused where they are decoded.

    Attributes:
        at: Monotonic seconds of the last reading, on the clock of its process; None before the
            first.
        counters: Last counters of every picker, with the time of each.
        rates: Step times of the engines, as last learned.
        engines: Engines of a replica, as last known.
        answers: Answers that count, fading; the prior is the first.
        answer_tokens: Tokens of these answers; None until the rates say how many the prior has.
        prompt_tokens: Mean uncached prompt tokens of a request.
        done: Work that busy replicas did, fading (token seconds).
        busy_s: Seconds they did it in.
        cold_start_s: Mean of the cold starts seen, or the prior.
        pressed: Replicas that had more than enough to do at the last reading; 0 for none.
        available: Replicas that answered then.
        spec: Replicas requested then.
        starting: Replicas that still start (count), by the monotonic seconds at which they were
            requested, the oldest first.
        most_available: Replicas that answered at one time while some start, at most.
    """

    at: Moment | None = None
    counters: Mapping[str, tuple[Moment, PickerCounters]] = {}
    rates: StepTimeModel = DEFAULT_STEP_TIMES
    engines: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1
    answers: _NotNegative = 1.0
    answer_tokens: _NotNegative | None = None
    prompt_tokens: _NotNegative = 0.0
    done: _NotNegative = 0.0
    busy_s: _NotNegative = 0.0
    cold_start_s: _NotNegative = 60.0
    pressed: _Replicas = 0
    available: _Replicas = 0
    spec: _Replicas = 0
    starting: tuple[tuple[Moment, _Replicas], ...] = ()
    most_available: _Replicas = 0


class EstimatorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of the demand estimation.

    Attributes:
        slowdown: Factor by which decoding may be slower than for a single request; it determines
            how many requests a replica should run at once. 2: half of the speed of a single
            request, and most of the throughput.
        concurrency: Requests that a replica runs at once, where that is fewer than `slowdown`
            allows. None: engines batch without a limit.
        request_s: Duration of a request until some were observed (seconds). 30 is long: a new
            target has rather too many replicas than too few, and the first few responses correct
            it.
        cold_start_s: Seconds from a raised replica count to the first response, until some were
            observed. 60: weights of a small model on a local disk.
        grace_s: Seconds for which the last counters of an unreachable replica of extproc count. 60:
            a restart.
    """

    slowdown: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    concurrency: Annotated[float, msgspec.Meta(ge=1)] | None = None
    request_s: _Positive = 30.0
    cold_start_s: _Positive = 60.0
    grace_s: Annotated[float, msgspec.Meta(ge=0)] = 60.0


class _PickerTotals(msgspec.Struct):
    """Sums of all pickers: current counts, and increments since the last reading."""

    held: int = 0
    in_flight: int = 0
    arrived: float = 0.0
    prompt_tokens: float = 0.0
    answered: float = 0.0
    answer_tokens: float = 0.0
    complete: bool = True
    is_missing_counts: bool = False


def concurrency(rates: StepTimeModel, *, slowdown: float, most: float = math.inf) -> float:
    """Number of concurrent requests at which tokens come `slowdown` times slower than alone.

    From `step_s + k B = slowdown (step_s + k)` with `k = decode_s + context_s context_tokens`:
    `B = slowdown + (slowdown - 1) step_s / k`.

    Args:
        slowdown: Factor by which a sequence may be slower than alone, 1 or more.
        most: Largest number of concurrent requests.
    """
    each_s = rates.decode_s + rates.context_s * rates.context_tokens
    if each_s <= 0:
        return max(1.0, most)
    return max(1.0, min(most, slowdown + (slowdown - 1) * rates.step_s / each_s))


def work(
    prompt_tokens: float, output_tokens: float, rates: StepTimeModel, *, at_once: float
) -> float:
    """Token seconds of a request: `prefill_s P + O iteration_s(B) / B`.

    Prefill has an iteration's time for itself; of an iteration that decodes, each of B sequences
    takes its share.

    Args:
        prompt_tokens: P, the uncached ones.
        output_tokens: O.
        at_once: B, requests the engine has.
    """
    shared_s = rates.iteration_s(at_once) / at_once
    return prompt_tokens * rates.prefill_s + output_tokens * shared_s


class DemandEstimator:
    """Estimates the demand of a scale target. Mutable; owned by its control loop.

    Args:
        gap_s: Seconds between two readings after which neither a cold start nor the throughput is
            learned from the time between them. Infinite where readings are never missed.
    """

    def __init__(self, settings: EstimatorSettings, *, gap_s: float = math.inf) -> None:
        self._settings = settings
        self._gap_s = gap_s
        self._learned = EstimatorState(cold_start_s=settings.cold_start_s)

    @property
    def state(self) -> EstimatorState:
        """Current state, for `restore` in another process."""
        return self._learned

    def restore(self, learned: EstimatorState, *, shift_s: float = 0.0) -> None:
        """Continue from the state of another process; `shift_s` as in `PolicyRunner.restore`."""
        self._learned = msgspec.structs.replace(
            learned,
            at=None if learned.at is None else learned.at + shift_s,
            starting=tuple([(at + shift_s, count) for at, count in learned.starting]),
            counters={
                name: (at + shift_s, counters) for name, (at, counters) in learned.counters.items()
            },
        )

    def read(
        self,
        now: float,
        pickers: Mapping[str, PickerCounters | None],
        observation: TargetObservation,
    ) -> Demand:
        """Estimate the current demand.

        Args:
            now: Monotonic seconds; must not go back.
            pickers: Counters of every picker there should be, by its name; None where they could
                not be read.
        """
        before = self._learned
        total, counters = self._summed(now, pickers)
        rates = observation.rates or before.rates
        # Rates are those of one engine; demand is of replicas, which may have several.
        engines = observation.engines or before.engines
        most = (self._settings.concurrency or math.inf) / engines
        at_once = concurrency(rates, slowdown=self._settings.slowdown, most=most)
        answers, answer_tokens = self._answers(total, rates, at_once=at_once)
        output = answer_tokens / answers if answers else 0.0
        prompt = self._mean_prompt_tokens(total)
        request_work = work(prompt, output, rates, at_once=at_once) / engines
        since = 0.0 if before.at is None else now - before.at
        came = work(total.prompt_tokens, total.arrived * output, rates, at_once=at_once) / engines
        queued = total.held + observation.waiting
        pressed = observation.available if queued >= max(1, observation.available * engines) else 0
        done, busy_s = self._throughput(total, since, pressed, request_work=request_work)
        cold_start_s, starting, most_available = self._cold_start(now, observation)
        self._learned = EstimatorState(
            at=now,
            counters=counters,
            rates=rates,
            engines=engines,
            answers=answers,
            answer_tokens=answer_tokens,
            prompt_tokens=prompt,
            done=done,
            busy_s=busy_s,
            cold_start_s=cold_start_s,
            pressed=pressed,
            available=observation.available,
            spec=observation.spec,
            starting=starting,
            most_available=most_available,
        )
        throughput = (_PRIOR_S + done) / (_PRIOR_S + busy_s)
        return Demand(
            now=now,
            spec=observation.spec,
            available=observation.available,
            held=total.held,
            in_flight=total.in_flight,
            waiting=observation.waiting,
            running=observation.running,
            arriving=came / since if since else 0.0,
            request_work=request_work,
            throughput=min(_HIGHEST, max(_LOWEST, throughput)),
            concurrency=at_once * engines,
            cold_start_s=cold_start_s,
            complete=total.complete,
            is_missing_counts=total.is_missing_counts,
        )

    def _mean_prompt_tokens(self, total: _PickerTotals) -> float:
        if not total.arrived:
            return self._learned.prompt_tokens
        share: float = _KEEP**total.arrived
        mean = total.prompt_tokens / total.arrived
        return share * self._learned.prompt_tokens + (1 - share) * mean

    def _answers(
        self, total: _PickerTotals, rates: StepTimeModel, *, at_once: float
    ) -> tuple[float, float]:
        """Count answers and their tokens, with exponentially decaying weights."""
        before, keep = self._learned, _KEEP**total.answered
        known = before.answer_tokens
        if known is None:
            known = self._settings.request_s / rates.iteration_s(at_once)
        return before.answers * keep + total.answered, known * keep + total.answer_tokens

    def _summed(
        self, now: float, pickers: Mapping[str, PickerCounters | None]
    ) -> tuple[_PickerTotals, dict[str, tuple[float, PickerCounters]]]:
        """Sum the counters of all pickers; also returns the latest counters by picker."""
        total, latest = _PickerTotals(), {}
        for name, new in pickers.items():
            last = self._learned.counters.get(name)
            if new is None:
                total.complete = False
                if last is not None and now - last[0] <= self._settings.grace_s:
                    latest[name] = last
                    total.held += last[1].held
                    total.in_flight += last[1].in_flight
                else:
                    total.is_missing_counts = True
                continue
            latest[name] = (now, new)
            total.held += new.held
            total.in_flight += new.in_flight
            # Of a picker that was never read, the past says nothing about now.
            old = new if last is None else last[1]
            # A picker that starts again has another name: a lower total is no new beginning.
            total.arrived += max(0.0, new.arrived - old.arrived)
            total.prompt_tokens += max(0.0, new.prompt_tokens - old.prompt_tokens)
            total.answered += max(0.0, new.answered - old.answered)
            total.answer_tokens += max(0.0, new.answer_tokens - old.answer_tokens)
        return total, latest

    def _throughput(
        self, total: _PickerTotals, since: float, pressed: int, *, request_work: float
    ) -> tuple[float, float]:
        """Work done and busy seconds, of replicas with a queue at both readings."""
        before = self._learned
        is_same = pressed == before.pressed > 0
        if not (is_same and total.complete and 0 < since <= self._gap_s):
            return before.done, before.busy_s
        busy_s = pressed * since
        keep = math.exp(-busy_s / _FADE_S)
        return before.done * keep + total.answered * request_work, before.busy_s * keep + busy_s

    def _cold_start(
        self, now: float, observation: TargetObservation
    ) -> tuple[float, tuple[tuple[float, int], ...], int]:
        """Mean cold start in seconds, and the other two as `starting` and `most_available`."""
        before, available = self._learned, observation.available
        starting, most = list(before.starting), before.most_available
        # In a gap, replicas may have been requested, and may have answered, at any time.
        is_timed = before.at is not None and now - before.at <= self._gap_s
        if observation.spec > before.spec and before.at is not None and is_timed:
            if not starting:
                most = before.available
            # The request came at some time since the last reading.
            starting.append((before.at, observation.spec - before.spec))
        mean_s = before.cold_start_s
        # One that was away for a moment and answers again did not start.
        answered = min(available - most, sum([count for _, count in starting]))
        if answered > 0:
            started, starting = _split(starting, answered)
            if is_timed:
                seen_s = sum([(now - at) * count for at, count in started])
                mean_s += _NEW * (seen_s / answered - mean_s)
        # Of replicas that are no longer wanted, those go that were requested last.
        starting = _split(starting, observation.spec - available)[0]
        if not starting and observation.spec <= available:
            return mean_s, (), available
        return mean_s, tuple(starting), max(most, available)


def _split(
    starting: Sequence[tuple[float, int]], first: int
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """The first so many replicas of `EstimatorState.starting`, and the others."""
    head: list[tuple[float, int]] = []
    tail: list[tuple[float, int]] = []
    for at, count in starting:
        taken = max(0, min(count, first))
        first -= taken
        if taken:
            head.append((at, taken))
        if taken < count:
            tail.append((at, count - taken))
    return head, tail
