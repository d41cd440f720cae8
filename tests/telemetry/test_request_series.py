"""Series of requests: what has one of its own, and how many there can be."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from extproc.decision import NO_ENDPOINTS, CostResult, Decision
from extproc.endpoint import Candidate, Endpoint
from extproc.request import InferenceRequest, RequestLabels
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.request_series import (
    MAX_HISTOGRAM_MODELS,
    MAX_HISTOGRAMS,
    MAX_SERIES,
    MAX_UNANSWERED_MODELS,
)
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support.metrics_pages import build_exposition

ADDRESS = "10.0.0.1:8000"


class TrafficFixture:
    """Requests to a pool, and what the metrics page says of them."""

    def __init__(self, *, has_llmd_names=True):
        self.counters = ProcessCounters(has_llmd_names=has_llmd_names)
        self.recorder = StreamRecorder(self.counters, DecisionLog(10), lambda: 0.0)

    def open(self, labels=None, *, api="chat", unlisted=False, predicted_s=None, trace_id=""):
        """A routed request."""
        candidate = Candidate(Endpoint(ADDRESS))
        cost = CostResult("estimated-time", "s", [1.0], (), lambda _: predicted_s)
        decision = Decision(
            InferenceRequest(api, "m"),
            [candidate.endpoint],
            scored_candidates=[candidate],
            cost=None if predicted_s is None else cost,
            model_unlisted=unlisted,
        )
        request = self.recorder.observe_request("p")
        labels = labels or RequestLabels("m", "m", "none", 0)
        request.on_routed(
            decision, request_id="", labels=labels, trace_id=trace_id, now=0.0, duration_s=0.0
        )
        return request

    def serve(self, labels=None, *, status="200", usage=None, **more):
        """A request from its start to its end."""
        request = self.open(labels, **more)
        if status:
            request.on_response_headers(
                0.25, elapsed_s=0.25, status=status, is_stream=False, is_shown=False
            )
        if usage:
            request.on_usage(usage)
        request.on_finished(endpoint=ADDRESS, status=status, duration_s=1.0)

    def refuse(self, labels=None):
        """A refused request."""
        request = self.recorder.observe_request("p")
        request.on_rejected(NO_ENDPOINTS, request_id="", labels=labels, now=0.0)

    def page(self, name):
        """The samples of a metric, by their labels besides the pool."""
        exposition = build_exposition(self.counters)
        samples = {}
        for line in exposition.render().decode().splitlines():
            sample, _, value = line.rpartition(" ")
            metric, _, labels = sample.partition("{")
            if metric == name:
                parts = labels.rstrip("}").split(",")
                samples[",".join(part for part in parts if part != 'pool="p"')] = float(value)
        return samples


def labels_of(model="m", tenant="none", priority=0):
    return RequestLabels(model, model, tenant, priority)


def test_requests_are_counted_by_model_and_status():
    """Routed ones by the status of their response, refused ones by that of the refusal."""
    traffic = TrafficFixture()
    traffic.serve(labels_of("a"))
    traffic.serve(labels_of("a"), status="503")
    traffic.serve(labels_of("b"), status="")
    traffic.serve(labels_of("b"), status="", api="count_tokens")
    traffic.refuse(labels_of("a"))
    traffic.refuse()
    assert traffic.page("extproc_requests_total") == {
        'model="a",status="200"': 1,
        'model="a",status="503"': 2,
        'model="b",status="none"': 1,
        'model="b",status="unobserved"': 1,
        'model="none",status="503"': 1,
    }
    assert traffic.page("extproc_request_duration_seconds_count") == {
        'model="a",status="200"': 1,
        'model="a",status="503"': 1,
        'model="b",status="none"': 1,
        'model="b",status="unobserved"': 1,
    }


def test_a_request_that_fails_after_its_choice_counts_once():
    """A bug of ours is answered with 500, and then the stream ends."""
    traffic = TrafficFixture()
    request = traffic.open()
    request.on_rejected(NO_ENDPOINTS, request_id="", labels=None, now=0.0)
    request.on_finished(endpoint=ADDRESS, status="", duration_s=1.0)
    assert traffic.page("extproc_requests_total") == {'model="m",status="503"': 1}


def test_attempts_of_llmd_have_models_and_endpoints_up_to_a_bound():
    """Refused requests have their model, and further models of an endpoint are `other`."""
    traffic = TrafficFixture()
    traffic.serve(labels_of("a"))
    traffic.open(labels_of("none"))
    traffic.refuse(labels_of("a"))
    traffic.refuse()
    counters = traffic.counters.for_pool("p")
    assert counters.attempts == {
        (ADDRESS, "a"): 1,
        (ADDRESS, "none"): 1,
        ("", "a"): 1,
        ("", "none"): 1,
    }
    for number in range(3000):
        counters.record_attempts([(ADDRESS, f"m{number}"), (ADDRESS, "a")])
    assert len(counters.attempts) == 2001
    assert counters.attempts[ADDRESS, "a"] == 3001
    assert counters.attempts[ADDRESS, "other"] == 3000 - 1996
    counters.forget(ADDRESS)
    assert set(counters.attempts) == {("", "a"), ("", "none")}


def test_attempts_count_only_with_the_names_of_llmd():
    """Nothing else reads them."""
    traffic = TrafficFixture(has_llmd_names=False)
    traffic.serve()
    traffic.refuse()
    assert not traffic.counters.for_pool("p").attempts


def test_running_requests_are_those_whose_stream_is_open():
    """From the choice of the endpoint to the end of the stream."""
    traffic = TrafficFixture()
    first, _ = traffic.open(), traffic.open()
    assert traffic.page("extproc_requests_running") == {'model="m"': 2}
    first.on_finished(endpoint=ADDRESS, status="200", duration_s=1.0)
    assert traffic.page("extproc_requests_running") == {'model="m"': 1}


def test_tokens_are_counted_by_model_and_tenant():
    """As the responses reported them."""
    traffic = TrafficFixture()
    for tenant in ("ann", "bob"):
        traffic.serve(labels_of("a", tenant), usage={"prompt": 10, "cached": 4, "completion": 2})
    assert traffic.page("extproc_usage_tokens_total") == {
        'kind="prompt",model="a"': 20,
        'kind="cached",model="a"': 8,
        'kind="completion",model="a"': 4,
    }
    assert traffic.page("extproc_tenant_tokens_total")['kind="prompt",model="a",tenant="bob"'] == 10
    assert traffic.page("extproc_tenant_requests_total") == {
        'model="a",tenant="ann"': 1,
        'model="a",tenant="bob"': 1,
    }
    assert traffic.page("extproc_request_tokens_bucket")['kind="prompt",model="a",le="16"'] == 2


def test_the_first_token_of_a_stream_is_its_first_chunk():
    """Gaps are between chunks; the time per token is that of all but the first."""
    traffic = TrafficFixture()
    request = traffic.open(predicted_s=0.5)
    request.on_response_headers(0.1, elapsed_s=0.2, status="200", is_stream=True, is_shown=True)
    assert traffic.page("extproc_request_ttft_seconds_count") == {}
    for elapsed_s in (1.1, 1.5, 2.1):
        request.on_response_chunk(elapsed_s)
    request.on_usage({"completion": 5})
    request.on_finished(endpoint=ADDRESS, status="200", duration_s=2.2)
    assert traffic.page("extproc_request_ttft_seconds_sum") == {'model="m",streaming="true"': 1.1}
    assert traffic.page("extproc_request_itl_seconds_count") == {'model="m"': 2}
    assert traffic.page("extproc_request_itl_seconds_sum")['model="m"'] == pytest.approx(1.0)
    assert traffic.page("extproc_request_tpot_seconds_sum")['model="m"'] == pytest.approx(0.25)
    assert traffic.page("extproc_request_predicted_ttft_seconds_sum") == {'model="m"': 0.5}
    assert traffic.page("extproc_request_ttft_ratio_sum")['model="m"'] == pytest.approx(2.0)
    name = "llm_d_epp_request_predicted_ttft_seconds"
    assert traffic.page(f"{name}_sum") == {
        'model_name="m",plugin_name="",plugin_type="",target_model_name="m"': 0.5
    }
    assert (
        len(traffic.page(f"{name}_bucket")) == 36
    )  # up to an hour, unlike times that were measured


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_stream_without_chunks_has_the_time_of_its_headers(is_shown):
    """If a data plane ignores the request for chunks, the end of the stream shows that."""
    traffic = TrafficFixture()
    request = traffic.open()
    request.on_response_headers(0.1, elapsed_s=0.5, status="200", is_stream=True, is_shown=is_shown)
    request.on_finished(endpoint=ADDRESS, status="200", duration_s=2.2)
    assert traffic.page("extproc_request_ttft_seconds_sum") == {'model="m",streaming="true"': 0.5}


def test_failures_have_no_first_token():
    """An error that comes fast does not make the engine look fast."""
    traffic = TrafficFixture()
    traffic.serve(status="500")
    assert not traffic.page("extproc_request_ttft_seconds_count")
    assert not traffic.page("extproc_endpoint_response_headers_seconds_count")
    traffic.serve()
    assert traffic.page("extproc_request_ttft_seconds_count") == {'model="m",streaming="false"': 1}
    shown = traffic.page("extproc_endpoint_response_headers_seconds_sum")
    assert shown == {f'endpoint="{ADDRESS}"': 0.25}


def _serve_anything(traffic, rng):
    """A request of any model, status, duration and way to answer, from its start to its end."""
    labels = labels_of(rng.choice("abc"), rng.choice(("none", "t")))
    request = traffic.open(labels, predicted_s=0.5, trace_id=rng.choice(("", "", "0a" * 16)))
    status, is_stream = rng.choice(("200", "200", "404", "503", "")), rng.random() < 0.5
    at = rng.randrange(1, 4000) / 1024  # sums of such numbers are exact in any order
    if status:
        request.on_response_headers(
            at, elapsed_s=at, status=status, is_stream=is_stream, is_shown=rng.random() < 0.7
        )
    for _ in range(rng.randrange(3) if is_stream and status == "200" else 0):
        at += rng.randrange(1, 900) / 1024
        request.on_response_chunk(at)
    if rng.random() < 0.7:
        # Times over these counts, and over a token less, are exact too.
        request.on_usage({"prompt": rng.randrange(5000), "completion": rng.choice((1, 2))})
    request.on_finished(endpoint=ADDRESS, status=status, duration_s=at)


@pytest.mark.parametrize("seed", range(20))
def test_requests_that_are_counted_together_make_the_same_page(seed):
    """They do as when each is counted by itself, whatever their number."""
    pages = []
    for is_alone in (True, False):
        rng, traffic = Random(seed), TrafficFixture()
        for _ in range(rng.choice((3, 40, 100))):
            _serve_anything(traffic, rng)
            if is_alone:
                traffic.recorder.settle()
        exposition = build_exposition(traffic.counters)
        lines = exposition.render().decode().splitlines()
        pages.append(sorted(line for line in lines if not line.startswith("process_")))
    assert pages[0] == pages[1]


def test_a_model_has_series_of_its_own_once_an_engine_serves_it():
    """Listed, or answered for; what clients make up is `other`."""
    traffic = TrafficFixture()
    traffic.counters.for_pool("p").series.read_known_models(listed=lambda: {"base"})
    traffic.serve(labels_of("made-up"), unlisted=True, status="404")
    traffic.refuse(labels_of("made-up"))
    traffic.serve(labels_of("unlisted"), unlisted=True)
    traffic.serve(labels_of("listed"))
    assert traffic.page("extproc_requests_total") == {
        'model="other",status="404"': 1,
        'model="other",status="503"': 1,
        'model="unlisted",status="200"': 1,
        'model="listed",status="200"': 1,
    }
    assert sum(traffic.page("extproc_requests_running").values()) == 0


def test_requests_without_a_tenant_are_no_other_tenant():
    """They count as `none` where their model is `other`, apart from those of tenants."""
    traffic = TrafficFixture()
    traffic.counters.for_pool("p").series.read_known_models(listed=lambda: {"base"})
    for tenant in ("none", "ann", "bob"):
        traffic.refuse(labels_of("made-up", tenant))
    assert traffic.page("extproc_tenant_requests_total") == {
        'model="other",tenant="none"': 1,
        'model="other",tenant="other"': 2,
    }


def test_refused_requests_of_a_pool_without_engines_count_by_model():
    """A few models, and those of the configuration; others keep their priority."""
    traffic = TrafficFixture()
    series = traffic.counters.for_pool("p").series
    series.read_known_models(listed=frozenset, configured=lambda: {"configured"})
    for number in range(MAX_UNANSWERED_MODELS + 3):
        traffic.refuse(labels_of(f"m{number}", "ann", priority=number % 2))
    traffic.refuse(labels_of("configured", "ann", priority=10))
    refused = {member.labels: member.refused for member in series}
    assert refused[labels_of("m0", "ann")] == {"503": 1}
    assert refused[labels_of("configured", "ann", 10)] == {"503": 1}
    assert refused[labels_of("other", "other", 0)] == {"503": 2}
    assert refused[labels_of("other", "other", 1)] == {"503": 1}
    assert len(refused) == MAX_UNANSWERED_MODELS + 3


def test_requests_count_as_those_of_llmd_when_they_are_routed():
    """So it is their arrival rate; that of `other` never falls, as its requests may leave it."""
    traffic = TrafficFixture()

    def read():
        page = traffic.page("llm_d_epp_request_total")
        return {labels.split('"')[3]: count for labels, count in page.items()}

    running = [traffic.open() for _ in range(3)]
    traffic.refuse(labels_of())
    assert read() == {"m": 4}
    running.pop().on_finished(endpoint=ADDRESS, status="", duration_s=1.0)
    assert read() == {"m": 4}
    assert traffic.page("extproc_requests_total") == {
        'model="m",status="none"': 1,
        'model="m",status="503"': 1,
    }
    answered, failed = (traffic.open(labels_of("lora"), unlisted=True) for _ in range(2))
    assert read() == {"m": 4, "other": 0}
    answered.on_response_headers(0.1, elapsed_s=0.1, status="200", is_stream=False, is_shown=False)
    assert read() == {"m": 4, "other": 0, "lora": 1}
    for request, status in ((answered, "200"), (failed, "404")):
        request.on_finished(endpoint=ADDRESS, status=status, duration_s=1.0)
    assert read() == {"m": 4, "other": 1, "lora": 1}


def test_tenants_without_end_leave_room_for_priorities():
    """Requests that have no series of their own keep their priority, unless there are too many."""
    traffic = TrafficFixture()
    series = traffic.counters.for_pool("p").series
    for number in range(MAX_SERIES):
        series.find(labels_of(f"m{number}"), is_served=True)
    for number in range(MAX_SERIES):
        series.find(labels_of(f"m{number}", "new"))
    assert series.find(labels_of("late", priority=7)).labels == labels_of("other", priority=7)
    for number in range(MAX_SERIES):
        merged = series.find(labels_of("late", priority=number))
    assert merged.labels == labels_of("other", "other", 0)
    assert len(list(series)) <= MAX_SERIES + 100


def test_a_request_counts_in_one_series_even_if_its_answer_makes_it():
    """Open requests for a model that no engine lists move there once they are answered."""
    traffic = TrafficFixture()
    requests = [traffic.open(labels_of("lora"), unlisted=True) for _ in range(3)]
    assert traffic.page("extproc_requests_running") == {'model="other"': 3}
    for request in requests[:2]:
        request.on_response_headers(0.1, elapsed_s=0.2, status="200", is_stream=True, is_shown=True)
        request.on_response_chunk(0.5)
        request.on_response_chunk(0.7)
    assert traffic.page("extproc_requests_running") == {'model="lora"': 2, 'model="other"': 1}
    for request in requests:
        request.on_usage({"completion": 3})
        request.on_finished(
            endpoint=ADDRESS, status="200" if request.is_served else "", duration_s=1.0
        )
    assert traffic.page("extproc_requests_running") == {'model="lora"': 0, 'model="other"': 0}
    assert traffic.page("extproc_requests_total") == {
        'model="lora",status="200"': 2,
        'model="other",status="none"': 1,
    }
    tokens = traffic.page("extproc_request_tokens_count")
    assert tokens == {'kind="completion",model="lora"': 2, 'kind="completion",model="other"': 1}
    for name in ("extproc_request_itl_seconds_count", "extproc_request_tpot_seconds_count"):
        assert traffic.page(name) == {'model="lora"': 2}
    first_tokens = traffic.page("extproc_request_ttft_seconds_count")
    assert first_tokens == {'model="lora",streaming="true"': 2}


def test_few_models_have_series_before_an_engine_answers_for_them():
    """While no engine lists its models, any name may be a model; answers tell."""
    traffic = TrafficFixture()
    for number in range(100):
        traffic.serve(labels_of(f"m{number}"), status="503")
    traffic.serve(labels_of("m99"))
    page = traffic.page("extproc_requests_total")
    assert page['model="other",status="503"'] == 100 - MAX_UNANSWERED_MODELS
    assert page['model="m0",status="503"'] == 1
    assert page['model="m99",status="200"'] == 1
    assert len(page) == MAX_UNANSWERED_MODELS + 2


def test_every_model_that_an_engine_lists_has_series_from_its_first_request_on():
    """Requests and tokens count for it and its tenant, however many models there are."""
    traffic = TrafficFixture()
    names = [f"lora-{number}" for number in range(MAX_UNANSWERED_MODELS + 8)]
    traffic.counters.for_pool("p").series.read_known_models(listed=lambda: names)
    traffic.refuse(labels_of(names[-1]))
    requests = [(name, traffic.open(labels_of(name, f"team-{name}"))) for name in names]
    traffic.counters.settle()
    for _, request in requests:
        request.on_usage({"completion": 5})
        request.on_finished(endpoint=ADDRESS, status="200", duration_s=1.0)
    tokens = traffic.page("extproc_tenant_tokens_total")
    assert tokens == {
        f'kind="completion",model="{name}",tenant="team-{name}"': 5.0 for name in names
    }
    for number in range(MAX_UNANSWERED_MODELS):
        traffic.serve(labels_of(f"m{number}"), status="503")
    assert 'model="other",status="503"' not in traffic.page("extproc_requests_total")


def test_durations_and_first_tokens_of_sampled_traces_are_exemplars():
    """The last one of each bucket, in OpenMetrics, which has room for them."""
    traffic = TrafficFixture(has_llmd_names=False)
    traffic.serve()
    traffic.serve(trace_id="0a" * 16)
    exposition = build_exposition(traffic.counters)
    families = text_string_to_metric_families(exposition.render(is_openmetrics=True).decode())
    exemplars = {
        (sample.name, sample.labels["le"]): (sample.exemplar.labels, sample.exemplar.value)
        for family in families
        for sample in family.samples
        if sample.exemplar
    }
    trace = {"trace_id": "0a" * 16}
    assert exemplars == {
        ("extproc_request_duration_seconds_bucket", "1.0"): (trace, 1.0),
        ("extproc_request_ttft_seconds_bucket", "0.4"): (trace, 0.25),
    }
    assert b"0a0a" not in exposition.render()


def test_new_tenants_of_a_full_table_are_other():
    """The model stays, as long as it is in the table."""
    traffic = TrafficFixture()
    for number in range(MAX_SERIES + 50):
        traffic.serve(labels_of("a", f"tenant-{number}"))
    traffic.serve(labels_of("late"))
    tenants = traffic.page("extproc_tenant_requests_total")
    assert len(tenants) == MAX_SERIES + 2
    assert tenants['model="a",tenant="other"'] == 50
    assert tenants['model="other",tenant="none"'] == 1
    assert traffic.page("extproc_requests_total")['model="a",status="200"'] == MAX_SERIES + 50


def test_the_first_models_have_histograms():
    """Those of later models are added up: each takes dozens of lines of the page."""
    traffic = TrafficFixture()
    for number in range(MAX_HISTOGRAM_MODELS + 10):
        traffic.serve(labels_of(f"m{number}"))
    counts = traffic.page("extproc_request_duration_seconds_count")
    assert len(counts) == MAX_HISTOGRAM_MODELS + 1
    assert counts['model="other",status="200"'] == 10
    assert len(traffic.page("extproc_requests_total")) == MAX_HISTOGRAM_MODELS + 10


def test_later_tenants_share_the_histograms_of_their_model():
    """The page has them once: as those of the model, and as those of all later labels of llm-d."""
    traffic = TrafficFixture()
    for number in range(MAX_HISTOGRAMS + 10):
        traffic.serve(labels_of("a", f"tenant-{number}"), usage={"prompt": 7, "completion": 3})
    traffic.serve(labels_of("b", "tenant-0"), status="500")
    assert len(traffic.counters.for_pool("p").series.histograms) == MAX_HISTOGRAMS + 2
    durations = traffic.page("extproc_request_duration_seconds_count")
    assert durations['model="a",status="200"'] == MAX_HISTOGRAMS + 10
    assert durations['model="b",status="500"'] == 1
    tenants = traffic.page("extproc_tenant_tokens_total")
    assert set(tenants.values()) == {7, 3}
    assert len(tenants) == 2 * (MAX_HISTOGRAMS + 10)
    theirs = traffic.page("llm_d_epp_request_input_tokens_count")
    assert len(theirs) == MAX_HISTOGRAMS + 1
    assert sum(theirs.values()) == MAX_HISTOGRAMS + 10


def test_memory_and_series_are_bounded_whatever_clients_name():
    """100,000 models, tenants, statuses and priorities take no more than the first thousands."""
    traffic = TrafficFixture()
    counters = traffic.counters.for_pool("p")

    def name(number):
        return RequestLabels(f"m{number}", f"m{number}", f"t{number}", number)

    def render():
        page = build_exposition(traffic.counters)
        return page.render().count(b"\n")

    def flood(numbers):
        for number in numbers:
            series = counters.series.find(name(number), is_served=True)
            series.record(series.histograms.name_status(str(100 + number % 900)), [float(number)])
            series.record("prompt", [float(number)])
            counters.record_queued(1.0, priority=number)

    for number in range(2_000):
        traffic.serve(name(number), status=str(100 + number % 900), usage={"prompt": number})
        traffic.refuse(name(number))
    flood(range(2_000, 4_000))
    before = render()
    flood(range(4_000, 98_000))
    tracemalloc.start()
    flood(range(98_000, 100_000))
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 2**14
    assert render() < before + 2_000
    assert sum(1 for _ in counters.series) <= MAX_SERIES + 100
