"""Request recorder: what it counts of a request, and which decisions it remembers."""

from __future__ import annotations

import base64
import json
import weakref

import msgspec
import pytest

from extproc.decision import NO_ENDPOINTS, Disaggregation, Rejection
from extproc.prefix_cache import blocks
from extproc.recording.rows import pack_hashes
from extproc.request import InferenceRequest, RequestLabels
from extproc.telemetry import explanation, exposition, pool_metrics
from extproc.telemetry.counters import REMOVED_ENDPOINT, ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.request_series import MAX_UNANSWERED_MODELS
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support import recordings
from tests.telemetry.test_decision_log import SPOT, WatchedRecord, decided


def page(counters):
    """The samples of requests on the metrics page, by name and labels."""
    families = (
        *exposition.request_families(counters.pools),
        *pool_metrics.request_families(counters.pools),
    )
    lines = "".join(
        piece for family in families for piece in family.render(is_openmetrics=False)
    ).splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


LABELS = RequestLabels("m", "m", "none", 0)


def respond(request, duration_s, *, status="200", is_stream=False, is_shown=False, elapsed_s=None):
    """The response headers of a request."""
    request.on_response_headers(
        duration_s,
        elapsed_s=duration_s if elapsed_s is None else elapsed_s,
        status=status,
        is_stream=is_stream,
        is_shown=is_shown,
    )


class RecorderFixture:
    """A recorder of streams with its counters and its decision log."""

    def __init__(self):
        self.counters = ProcessCounters()
        self.decisions = DecisionLog(10)
        self.recorder = StreamRecorder(self.counters, self.decisions, lambda: 0.0)

    def route(self, pool="default", *, prompt=None, disaggregation=None, model="m"):
        """The recorder of a routed request."""
        request = self.recorder.observe_request("default")
        if pool != "default":
            self.counters.for_pool(pool)
            request.on_pool_selected(pool)
        decision = decided()
        if prompt is not None:
            inference = msgspec.structs.replace(decision.request, prompt=prompt)
            decision = msgspec.structs.replace(decision, request=inference)
        decision = msgspec.structs.replace(decision, disaggregation=disaggregation)
        labels = RequestLabels(model, model, "none", 0)
        request.on_routed(
            decision, request_id="id", labels=labels, trace_id="", now=1.0, duration_s=0.001
        )
        return request


def test_recorder_counts_streams_by_result():
    """A stream is open from its start to its end."""
    scene = RecorderFixture()
    scene.recorder.on_stream_opened()
    assert scene.counters.streams_open == 1
    scene.recorder.on_stream_ended("cancelled")
    assert (scene.counters.streams_open, scene.counters.streams) == (0, {"cancelled": 1})


def test_recorder_counts_a_request_for_the_selected_pool():
    """Counters of the default pool stay at 0 once another pool was selected."""
    scene = RecorderFixture()
    request = scene.route(pool="other")
    request.on_rejected(Rejection(503, "none"), request_id="id", labels=LABELS, now=1.0)
    assert scene.counters.for_pool("other").routed_total == 1
    assert scene.counters.for_pool("other").rejections == {(503, ""): 1}
    assert not scene.counters.for_pool("default").routed_total


def test_a_log_line_has_the_description_that_the_data_plane_got():
    """It is made for the line only where the data plane gets none."""
    requests = [RecorderFixture().route() for _ in range(2)]
    requests[0].on_described("adaptive; chose=it")
    for request in requests:
        request.on_finished(endpoint="10.0.0.1:8000", status="200", duration_s=1.0)
    picks = [request.build_line().pick for request in requests]
    assert picks == ["adaptive; chose=it", explanation.format_short(requests[1].decision)]


def test_requests_for_unlisted_models_are_counted_at_once():
    """Model lists are polled for them; to ask how many there are settles nothing."""
    scene = RecorderFixture()
    request = scene.recorder.observe_request("default")
    decision = msgspec.structs.replace(decided(), model_unlisted=True)
    request.on_routed(
        decision, request_id="id", labels=LABELS, trace_id="", now=1.0, duration_s=0.001
    )
    counters = scene.counters.open_pools["default"]
    assert (counters.unknown_models, counters.routed_total) == (1, 0)
    assert (scene.counters.for_pool("default").unknown_models, counters.routed_total) == (1, 1)


def test_decisions_with_stages_are_counted_by_type_and_reason():
    """By the model of their series, so that clients cannot make any number of them."""
    scene = RecorderFixture()
    elsewhere = decided()
    for stages in (
        Disaggregation(prefill=elsewhere, encode_reason="no-media"),
        Disaggregation(prefill_reason="cached", encode_reason="no-media"),
        Disaggregation(prefill_reason="cached", encode=elsewhere),
        Disaggregation(prefill=elsewhere, encode=elsewhere),
        None,
    ):
        scene.route(disaggregation=stages)
    series = page(scene.counters)
    head = 'extproc_disaggregation_decisions_total{model="m",pool="default",type='
    assert {name: value for name, value in series.items() if name.startswith(head)} == {
        f'{head}"{kind}"}}': 1
        for kind in ("prefill-decode", "decode-only", "encode-decode", "encode-prefill-decode")
    }
    head = 'extproc_disaggregation_kept_stages_total{pool="default",reason='
    assert series[f'{head}"no-media",stage="encode"}}'] == 2
    assert series[f'{head}"cached",stage="prefill"}}'] == 2
    name = f'extproc_disaggregation_routed_stages_total{{endpoint="{SPOT.address}",pool="default",'
    assert series[f'{name}stage="prefill"}}'] == series[f'{name}stage="encode"}}'] == 2
    scene.counters.for_pool("default").forget(SPOT.address)
    assert f'{name}stage="prefill"}}' not in page(scene.counters)


def test_a_model_of_no_series_counts_its_stages_as_other():
    """As all that is counted by model."""
    scene = RecorderFixture()
    for number in range(2 * MAX_UNANSWERED_MODELS):
        scene.route(disaggregation=Disaggregation(), model=f"model-{number}")
    counts = scene.counters.for_pool("default").disaggregation
    assert len(counts) == MAX_UNANSWERED_MODELS + 1
    assert counts["other", "decode-only"] == MAX_UNANSWERED_MODELS


def test_facts_of_many_open_requests_are_counted_in_small_parts():
    """Ten thousand that come before any ends would hold the event loop if counted at a time."""
    scene = RecorderFixture()
    waiting = []
    requests = []
    for _ in range(2000):
        requests.append(scene.route())
        waiting.append(len(scene.recorder.routed) + len(scene.recorder.answered))
    for request in requests:
        respond(request, 0.1)
        waiting.append(len(scene.recorder.routed) + len(scene.recorder.answered))
    assert max(waiting) < 256
    counters = scene.counters.for_pool("default")
    assert (counters.routed_total, counters.answered_total) == (2000, 0)
    assert sum(counters.response_headers_s.counts) == 2000
    for request in requests:
        request.on_finished(endpoint="10.0.0.1:8000", status="200", duration_s=1.0)
    assert scene.counters.for_pool("default").answered_total == 2000


def test_histograms_of_requests_have_the_pool_as_label():
    """Histograms and causes of rejections are counted for each pool."""
    scene = RecorderFixture()
    for pool, duration_s in (("fast", 0.02), ("slow", 20.0)):
        request = scene.route(pool)
        request.on_dequeued(duration_s, priority=0)
        respond(request, duration_s)
        request.on_finished(endpoint="10.0.0.1:8000", status="200", duration_s=duration_s)
    refused_request = scene.route("slow")
    refused_request.on_rejected(NO_ENDPOINTS, request_id="", labels=None, now=1.0)
    shown = page(scene.counters)
    for name, labels in (
        ("extproc_time_to_response_headers_seconds", ""),
        ("extproc_request_duration_seconds", 'model="m",'),
        ("extproc_flow_control_request_queue_duration_seconds", ""),
    ):
        more = {
            "extproc_request_duration_seconds": ',status="200"',
            "extproc_flow_control_request_queue_duration_seconds": ',priority="0"',
        }.get(name, "")
        fast, slow = (f'{labels}pool="{pool}"{more}' for pool in ("fast", "slow"))
        assert shown[f'{name}_bucket{{{fast},le="0.025"}}'] == 1
        assert shown[f'{name}_bucket{{{slow},le="10"}}'] == 0
        assert shown[f'{name}_bucket{{{slow},le="+Inf"}}'] == shown[f"{name}_count{{{slow}}}"] == 1
        assert shown[f"{name}_sum{{{slow}}}"] == 20.0
    assert (
        shown['extproc_rejection_causes_total{cause="no-endpoints",pool="slow",status="503"}'] == 1
    )


def test_recorder_adds_the_end_of_a_request_to_the_decision_log():
    """Status, duration and usage of a response belong to its decision."""
    scene = RecorderFixture()
    request = scene.route()
    respond(request, 0.5)
    request.on_finished(endpoint="10.0.0.1:8000", status="200", duration_s=2.0)
    request.on_usage({"completion": 3})
    record = scene.decisions.find("id")
    assert (record.status, record.seconds, record.usage) == ("200", 2.0, {"completion": 3})
    assert scene.counters.for_pool("default").usage == {"completion": 3}
    assert sum(scene.counters.for_pool("default").response_headers_s.counts) == 1


def test_facts_of_requests_are_counted_before_they_are_read():
    """They wait for each other, but not beyond a bound."""
    scene = RecorderFixture()
    held = scene.counters.for_pool("default")
    scene.route()
    assert held.routed_total == 0
    assert scene.counters.pools["default"].routed_total == 1
    for _ in range(1000):
        scene.route().on_finished(endpoint="10.0.0.1:8000", status="200", duration_s=1.0)
    assert held.routed_total > 800


def test_a_request_whose_facts_wait_holds_no_prompt():
    """Any number of requests may be open, and their prompts are outside of any budget."""
    scene = RecorderFixture()
    request = scene.recorder.observe_request("default")
    decision = msgspec.structs.replace(
        decided(), request=InferenceRequest("chat", "m", prompt=b"secret"), block_hashes=[1, 2]
    )
    request.on_routed(
        decision, request_id="id", labels=LABELS, trace_id="", now=1.0, duration_s=0.001
    )
    assert (request.decision.request.prompt, request.decision.block_hashes) == (b"", ())


def test_a_removed_endpoint_gets_no_series_later():
    """Waiting counts are settled before the series of an endpoint are dropped."""
    scene = RecorderFixture()
    request = scene.route()
    respond(request, 0.5)
    request.on_finished(endpoint=SPOT.address, status="200", duration_s=1.0)
    scene.counters.open_pools["default"].forget(SPOT.address)
    counted = scene.counters.for_pool("default")
    assert counted.answered_total == 1
    assert not counted.responses
    assert not counted.requests_routed


def test_recorder_counts_removed_endpoints_under_a_common_label():
    """The address of an endpoint that is no longer in the pool makes no series."""
    scene = RecorderFixture()
    scene.route().on_finished(endpoint=None, status="200", duration_s=1.0)
    scene.route().on_finished(endpoint=None, status="", duration_s=1.0)
    counted = scene.counters.for_pool("default")
    assert counted.responses == {(REMOVED_ENDPOINT, "200"): 1}
    assert counted.without_response == {REMOVED_ENDPOINT: 1}


def test_recorder_records_refused_requests_that_have_an_id():
    """Under the pool that was selected."""
    scene = RecorderFixture()
    scene.counters.for_pool("other")
    for request_id in ("id", ""):
        request = scene.recorder.observe_request("default")
        request.on_pool_selected("other")
        request.on_rejected(NO_ENDPOINTS, request_id=request_id, labels=LABELS, now=1.0)
    (record,) = scene.decisions.latest(9)
    assert (record.id, record.pool, record.model, record.at) == ("id", "other", "m", 1.0)


def test_a_request_frees_a_dropped_decision():
    """A batch of decisions drops as many as it has."""
    scene = RecorderFixture()
    records = [WatchedRecord(str(number), 0.0, decided()) for number in range(12)]
    alive = weakref.WeakSet(records)
    scene.decisions.extend(records)
    del records
    scene.recorder.observe_request("default")
    assert len(alive) == 11


def test_a_bug_in_the_recording_of_a_request_keeps_no_other_from_being_counted():
    """It is an exception that is counted; the requests are counted, remembered and recorded."""

    class BrokenRecordings:
        """Recordings that cannot take every second decision, and no end."""

        def __init__(self):
            self.num_tried = self.num_ends = 0

        def hash_prompt(self, _):
            return (), None

        def add_routed(self, *_, **__):
            self.num_tried += 1
            if self.num_tried % 2:
                raise ZeroDivisionError
            return self.num_tried

        def add_ends(self, ends):
            self.num_ends += len(ends)
            raise ZeroDivisionError

        def encode(self):
            raise ZeroDivisionError

    subject, recordings = RecorderFixture(), BrokenRecordings()
    subject.recorder.set_recordings(recordings)
    requests = [subject.route() for _ in range(4)]
    counters = subject.counters.pools["default"]
    assert counters.routed_total == 4
    assert len(subject.decisions) == 4
    running = next(name for name in page(subject.counters) if "running" in name)
    assert page(subject.counters)[running] == 4
    for request in requests:
        respond(request, 0.1)
        request.on_finished(endpoint="10.0.0.1:8000", status="200", duration_s=0.2)
    assert subject.counters.pools["default"].answered_total == 4
    assert page(subject.counters)[running] == 0
    assert (recordings.num_tried, recordings.num_ends) == (4, 2)
    assert sum(subject.counters.exceptions.values()) >= 4  # and those of `encode`


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("size_bytes", [1000, 100_000])
def test_no_prompt_waits(size_bytes, is_recorded):
    """It is hashed at once where its decision is recorded; recordings have the hashes of all."""
    subject, active = RecorderFixture(), recordings.recordings()
    recording = active.start()
    if is_recorded:
        subject.recorder.set_recordings(active)
    request = subject.route(prompt=b"x" * size_bytes)
    assert (request.decision.request.prompt, request.decision.pool) == (b"", "default")
    subject.counters.settle()
    rows = [json.loads(line) for line in recording.take(10).splitlines()]
    decisions = [row for row in rows if row["kind"] == "decision"]
    assert len(decisions) == is_recorded
    if is_recorded:
        chain = blocks.chain(b"x" * size_bytes, blocks.seed("", ""))
        assert base64.b64decode(decisions[0]["blocks"]) == pack_hashes(chain) != b""


def test_a_bug_in_the_hashes_of_a_prompt_costs_its_row_alone():
    """It is an exception that is counted; the request is counted and remembered."""

    def hash_prompt(_):
        raise ZeroDivisionError

    subject, active = RecorderFixture(), recordings.recordings()
    recording = active.start()
    active.hash_prompt = hash_prompt
    subject.recorder.set_recordings(active)
    subject.route(prompt=b"x")
    counters = subject.counters.for_pool("default")
    assert (counters.routed_total, len(subject.decisions)) == (1, 1)
    assert sum(subject.counters.exceptions.values()) == 1
    assert recording.take(10) == b""


@pytest.mark.parametrize("first", ["default", "other"])
def test_requests_of_a_removed_pool_count_under_no_other(first):
    """They may end together with requests of the only pool that is left."""
    scene = RecorderFixture()
    requests = {pool: scene.route(pool) for pool in ("default", "other")}
    del scene.counters.pools["other"]
    for pool in sorted(requests, key=lambda pool: pool != first):
        requests[pool].on_finished(endpoint=f"{pool}:1", status="200", duration_s=1.0)
    assert scene.counters.for_pool("default").responses == {("default:1", "200"): 1}


def test_a_pool_removed_while_a_request_waits_gets_no_series():
    """They would stay until the pool comes and goes again."""
    scene = RecorderFixture()
    request = scene.recorder.observe_request("")
    request.on_pool_selected("removed")
    request.on_rejected(NO_ENDPOINTS, request_id="id", labels=LABELS, now=1.0)
    assert list(scene.counters.pools) == [""]
