"""Estimated time, the cost of `adaptive`: seconds a request waits, and makes others wait.

A cost model takes the place of the scorers: it has no weights, because its terms are of one unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from extproc.decision import CostResult, Decision
from extproc.endpoint import ADAPTER_LOAD_SHARES, AdapterResidency, Candidate, Endpoint
from extproc.scheduling.encoder_caches import KEPT_TOKENS, EncoderCaches
from extproc.scheduling.engine_waits import (
    FRESH_RATIO,
    SHORTEST_ANSWER_S,
    MeanUncachedTokens,
    batch_wait_s,
    memory_waits_s,
    unseen_share,
)
from extproc.scheduling.framework import NonNegative, PluginParameters, SchedulingContext, Signal
from extproc.scheduling.lazy_sequence import LazySequence

#: What costs are made of, in the order they are added up.
_TERMS = (
    "queue",
    "prefill",
    "iteration",
    "adapter",
    "memory",
    "batch",
    "slowdown",
    "waiting",
    "waste",
    "crowding",
)

#: The first of these are what the request itself waits for until its first token (count).
_OWN_TERMS = 6

#: Iterations until a first token: half of the one under way, and the one that computes the prompt.
_ITERATIONS = 1.5

#: Factors of the weights of seconds after the first token, by goal. What they come to:
#: docs/concepts/adaptive.md#goals.
GOALS: Mapping[str, float] = {"first-token": 0.0, "balanced": 1.0, "throughput": 10.0}

# Looking a member up in its enum takes as long as all the rest of a comparison.
_RESIDENT, _IDLE, _FULL = AdapterResidency.RESIDENT, AdapterResidency.IDLE, AdapterResidency.FULL


#: Inputs of the cost terms besides the candidate: tokens, o, r, growth, 1 + w, m*, waste, 1/v, the
#: waste of an adapter, seconds since the first request, and tokens by which encoding makes it longer,
#: by address. A plain tuple: every request makes one, and a named one takes ten times as long.
_RequestTerms: TypeAlias = tuple[
    int,
    float,
    float,
    float,
    float,
    float,
    int,
    float,
    float,
    float,
    float,
    Mapping[str, float] | None,
]


class EstimatedTime(PluginParameters, frozen=True, dict=True, kw_only=True):
    """Sum in s: queue, prefill, iteration, adapter, memory, batch, slowdown, waiting, waste, crowding.

    For a request of L prompt tokens, m of them cached on the candidate, with p = `prefill_s`,
    d = `decode_s` and the time of the usual context, both of one sequence and iteration, o expected
    answer tokens, z those of the usual answer (o <= z, by `max_tokens`) and l the load time of its
    adapter, 0 where that is resident, on a candidate with Q queued tokens and n requests (own ones
    now, others' as of the last scrape):

    - queue = Q p: work that is there already.
    - prefill = u p with u = L - m, at least one token; of media that neither the cached prefix covers
      nor the endpoint was sent lately, `encoder_share` of their tokens come to u.
    - iteration = 1.5 s with s = `StepTimeModel.iteration_s(n)`, the seconds between tokens: the half that
      is left, on average, of the iteration under way, and the one that computes the prompt.
    - adapter = l; where every slot is in use also the wait for one, half an answer at the present
      speed.
    - memory = z s max(0, (k + u + o/2 + n z/2) / K - 1), k the tokens held of K:
      nothing until the cache will be full, as answers that are there grow; then the
      time until they free what is missing. k is what the scrape says plus what was sent since, at
      least the prompts of the open requests, as those that wait hold nothing yet and cached prefixes
      are not in use until they run, and at most what the requests can hold, as a late scrape does not
      show which have ended: half an answer each, and the prompts of ours. Where those that ran at the
      scrape held more, that counts by z s / (z s + a), a the age of the scrape: most of those that run have
      long answers. Where the conversation lives m counts with u, as prefixes are not in use until then.
    - batch = z s max(0, n + 1 - b) / b, b the requests that run there at a time (`max_num_seqs`) and s
      the iteration with b: a request beyond them waits until as many answers have ended. Nothing while
      the engine has not shown b.
    - slowdown = n (`own_share` o d + `others_share` (u p + o d + l)): this answer's own tokens come
      slower in a larger batch, and every answer in it waits for this prefill, this adapter and one
      more sequence in each iteration.
    - waiting = `waiting_share` q (u p + l) with q = min(n, Q / v) and v the mean of u over the latest
      requests: those who wait for their first token wait for this prefill and this adapter as well,
      because iterations have them together with theirs, or as many more come after it. q is at least
      i e e for i own requests, e = a / (a + z s + u p) with a the age of the scrape, or the time since
      the first request where that is less, and s an iteration without others: the share of requests
      that came after it, twice, because Q is an estimate where neither a scrape nor an answer has
      confirmed it. What is not seen is taken to wait; others' requests are as the scrape shows them. A
      scrape younger than a tenth of z s + u p counts as of now, and e rises from 0 there. Where memory
      stalls, z s ((1 - h) (u + o/2) + h (1 + w) (u + o/2 + m)) / K besides, h the share of what is
      evicted that has copies on the host, and m only where the conversation lives: the next request
      waits for what this one takes; of copies m may have to be loaded, and those w that wait for
      memory already wait as well.
    - waste = `waste_share` (n + w) ((m* - m) p + l), with w of the n requests waiting for the batch, m*
      the most tokens cached on any candidate, and l only where another candidate has the adapter: work
      that need not be done delays those who run, those who wait, and as many later ones. Less by the
      share of requests that other pickers sent: they may have copied the prefix to where we know
      nothing of it.
    - crowding = `crowding` r K p' v((A + u + g) / K) (u + g) / (L + g), not where the prompt went that
      this one goes on from, or beside other pickers where all of them expect it. Of a conversation
      that is cached there in part, only the rest moves in. A is the prompt tokens of the open
      requests there, those of others taken to be like ours, and what they will grow by, as this one
      will by g: young conversations grow to the size of the others. r is the share of requests that
      go on from an earlier one. v rises from 0 at `crowding_start` to 1 where the cache is full and
      falls to 0 at `crowding_end`: as long as the prefixes of all fit, one more costs nothing; the one that
      no longer fits makes the others miss in context, since what was used longest ago is evicted first;
      where they miss anyway, or the engine never found anything, one more is no loss. So
      conversations that do not fit gather on few endpoints, and the other endpoints keep their
      caches. Where no request waits for the batch v rises with (1 + w) A in place of A, w the
      conversations whose users read or think for each open request: what they go on from has to stay
      as well. p' is p, or less where the engine loads copies of what it evicted
      (`StepTimeModel.evicted_s`).

    The form of an iteration is that of docs/spec/engines.md#iteration-time. An unknown value costs
    nothing, on every endpoint alike.

    Attributes:
        goal: What counts more: first tokens, or whole answers and with them throughput. Seconds after
            the first token, `own_share` and `others_share`, count nothing with `first-token`, as they
            are with `balanced`, and ten times as much with `throughput`.
        own_share: Seconds of a slower answer that weigh as much as one second of a later first
            token. Simulated, 0.2 brings first tokens of prompts that share nothing 7 % later; with
            0.05 full engines answer 5 % less, as their batches grow unlike.
        others_share: Seconds of this request that weigh as much as one second of all requests
            beside it. Waits spread over running answers hurt less than a late first token.
        waiting_share: The same for those who wait for their first token. 1: a second is a second
            in every request. Simulated, 0 brings first tokens of prompts that share nothing 2 % later on
            average and 5 % later at p99.
        waste_share: The same for work that another endpoint has done already. 1, as for those who wait:
            simulated, 0.4 brings first tokens of 3,200 chats that hardly fit a fifth later, and those of
            random traffic 2 %. A prefix that all want is still copied.
        crowding: Times a whole cache is computed again because of one conversation too many. It
            must outweigh what those wait who gather in one place (`waiting`): in simulated chats whose
            prefixes just do not fit, answers come a fifth later with 1.15 than with 3.
        crowding_start: Share of the cache up to which there is room for sure. Answers and the ends of prompts
            take the rest. Simulated chats have shorter tails the
            smaller it is; below 0.8 those whose conversations hardly grow lose throughput.
        crowding_end: Share from which nothing is found again.
        encoder_share: Seconds that encoding an image takes, for each of its prefill; 0.25 is little
            enough to cost nothing where none is saved (docs/concepts/media.md#encoder-caches).
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
            Signal.CONVERSATIONS,
        }
    )

    goal: Literal["first-token", "balanced", "throughput"] = "balanced"
    own_share: NonNegative = 0.07
    others_share: NonNegative = 0.02
    waiting_share: NonNegative = 1.0
    waste_share: NonNegative = 1.0
    crowding: NonNegative = 2.5
    crowding_start: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.8
    crowding_end: Annotated[float, msgspec.Meta(gt=1)] = 1.5
    encoder_share: NonNegative = 0.25

    def cost(  # noqa: C901, PLR0912, PLR0915 - one loop, written out
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> CostResult:
        terms = self._read_request(context, candidates)
        (
            tokens,
            answer,
            usual,
            continued,
            growth,
            conversations_per_open,
            best,
            wasted,
            per_request,
            reloaded,
            sending_s,
            media,
        ) = terms
        after = GOALS[self.goal]
        own, others, waiting = after * self.own_share, after * self.others_share, self.waiting_share
        first, half_usual, fresh = _ITERATIONS, 0.5 * usual, FRESH_RATIO * usual
        # Iterations that a sequence more makes longer: those until the first token, and those after.
        longer = _ITERATIONS + (own + others) * answer
        # Comparisons with a boolean take half as long as those with a number or a string.
        adapter, crowds = bool(context.adapter), continued > 0.0
        roomy = self.crowding_start
        costs: list[float] = []
        # `_parts` summed, written out: this runs for every candidate of every request, and calls
        # would take most of its time. So would arithmetic that mixes floats with integers.
        prompt_tokens = float(tokens or 1)
        half_answer = 0.5 * answer
        # The most memory that it wants anywhere: one token is computed of a prompt that is cached.
        most_tokens = 1.0 + prompt_tokens + half_answer + (max(media.values()) if media else 0.0)
        for c in candidates:
            rates = c.rates
            per_token = rates.prefill_s
            uncached = prompt_tokens
            matched = c.matched_tokens
            if matched:
                uncached = prompt_tokens - matched if matched < tokens else 1.0
            if media is not None:
                uncached += media[c.endpoint.address]
            work = uncached * per_token
            batch = c.estimated_requests
            per_sequence = rates.decode_s + rates.context_s * rates.context_tokens
            step_s = rates.step_s
            cost = work + first * step_s
            queued = c.queued_tokens
            if batch:
                cost += batch * (longer * per_sequence + others * work)
                if queued:
                    there = queued * per_request
                    if there > batch:  # noqa: PLR1730 - a call, as above
                        there = batch
                    cost += queued * per_token
                else:
                    there = 0.0
                age = c.age_s
                if age > sending_s:  # noqa: PLR1730
                    age = sending_s
                if age > fresh * step_s and (own_open := c.in_flight):
                    # `unseen_share`, written out.
                    alone = usual * step_s + work
                    if alone < SHORTEST_ANSWER_S:  # noqa: PLR1730
                        alone = SHORTEST_ANSWER_S
                    late = age - FRESH_RATIO * alone
                    if late > 0.0:
                        share = late / (alone + age)
                        unseen = own_open * (share * share)
                        if unseen > there:  # noqa: PLR1730
                            there = unseen
                if there:
                    cost += waiting * work * there
                places = rates.max_num_seqs
                if places is not None and batch >= places:
                    cost += batch_wait_s(c, usual)
            else:
                there = 0.0
                if queued:
                    cost += queued * per_token
            load = c.load
            if matched < best:
                delayed = batch + (load.waiting or 0.0)
                cost += wasted * delayed * (best - matched) * per_token
            if adapter:
                place = c.residency
                if place is not _RESIDENT and place is not _IDLE:
                    delayed = waiting * there
                    delayed += reloaded * (batch + (load.waiting or 0.0))
                    iteration = step_s + per_sequence * batch
                    cost += self._loading(c, usual * iteration, delayed)
            capacity = load.kv_capacity
            if capacity is not None:
                active = c.active_context_tokens
                held = load.kv_held + c.unscraped_tokens
                if held < active:  # noqa: PLR1730 - a call, as above
                    held = active
                if held + most_tokens + half_usual * batch > capacity:
                    wanted = uncached + half_answer + half_usual * batch
                    if c.conversation_local:
                        wanted += matched
                    stall, others_stall = memory_waits_s(c, wanted, usual, waiting)
                    cost += stall + others_stall
                if crowds:
                    held = conversations_per_open * active
                    own = c.in_flight
                    if batch - own > 0.0:  # to compare a float with an integer takes longer
                        held *= batch / (own or 1)
                    if held + uncached + growth > roomy * capacity:
                        cost += self._crowding(
                            continued, tokens + growth, conversations_per_open, c
                        )
            costs.append(cost)
        # Not the context: a reference to the decision would keep the prompt in memory.
        explanation = _Explanation(self, terms, candidates)
        return CostResult(self.kind, "s", costs, explanation, explanation)

    def _read_request(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> _RequestTerms:
        # How many tokens an answer has is up to the request, and so the same on every candidate.
        usual = candidates[0].rates.output_tokens if candidates else 0.0
        request, works = context.request, self._works
        most = request.max_tokens
        wasted = self.waste_share * (1.0 - context.foreign_share)
        reloaded = 0.0
        if context.adapter:
            for c in candidates:  # a generator takes twice as long
                if c.residency >= _IDLE:
                    reloaded = wasted
                    break
        return (
            request.prompt_tokens,
            usual if most is None else min(usual, float(most)),
            usual,
            context.continuation_ratio,
            context.expected_growth_tokens,
            1.0 + context.idle_conversations_per_open,
            _most_matched(context, candidates),
            wasted,
            works.per_request,
            reloaded,
            sending_s if (sending_s := context.now - works.began) > 0.0 else 0.0,
            self._encoder_caches.encoding_tokens(request, candidates) if request.media else None,
        )

    def on_committed(self, decision: Decision, now: float) -> None:
        """Learn how much of a prompt is computed."""
        if decision.request.media:
            self._encoder_caches.record_sent(decision)
        prompt_tokens, matched = decision.request.prompt_tokens, decision.matched_tokens
        if prompt_tokens:
            self._works.update(prompt_tokens - matched if matched < prompt_tokens else 1, now)

    def on_moved(self, decision: Decision, served: Endpoint, now: float) -> None:
        """Learn which endpoint was sent the media of a request."""
        del now
        self._encoder_caches.record_moved(decision, served)

    @cached_property
    def _encoder_caches(self) -> EncoderCaches:
        return EncoderCaches(max_tokens=KEPT_TOKENS, share=self.encoder_share)

    @cached_property
    def _works(self) -> MeanUncachedTokens:
        return MeanUncachedTokens()

    def _loading(self, c: Candidate, answer_s: float, others_wait: float) -> float:
        """Seconds an adapter costs that is not there, to this request and to those beside it."""
        load = ADAPTER_LOAD_SHARES[c.residency] * c.rates.adapter_load_s
        wait = 0.5 * answer_s if c.residency is _FULL else 0.0
        others = GOALS[self.goal] * self.others_share
        return load + wait + (c.estimated_requests * others + others_wait) * load

    def list_terms(
        self, request_terms: _RequestTerms, candidates: Sequence[Candidate]
    ) -> Sequence[tuple[str, Sequence[float]]]:
        """Terms of the costs, by name; computed only when a decision is explained."""
        parts = [self._parts(request_terms, c) for c in candidates]
        return [(name, [values[i] for values in parts]) for i, name in enumerate(_TERMS)]

    def predict_ttft(self, request_terms: _RequestTerms, c: Candidate) -> float:
        """Seconds to the first token: the terms that the request waits for itself."""
        return sum(self._parts(request_terms, c)[:_OWN_TERMS])

    def _parts(self, request_terms: _RequestTerms, c: Candidate) -> tuple[float, ...]:
        """The terms of one candidate, in the order of `_TERMS`."""
        (
            tokens,
            answer,
            usual,
            continued,
            growth,
            conversations_per_open,
            best,
            wasted,
            per_request,
            reloaded,
            sending_s,
            media,
        ) = request_terms
        rates = c.rates
        uncached = max(1, tokens - c.matched_tokens) + (media[c.endpoint.address] if media else 0.0)
        prefill = uncached * rates.prefill_s
        decode = answer * (rates.decode_s + rates.context_s * rates.context_tokens)
        iteration = rates.iteration_s(c.estimated_requests)
        adapter = load = ADAPTER_LOAD_SHARES[c.residency] * rates.adapter_load_s
        slowdown = (
            GOALS[self.goal]
            * c.estimated_requests
            * (self.own_share * decode + self.others_share * (prefill + decode + load))
        )
        if c.residency is _FULL:
            adapter += 0.5 * usual * iteration
        delayed = c.estimated_requests + (c.load.waiting or 0.0)
        unseen = unseen_share(c.age_s, sending_s, usual * rates.step_s + prefill)
        first_tokens = max(
            min(c.estimated_requests, c.queued_tokens * per_request), c.in_flight * unseen
        )
        wanted = uncached + 0.5 * (answer + usual * c.estimated_requests)
        if c.conversation_local:
            wanted += c.matched_tokens
        stall, others_stall = memory_waits_s(c, wanted, usual, self.waiting_share)
        waste = wasted * max(0, best - c.matched_tokens) * rates.prefill_s + reloaded * load
        return (
            c.queued_tokens * rates.prefill_s,
            prefill,
            _ITERATIONS * iteration,
            adapter,
            stall,
            batch_wait_s(c, usual),
            slowdown,
            self.waiting_share * first_tokens * (prefill + load) + others_stall,
            delayed * waste,
            self._crowding(continued, tokens + growth, conversations_per_open, c),
        )

    def _crowding(
        self, continued: float, tokens: float, conversations_per_open: float, c: Candidate
    ) -> float:
        """Seconds others lose when this conversation moves in; see the class."""
        capacity = c.load.kv_tokens
        if c.conversation_local or not capacity or c.load.kv_usage is None:
            return 0.0
        if not c.load.prefix_hits:
            return 0.0  # it does not cache prefixes, or that is unknown
        uncached = max(1.0, tokens - c.matched_tokens)
        # Requests of other pickers hold as much each as ours do, but what many begin with once: so
        # no more than the page says.
        held = c.active_context_tokens * c.estimated_requests / c.in_flight if c.in_flight else 0.0
        if c.estimated_requests > c.in_flight:
            shown = c.load.kv_usage * capacity + c.unscraped_tokens
            held = max(c.active_context_tokens, min(held, shown))
        share = (held + uncached) / capacity
        # Where requests wait for the batch, the cache is full of those who run.
        wanted = share if c.load.waiting else (conversations_per_open * held + uncached) / capacity
        if wanted <= self.crowding_start or share >= self.crowding_end:
            return 0.0
        rises = (wanted - self.crowding_start) / (1.0 - self.crowding_start)
        falls = (self.crowding_end - share) / (self.crowding_end - 1.0)
        value = min(1.0, rises, falls)
        moving = uncached / tokens if tokens > 1.0 else 1.0
        return self.crowding * continued * moving * capacity * c.rates.evicted_s * value


class _Explanation(LazySequence[tuple[str, Sequence[float]]]):
    """Terms of the costs, computed when a decision is explained; called, it predicts first tokens.

    One object for both: every open request has one.
    """

    __slots__ = ("_candidates", "_cost_model", "_request_terms")

    def __init__(
        self,
        cost_model: EstimatedTime,
        request_terms: _RequestTerms,
        candidates: Sequence[Candidate],
    ) -> None:
        # Without the constructor of the base, whose function would refer to this object.
        self._items_built = None
        self._cost_model = cost_model
        self._request_terms = request_terms
        self._candidates = candidates

    def _build_items(self) -> Sequence[tuple[str, Sequence[float]]]:
        return self._cost_model.list_terms(self._request_terms, self._candidates)

    def __call__(self, candidate: Candidate) -> float:
        """Predict the seconds to the first token of a candidate."""
        return self._cost_model.predict_ttft(self._request_terms, candidate)


def _most_matched(context: SchedulingContext, candidates: Sequence[Candidate]) -> int:
    """Prompt tokens cached where most of them are; 0 where several endpoints have as many."""
    if not context.blocks:
        return 0
    matched = [c.matched_tokens for c in candidates]
    most = max(matched)
    if not most or matched.count(most) > 1:
        return 0
    return min(most, context.request.prompt_tokens)
