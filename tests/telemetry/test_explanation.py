import itertools
import json
import math

import msgspec

from extproc.cli import offline_explain
from extproc.config import settings
from extproc.decision import (
    CostResult,
    Decision,
    Deferral,
    Disaggregation,
    FilterResult,
    FilterTreeStep,
    Rejection,
    ScorerResult,
)
from extproc.endpoint import Candidate, Endpoint, Load
from extproc.pool.endpoint_health import RequestOutcome
from extproc.pool.store import PoolStore
from extproc.request import HttpRequest, InferenceRequest
from extproc.telemetry import (
    decision_log,
    explanation,
    explanation_text,
    pool_state,
)
from tests.support import disaggregation

A, B, C = (Candidate(Endpoint(f"10.0.0.{n}:8000")) for n in (1, 2, 3))


def decision(**more):
    known = msgspec.structs.replace(
        B, load=Load(at=1.0, waiting=2.0, adapters=frozenset({"y", "x"})), age_s=0.25, in_flight=4
    )
    facts = {
        "request": InferenceRequest(
            api="chat", model="m", prompt=b"PROMPT", prompt_tokens=2, session="S"
        ),
        "endpoints": [known.endpoint],
        "candidates": [A, known, C],
        "filters": [FilterResult("first", [A, known]), FilterResult("second", [A, known])],
        "scored_candidates": [A, known],
        "scores": [ScorerResult("one", 2.0, [0.25, 1.0]), ScorerResult("two", 1.0, [0.5, 0.0])],
        "totals": [1.0, 2.0],
        "picker": "max-score",
        **more,
    }
    return Decision(**facts)


def test_a_past_decision_says_that_all_endpoints_failed():
    """Their health is not known any more, but that none was healthy is."""
    document = explanation.explain(decision(excluded_by_health=[("least-bad", ())]))
    assert [step["name"] for step in document["filters"]] == ["first", "second"]
    sentence = "all endpoints are failing; the least bad is tried"
    assert sentence in explanation_text.render_table(document)
    assert sentence not in explanation_text.render_table(explanation.explain(decision()))


def test_decision_is_explained_completely():
    """Steps, survivors, raw and weighted scores, totals and ranks are all there."""
    document = explanation.explain(decision())
    assert document["outcome"] == "decision"
    assert document["endpoints"] == ["10.0.0.2:8000"]
    assert [step["dropped"] for step in document["filters"]] == [["10.0.0.3:8000"], []]
    assert document["scored_candidates"] == [
        {
            "endpoint": "10.0.0.1:8000",
            "raw": [0.25, 0.5],
            "weighted": [0.5, 0.5],
            "total": 1.0,
            "rank": None,
        },
        {
            "endpoint": "10.0.0.2:8000",
            "raw": [1.0, 0.0],
            "weighted": [2.0, 0.0],
            "total": 2.0,
            "rank": 1,
        },
    ]
    assert document["candidates"][1]["age_s"] == 0.25
    assert document["candidates"][1]["adapters"] == ["x", "y"]


def test_branches_of_a_tree_are_explained():
    """The way through a tree of filters stands below it, in JSON and in the table."""
    branches = [
        FilterTreeStep("drop-request", [], "either"),
        FilterTreeStep("low-latency", [A, B], "success"),
        FilterTreeStep("mine", [], "failure", "KeyError"),
        FilterTreeStep("kv-range", [A]),
    ]
    document = explanation.explain(decision(filters=[FilterResult("tree", [A], branches)]))
    (step,) = document["filters"]
    assert step["dropped"] == ["10.0.0.2:8000", "10.0.0.3:8000"]
    assert [
        (branch["name"], branch["branch"], branch["error_type"]) for branch in step["branches"]
    ] == [
        ("drop-request", "either", ""),
        ("low-latency", "success", ""),
        ("mine", "failure", "KeyError"),
        ("kv-range", "", ""),
    ]
    assert [branch["dropped"] for branch in step["branches"]] == [
        ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"],
        ["10.0.0.3:8000"],
        ["10.0.0.1:8000", "10.0.0.2:8000"],
        ["10.0.0.2:8000"],
    ]
    shown = explanation_text.render_table(document)
    assert "\n  drop-request     0  all; then either\n" in shown
    assert "\n  low-latency      2  10.0.0.3:8000; then success\n" in shown
    assert "\n  mine             0  all, raised KeyError; then failure\n" in shown
    assert "\n  kv-range         1  10.0.0.2:8000; the end\n" in shown


def test_json_has_no_prompt_no_session_and_no_infinity():
    """An explanation is plain JSON without the prompt or the name of the session."""
    document = json.dumps(explanation.explain(decision()), allow_nan=False)
    assert "PROMPT" not in document
    assert '"S"' not in document
    assert json.loads(document)["candidates"][0]["age_s"] is None


def test_the_awaited_endpoint_is_explained():
    """One that waits for an endpoint although others have a place says for which."""
    rejection = Rejection(429, "full", reason="why", retry_after_s=1)
    waiting = Deferral(0.1, rejection, preferred_endpoint="10.0.0.1:8000")
    document = explanation.explain(waiting)
    refused = {**explanation.explain(rejection), "outcome": "deferral"}
    assert document == {**refused, "preferred_endpoint": "10.0.0.1:8000"}
    assert explanation_text.render_table(document) == (
        "waits for 10.0.0.1:8000, or is refused with 429: full\nreason: why\nretry after: 1 s\n"
    )
    anywhere = explanation.explain(Deferral(math.inf, rejection))
    assert explanation_text.render_table(anywhere).startswith("waits for an endpoint, or is ")


def test_a_rejection_is_explained():
    """A rejection is explained with status, reason and the time to retry."""
    document = explanation.explain(Rejection(429, "full", reason="why", retry_after_s=1))
    assert document == {
        "outcome": "rejection",
        "status": 429,
        "message": "full",
        "reason": "why",
        "retry_after_s": 1,
    }
    assert explanation_text.render_table(document) == (
        "refused with 429: full\nreason: why\nretry after: 1 s\n"
    )


def test_table_survives_json():
    """The table of an explanation is the same after a trip through JSON."""
    document = explanation.explain(decision(degraded="scorer x raised KeyError"))
    shown = explanation_text.render_table(document)
    assert explanation_text.render_table(json.loads(json.dumps(document))) == shown
    assert shown.endswith(
        "chosen by max-score: 10.0.0.2:8000; runner-up: 10.0.0.1:8000\ndegraded: scorer x raised KeyError\n"
    )


def test_table_without_steps():
    """A degraded decision has no steps and is explained nevertheless."""
    bare = Decision(request=InferenceRequest(api="opaque"), endpoints=[A.endpoint], picker="rescue")
    assert "chosen by rescue: 10.0.0.1:8000" in explanation_text.render_table(
        explanation.explain(bare)
    )


PRICED = CostResult(
    "estimated-time", "s", [0.5, 0.0123], [("queue", [0.4, 0.0]), ("prefill", [0.1, 0.0123])]
)


def test_the_runner_up_of_equals_is_the_first_fallback():
    """Tables begin with the chosen endpoint and its fallbacks where totals are equal."""
    document = explanation.explain(
        decision(
            endpoints=[B.endpoint, C.endpoint],
            scored_candidates=[A, B, C],
            scores=[ScorerResult("one", 1.0, [1.0, 1.0, 1.0])],
            totals=[1.0, 1.0, 1.0],
        )
    )
    assert document["runner_up"] == C.endpoint.address
    table = explanation_text.render_table(document).partition("SCORE")[2]
    lines = table.splitlines()[1:4]
    assert [line.split()[0] for line in lines] == [c.endpoint.address for c in (B, C, A)]


def test_costs_are_shown_in_milliseconds():
    """A cost model's terms stand beside its costs, seconds as milliseconds."""
    document = explanation.explain(decision(scores=[], cost=PRICED, totals=[-0.5, -0.0123]))
    assert document["cost"] == {
        "name": "estimated-time",
        "unit": "ms",
        "terms": ["queue", "prefill"],
    }
    assert document["scored_candidates"][0]["terms"] == [400.0, 100.0]
    assert document["scored_candidates"][1]["cost"] == 12.3
    assert document["runner_up"] == "10.0.0.1:8000"
    shown = explanation_text.render_table(document)
    assert "COST ms" in shown
    assert "runner-up: 10.0.0.1:8000" in shown


def test_the_runner_up_has_the_highest_total_of_the_others():
    """The fallback where that is one of several, whatever the place of the first endpoint."""
    for totals in itertools.product((0.0, 1.0, 2.0), repeat=3):
        for chosen, fallback in itertools.permutations(range(3), 2):
            outcome = decision(
                endpoints=[[A, B, C][at].endpoint for at in (chosen, fallback)],
                scored_candidates=[A, B, C],
                totals=totals,
            )
            others = [at for at in range(3) if at != chosen]
            expected = max(others, key=lambda at: (totals[at], at == fallback))
            assert outcome.find_chosen_and_runner_up() == (chosen, expected)


def test_stages_are_explained_with_their_endpoints():
    """The candidates and scores of each are there, and the tables name the endpoints."""
    document = explanation.explain(disaggregation.decide(has_picture=True))
    stages = document["disaggregation"]
    assert stages["decision_type"] == "encode-prefill-decode"
    prefill, encode = stages["prefill"], stages["encode"]
    assert {*prefill["endpoints"], prefill["runner_up"]} == {
        disaggregation.PREFILL,
        disaggregation.OTHER_PREFILL,
    }
    assert (prefill["reason"], prefill["profile"]) == ("", "prefill")
    assert [step["name"] for step in prefill["filters"]] == ["prefill-filter"]
    assert [row["endpoint"] for row in prefill["candidates"]] == [*disaggregation.ROLES]
    assert [row["total"] for row in prefill["scored_candidates"]] == [1.0, 1.0]
    assert encode["endpoints"] == [disaggregation.ENCODE]
    text = explanation_text.render_table(document)
    assert (
        f"prefill: {prefill['endpoints'][0]}, chosen by max-score-picker of profile prefill; "
        f"runner-up: {prefill['runner_up']}\n\nFILTER          LEFT  DROPPED\nprefill-filter     2"
    ) in text
    assert f"encode: {disaggregation.ENCODE}, chosen by max-score-picker" in text
    assert "\nencode     endpoints that" in explanation_text.render_legend(document)
    assert json.loads(json.dumps(document)) == document


def test_stages_of_the_chosen_endpoint_are_explained():
    """The reason is one word, in the tables, in JSON and in the short form."""
    outcome = disaggregation.decide("short")
    document = explanation.explain(outcome)
    assert document["disaggregation"] == {
        "decision_type": "decode-only",
        "prefill": {"endpoints": [], "reason": "short"},
        "encode": {"endpoints": [], "reason": "no-media"},
    }
    assert "\n\nprefill: the chosen endpoint itself (short)\n" in explanation_text.render_table(
        document
    )
    assert explanation.format_short(outcome).endswith("; prefill=here:short; encode=here:no-media")


def test_a_decision_without_stages_names_none():
    """Nor one of a pool in which encode alone is split that of prefill."""
    document = explanation.explain(decision())
    assert "disaggregation" not in document
    assert "prefill  " not in explanation_text.render_legend(document)
    outcome = decision(disaggregation=Disaggregation(encode_reason="no-media"))
    assert explanation.explain(outcome)["disaggregation"]["prefill"] is None
    assert explanation.format_short(outcome).endswith("; encode=here:no-media")
    assert "prefill" not in explanation_text.render_table(explanation.explain(outcome))


def test_the_source_of_a_kv_cache_is_named():
    """In all forms, and in none without one."""
    outcome = decision(kv_cache_source=Endpoint("10.0.0.9:8000"))
    assert explanation.format_short(outcome).endswith("; kv-cache=10.0.0.9:8000")
    document = explanation.explain(outcome)
    assert document["kv_cache_source"] == "10.0.0.9:8000"
    assert explanation_text.render_table(document).endswith(
        "\n\ncached tokens can be pulled from 10.0.0.9:8000\n"
    )
    assert "kv_cache_source" not in explanation.explain(decision())


def test_a_recorded_decision_names_the_endpoints_of_stages():
    """Also where the log kept few of its candidates, and in the list of decisions."""
    outcome = disaggregation.decide()
    record = decision_log.DecisionLog(1).add("id", outcome, 0.0)
    chosen = outcome.disaggregation.prefill.endpoints[0].address
    assert f"; prefill={chosen}; " in explanation.summarize_record(record, 1.0)["why"]
    text = explanation_text.render_past(explanation.explain_record(record, 1.0))
    assert f"\n\nprefill: {chosen}, " in text


def test_short_form_fits_a_header():
    """One line of ASCII says who was chosen, at what cost, and who came next."""
    outcome = decision(profile="adaptive", scores=[], cost=PRICED, totals=[-0.5, -0.0123])
    assert explanation.format_short(outcome) == (
        "adaptive; chose=10.0.0.2:8000; cost=12.3ms; cached=0/2; next=10.0.0.1:8000; cost=500.0ms"
    )
    assert explanation.format_short(decision()) == (
        "default; chose=10.0.0.2:8000; score=2.000; cached=0/2; next=10.0.0.1:8000; score=1.000"
    )


def test_a_recorded_decision_is_explained_with_its_result():
    """The ring keeps no prompt; status, duration and usage are added when the stream ends."""
    ring = decision_log.DecisionLog(10)
    record = ring.add("id-1", decision(block_hashes=[1, 2]), 5.0)
    assert (record.decision.request.prompt, record.decision.block_hashes) == (b"", ())
    record.status, record.seconds, record.usage = "200", 1.5, {"cached": 7}
    document = explanation.explain_record(record, 8.0)
    assert (document["seconds_ago"], document["status"], document["usage"]) == (
        3.0,
        "200",
        {"cached": 7},
    )
    assert explanation_text.render_past(document).startswith(
        "request id-1: 3.0 s ago, status 200, took 1.500 s; "
        "tokens reported: 7 cached (predicted 0)\n"
    )
    record.first_token_s = 0.039
    text = explanation_text.render_past(explanation.explain_record(record, 8.0))
    assert "took 1.500 s, first token 39 ms; tokens" in text
    document = {**explanation.explain_record(record, 8.0), "predicted_first_token_s": 0.0382}
    text = explanation_text.render_past(document)
    assert ", first token 39 ms (predicted 38 ms); tokens" in text
    assert explanation.summarize_record(record, 8.0)["endpoint"] == "10.0.0.2:8000"


def test_an_id_is_shown_in_utf8_where_its_bytes_are_that():
    """Headers are bytes, which are read as latin-1."""
    for sent, shown in (("zürich".encode(), "zürich"), (b"z\xfcrich", "zürich"), (b"a", "a")):
        record = decision_log.DecisionLog(1).add(sent.decode("latin-1"), decision(), 0.0)
        assert explanation.summarize_record(record, 8.0)["id"] == shown
        assert explanation.explain_record(record, 8.0)["id"] == shown


def fleet():
    pool = PoolStore(on_gone=lambda _: None)
    pool.set_endpoints([Endpoint("a:1", name="one", labels={"zone": "east"}), Endpoint("b:2")], 0.0)
    mark = pool.begin_scrape(pool.pool.members[0].endpoint)
    pool.observe(mark, Load(at=10.0, running=4.0, waiting=1.0, adapters=frozenset("x")), 10.0)
    for _ in range(3):
        pool.pool.members[0].account.open("m", 7, cached_tokens=0, now=0.0)
    pool.scrape_failed(pool.begin_scrape(pool.pool.members[1].endpoint), "refused", 11.0)
    return pool


def described(store, now):
    """The page of a pool."""
    return json.loads(b"".join(pool_state.render_pool(store.pool, now)))


def test_pool_state_contains_known_values():
    """Known values are shown with their age, and unknown ones are left out."""
    document = described(fleet(), 12.5)
    assert document == {
        "endpoints": [
            {
                "address": "a:1",
                "name": "one",
                "labels": {"zone": "east"},
                "incarnation": 1,
                "failures": 0,
                "failure": "",
                "health": "healthy",
                "cause": "",
                "ejections": 0,
                "in_flight": 3,
                "prompt_tokens": 21,
                "queued_tokens": 0,
                "distrusted": "",
                "foreign": 5.0,
                "age_s": 2.5,
                "engine": "",
                "waiting": 1.0,
                "running": 4.0,
                "adapters": ["x"],
            },
            {
                "address": "b:2",
                "name": "",
                "labels": {},
                "incarnation": 2,
                "failures": 1,
                "failure": "refused",
                "health": "healthy",
                "cause": "",
                "ejections": 0,
                "in_flight": 0,
                "prompt_tokens": 0,
                "queued_tokens": 0,
                "distrusted": "",
                "engine": "",
            },
        ]
    }


def test_a_pool_state_round_trips():
    """A pool that was written down and read again gives the same candidates."""
    pool = fleet()
    document = described(pool, 12.5)
    read = msgspec.convert(document, pool_state.PoolState)
    outcome = offline_explain.route_offline(
        settings.Settings(), read, HttpRequest({":path": "/x"}, b""), where="state"
    )
    first, second = outcome.candidates
    assert (first.in_flight, first.estimated_requests, first.prompt_tokens) == (3, 8.0, 21)
    assert (first.age_s, first.load.running) == (2.5, 4.0)
    assert second.age_s == math.inf


def test_excluded_endpoints_are_explained_with_the_reason():
    """Endpoints that fail, and those that wait for their turn, stand before the filters."""
    pool = fleet()
    pool.set_endpoints([Endpoint("a:1"), Endpoint("b:2"), Endpoint("c:3")], 12.0)
    for _ in range(3):
        member = pool.pool.find("b:2")
        assert member is not None
        pool.record_outcome(member.endpoint, RequestOutcome.FAILED, sent_at=12.0, now=12.0)
    document = described(pool, 13.0)["endpoints"][1]
    assert (document["health"], document["cause"], document["out_s"], document["ejections"]) == (
        ("ejected", "errors", 1.0, 1)
    )
    assert 3.0 <= document["again_s"] <= 4.0
    read = msgspec.convert(described(pool, 13.0), pool_state.PoolState)
    outcome = offline_explain.route_offline(
        settings.Settings(), read, HttpRequest({":path": "/x"}, b""), where="state"
    )
    shown = explanation.explain(outcome)
    assert shown["excluded_by_health"] == {"failing": ["b:2"]}
    assert shown["filters"][0] == {
        "name": "failing",
        "survivors": ["a:1", "c:3"],
        "dropped": ["b:2"],
    }
    assert "failing" in explanation_text.render_table(shown)
