"""Costs are computed at once, and their terms at the first explanation."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.decision import Decision
from extproc.endpoint import AdapterResidency, StepTimeModel
from extproc.request import InferenceRequest
from extproc.scheduling.estimated_time import GOALS, EstimatedTime
from extproc.testing import builders
from tests.scheduling.test_sweep import crowd, kinds_of_candidate, turns

NAMES = [
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
]


@given(
    kinds=st.lists(kinds_of_candidate, min_size=1, max_size=6),
    facts=turns,
    max_tokens=st.none() | st.integers(0, 2000),
    goal=st.sampled_from(sorted(GOALS)),
)
def test_terms_add_up_to_costs(kinds, facts, max_tokens, goal):
    """The sum of the terms is the cost, whatever the candidates and the goal."""
    candidates, context = crowd(kinds, len(kinds)), builders.context(**facts, max_tokens=max_tokens)
    if not context.adapter:  # there is nothing to load
        resident = AdapterResidency.RESIDENT
        candidates = [msgspec.structs.replace(c, residency=resident) for c in candidates]
    priced = EstimatedTime(goal=goal).cost(context, candidates)
    assert [name for name, _ in priced.terms] == NAMES
    columns = zip(*(values for _, values in priced.terms), strict=True)
    assert [sum(column) for column in columns] == pytest.approx(list(priced.costs), rel=1e-9)


def test_a_goal_weighs_what_comes_after_the_first_token():
    """With another goal the slowdown of answers counts differently, and nothing else does."""
    candidates = builders.candidates({"a": {"estimated_requests": 8, "queued_tokens": 500}})
    context = builders.context(1000)
    terms = {goal: dict(EstimatedTime(goal=goal).cost(context, candidates).terms) for goal in GOALS}
    (balanced,) = terms["balanced"].pop("slowdown")
    assert terms["first-token"].pop("slowdown") == [0.0]
    assert terms["throughput"].pop("slowdown") == pytest.approx([10.0 * balanced])
    assert balanced > 0.0
    assert terms["first-token"] == terms["throughput"] == terms["balanced"]


LOADS = (
    "estimated_requests",
    "queued_tokens",
    "unscraped_tokens",
    "waiting",
    "kv_usage",
    "own request",
)


@given(
    kinds=st.lists(kinds_of_candidate, min_size=2, max_size=6),
    facts=turns,
    signal=st.sampled_from(LOADS),
    more=st.floats(0.01, 100.0),
    data=st.data(),
)
def test_load_draws_no_requests(kinds, facts, signal, more, data):
    """An endpoint that has more to do costs more and the others the same, conversations apart.

    Those that do not fit gather in one place (`crowding`), which is load that draws them.
    """
    candidates = crowd(kinds, len(kinds))
    context = builders.context(**facts | {"continuation_ratio": 0.0})
    at = data.draw(st.integers(0, len(candidates) - 1), "at")
    loaded = candidates[at]
    if signal in ("waiting", "kv_usage"):
        value = getattr(loaded.load, signal)
        load = msgspec.structs.replace(loaded.load, **{signal: (value or 0.0) + more})
        # That nothing is known is no load; from then on more is.
        before = msgspec.structs.replace(loaded.load, **{signal: value or 0.0})
        candidates[at] = msgspec.structs.replace(loaded, load=before)
        loaded = msgspec.structs.replace(loaded, load=load)
    elif signal == "own request":
        tokens = int(100.0 * more)
        loaded = msgspec.structs.replace(
            loaded,
            in_flight=loaded.in_flight + 1,
            estimated_requests=loaded.estimated_requests + 1.0,
            prompt_tokens=loaded.prompt_tokens + tokens,
            queued_tokens=loaded.queued_tokens + tokens,
            unscraped_tokens=loaded.unscraped_tokens + tokens,
            active_context_tokens=loaded.active_context_tokens + tokens,
        )
    else:
        more *= 1.0 if signal == "estimated_requests" else 100.0
        loaded = msgspec.structs.replace(loaded, **{signal: getattr(loaded, signal) + more})
    first = EstimatedTime().cost(context, candidates).costs
    second = EstimatedTime().cost(context, [*candidates[:at], loaded, *candidates[at + 1 :]]).costs
    assert second[at] >= first[at] * (1.0 - 1e-9)
    assert [*second[:at], *second[at + 1 :]] == [*first[:at], *first[at + 1 :]]


def test_an_adapter_that_is_loaded_elsewhere_delays_all_who_wait():
    """Its load is work that need not be done, and every request there waits for it."""
    there = {"residency": AdapterResidency.RESIDENT, "estimated_requests": 4}
    missing = {"residency": AdapterResidency.EVICTABLE, "estimated_requests": 4}
    context = builders.context(adapter="x")
    for others, delay_s in ((there, 4 * 0.5), (missing, 0.0)):
        candidates = builders.candidates({"others": others, "this": missing})
        priced = EstimatedTime().cost(context, candidates)
        assert dict(priced.terms)["waste"][1] == pytest.approx(delay_s)
        columns = zip(*(values for _, values in priced.terms), strict=True)
        assert [sum(column) for column in columns] == pytest.approx(list(priced.costs))


def test_a_full_cache_adds_a_cost_term():
    """An endpoint whose cache is full has a term for memory, and an empty one has none."""
    load = {"kv_usage": 1.0, "kv_blocks": 100, "block_tokens": 16}
    candidates = builders.candidates({"full": load, "idle": load | {"kv_usage": 0.0}})
    priced = EstimatedTime().cost(builders.context(100), candidates)
    memory = dict(priced.terms)["memory"]
    assert memory[0] > memory[1] == 0.0
    assert priced.costs[0] > priced.costs[1]


def test_a_prompt_that_is_cached_wants_memory_for_one_token_more():
    """The cost has the same term as its explanation where nothing else is missing."""
    rates = StepTimeModel(output_tokens=100.0)
    load = {"kv_usage": 0.0, "kv_blocks": 100, "block_tokens": 16, "rates": rates}
    load |= {"matched_tokens": 1550, "conversation_local": True}
    candidates = builders.candidates({"home": load})
    priced = EstimatedTime().cost(builders.context(prompt_tokens=1550), candidates)
    terms = {name: values[0] for name, values in priced.terms}
    assert terms["memory"] > 0.0
    assert sum(terms.values()) == pytest.approx(priced.costs[0], rel=1e-12)


def test_a_full_batch_adds_a_cost_term():
    """Of 4 places all are taken: one answer has to end, or three, of usual length and not of this one's."""
    rates = StepTimeModel(output_tokens=100.0, max_num_seqs=4.0)
    counts = {"roomy": 3, "full": 4, "queueing": 6}
    facts = {name: {"estimated_requests": count, "rates": rates} for name, count in counts.items()}
    unknown = {"estimated_requests": 6, "rates": StepTimeModel(output_tokens=100.0)}
    candidates = builders.candidates(facts | {"unknown": unknown})
    context = builders.context(prompt_tokens=100, max_tokens=1)
    terms = dict(EstimatedTime().cost(context, candidates).terms)
    between_s = 100 * rates.iteration_s(4.0) / 4
    assert terms["batch"] == pytest.approx([0.0, between_s, 3 * between_s, 0.0])


def test_long_answers_hold_what_the_scrape_shows():
    """Requests that may run still hold what each held then; others a prompt and half an answer."""
    load = {"kv_usage": 1.0, "kv_blocks": 100, "block_tokens": 16, "running": 4.0}
    load |= {"in_flight": 4, "estimated_requests": 4, "prompt_tokens": 400}
    rates = StepTimeModel(output_tokens=100.0)
    answer_s = 100 * rates.iteration_s(4.0)
    ages = {"now": 0.0, "an answer old": answer_s, "never": math.inf}
    candidates = builders.candidates(
        {name: load | {"rates": rates, "age_s": age_s} for name, age_s in ages.items()}
    )
    terms = dict(EstimatedTime().cost(builders.context(prompt_tokens=1000), candidates).terms)
    # Of 1,600 tokens all are held, or 4 times 150, or half of each; 1,250 more are wanted.
    assert terms["memory"] == pytest.approx(
        [answer_s * (held + 1250 - 1600) / 1600 for held in (1600, 1100, 600)]
    )


def test_those_who_wait_for_memory_wait_for_what_this_request_takes():
    """They count where evicted blocks are loaded again, and the next request everywhere."""
    load = {"kv_usage": 1.0, "kv_blocks": 100, "block_tokens": 16, "estimated_requests": 4}
    terms = []
    for copied_ratio, waiting in ((0.0, 3), (0.5, 3), (1.0, 3), (1.0, 7)):
        rates = StepTimeModel(copied_ratio=copied_ratio, output_tokens=100.0)
        candidates = builders.candidates({"full": load | {"waiting": waiting, "rates": rates}})
        terms.append(
            dict(EstimatedTime().cost(builders.context(prompt_tokens=350), candidates).terms)
        )
    none, half, full, longer = [values["waiting"][0] for values in terms]
    # A request of 350 prompt tokens and half an answer takes a quarter of the 1,600.
    assert full == pytest.approx(4 * 0.25 * 100 * rates.iteration_s(4.0))
    assert (none, half, longer) == pytest.approx((full / 4, 2.5 * full / 4, 2 * full))
    assert len({values["memory"][0] for values in terms}) == 1


def test_a_conversation_takes_no_room_for_what_is_there():
    """The next request waits for what it adds where it lives, and elsewhere for all of it."""
    load = {"kv_usage": 1.0, "kv_blocks": 100, "block_tokens": 16, "estimated_requests": 4}
    rates = StepTimeModel(output_tokens=100.0)
    candidates = builders.candidates(
        {
            "home": load | {"rates": rates, "matched_tokens": 200, "conversation_local": True},
            "new": load | {"rates": rates},
        }
    )
    terms = dict(EstimatedTime().cost(builders.context(prompt_tokens=350), candidates).terms)
    home, new = terms["waiting"]
    assert (home, new) == pytest.approx((new * 200 / 400, new))


def test_crowding_costs_what_evicted_prefixes_do():
    """Loading takes the place of computing where the host keeps copies."""
    load = {"kv_usage": 0.5, "kv_blocks": 100, "block_tokens": 16, "prefix_hits": 1.0}
    load |= {"in_flight": 1, "estimated_requests": 1, "active_context_tokens": 1_500.0}
    rates = (
        StepTimeModel(evidence=5.0),
        StepTimeModel(evidence=5.0, reload_s=25e-6, copied_ratio=1.0),
    )
    candidates = builders.candidates({str(n): load | {"rates": r} for n, r in enumerate(rates)})
    context = builders.context(prompt_tokens=200, continuation_ratio=0.8)
    computed, loaded = dict(EstimatedTime().cost(context, candidates).terms)["crowding"]
    assert loaded == pytest.approx(computed / 4)
    assert computed > 0.0


def test_crowding_costs_the_part_of_a_conversation_that_moves_in():
    """A quarter of the cost where three quarters of it are cached, at a cache that gets as full."""
    load = {"kv_usage": 0.5, "kv_blocks": 100, "block_tokens": 16, "prefix_hits": 1.0}
    load |= {"in_flight": 1, "estimated_requests": 1}
    candidates = builders.candidates(
        {
            "cached": load | {"active_context_tokens": 1_550.0, "matched_tokens": 150},
            "elsewhere": load | {"active_context_tokens": 1_400.0},
        }
    )
    context = builders.context(prompt_tokens=200, continuation_ratio=0.8)
    priced = EstimatedTime().cost(context, candidates)
    cached, elsewhere = dict(priced.terms)["crowding"]
    assert cached == pytest.approx(elsewhere / 4)
    assert elsewhere > 0.0
    columns = zip(*(values for _, values in priced.terms), strict=True)
    assert [sum(column) for column in columns] == pytest.approx(list(priced.costs))


def test_queued_requests_are_delayed_by_this_prompt():
    """Of 1,000 tokens a request, 5,000 queued are five who wait 0.1 s, and no more than are there."""
    cost = EstimatedTime()
    candidates = builders.candidates(
        {
            "many": {"queued_tokens": 5000, "estimated_requests": 8, "age_s": 0.0},
            "one": {"queued_tokens": 5000, "estimated_requests": 1, "age_s": 0.0},
            "none": {"estimated_requests": 8, "age_s": 0.0},
        }
    )
    unknown = cost.cost(builders.context(prompt_tokens=1000), candidates)
    assert dict(unknown.terms)["waiting"] == [0.0, 0.0, 0.0]
    request = InferenceRequest(api="chat", prompt_tokens=1500)
    chosen = Decision(
        request=request, endpoints=(candidates[0].endpoint,), picker="max-score", matched_tokens=500
    )
    cost.on_committed(chosen, 1.0)
    priced = cost.cost(builders.context(prompt_tokens=1000), candidates)
    assert dict(priced.terms)["waiting"] == pytest.approx([0.5, 0.1, 0.0])
    columns = zip(*(values for _, values in priced.terms), strict=True)
    assert [sum(column) for column in columns] == pytest.approx(list(priced.costs))


def test_requests_that_no_scrape_shows_wait():
    """All of ours where none ever came, few at the age of an answer, none before anything was sent."""
    cost = EstimatedTime()
    ages = {"never": math.inf, "an answer old": 3.1, "now": 0.0, "barely old": 0.31}
    facts = {
        name: {"estimated_requests": 10, "in_flight": 10, "age_s": age_s}
        for name, age_s in ages.items()
    }
    facts["of others"] = {"estimated_requests": 10, "age_s": math.inf}
    candidates = builders.candidates(facts)

    def waiting(now):
        context = builders.context(prompt_tokens=1000, now=now)
        return dict(cost.cost(context, candidates).terms)["waiting"]

    assert waiting(1.0) == [0.0, 0.0, 0.0, 0.0, 0.0]
    request = InferenceRequest(api="chat", prompt_tokens=1000)
    cost.on_committed(
        Decision(request=request, endpoints=(candidates[0].endpoint,), picker="max-score"), 1.0
    )
    assert waiting(1e9) == pytest.approx([1.0, (1.1 * 0.5 - 0.1) ** 2, 0.0, 0.0, 0.0])
    first = waiting(4.1)
    assert first[0] == first[1] == pytest.approx((1.1 * 0.5 - 0.1) ** 2)


@given(
    kinds=st.lists(kinds_of_candidate, min_size=1, max_size=4),
    facts=turns,
    age_s=st.floats(0.0, 1e4),
)
def test_costs_have_no_cliffs_in_the_age_of_scrapes(kinds, facts, age_s):
    """A scrape that is a ten-thousandth older changes costs by no more than a thousandth."""
    cost = EstimatedTime()
    context = builders.context(**facts | {"prompt_tokens": 1000, "now": 1e6})
    candidates = crowd(kinds, len(kinds))
    request = InferenceRequest(api="chat", prompt_tokens=1000)
    chosen = Decision(request=request, endpoints=(candidates[0].endpoint,), picker="max-score")
    cost.on_committed(chosen, 0.0)

    def costs(age_s):
        aged = [msgspec.structs.replace(c, age_s=age_s) for c in candidates]
        return list(cost.cost(context, aged).costs)

    assert costs(age_s * 1.0001 + 1e-9) == pytest.approx(costs(age_s), rel=1e-3, abs=1e-6)


def test_idle_conversations_need_kv_cache():
    """With half as many idle as open ones, two thirds of the tokens cost as much; not with a queue."""
    cost = EstimatedTime()
    load = {"kv_usage": 0.5, "kv_blocks": 100, "block_tokens": 16, "prefix_hits": 10.0}
    candidates = builders.candidates(
        {
            "two thirds": load | {"active_context_tokens": 1600 * 0.9 / 1.5, "in_flight": 4},
            "queue": load
            | {"active_context_tokens": 1600 * 0.9 / 1.5, "in_flight": 4, "waiting": 1.0},
            "all": load | {"active_context_tokens": 1600 * 0.9, "in_flight": 4},
        }
    )

    def crowding(away):
        context = builders.context(
            prompt_tokens=1, continuation_ratio=1.0, idle_conversations_per_open=away
        )
        return dict(cost.cost(context, candidates).terms)["crowding"]

    alone, beside = crowding(0.0), crowding(0.5)
    assert alone[0] == alone[1] == beside[1] == 0.0
    assert alone[2] > 0.0
    assert beside[0] == pytest.approx(alone[2])


def test_conversations_of_other_replicas_need_kv_cache():
    """Their requests hold as much each as ours do, and what it costs is part of the cost."""
    cost = EstimatedTime()
    load = {"kv_usage": 0.9, "kv_blocks": 100, "block_tokens": 16, "prefix_hits": 10.0}
    ours = load | {"active_context_tokens": 1600 * 0.3, "in_flight": 2, "estimated_requests": 2}
    candidates = builders.candidates(
        {"ours": ours, "others' too": ours | {"estimated_requests": 6}}
    )
    priced = cost.cost(
        builders.context(prompt_tokens=1, continuation_ratio=1.0, foreign_share=0.6), candidates
    )
    alone, beside = dict(priced.terms)["crowding"]
    assert alone == 0.0 < beside
    columns = zip(*(values for _, values in priced.terms), strict=True)
    assert [sum(column) for column in columns] == pytest.approx(list(priced.costs))
