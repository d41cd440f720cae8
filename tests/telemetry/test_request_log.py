"""The line of a request: what it has, which requests have one, and what it costs without."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest

from extproc.decision import Decision, Rejection
from extproc.endpoint import Candidate, Endpoint
from extproc.request import InferenceRequest, RequestLabels
from extproc.telemetry import pool_log
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.decision_log import DecisionLog
from extproc.telemetry.request_recorder import RequestRecorder
from extproc.telemetry.stream_recorder import StreamRecorder
from tests.support.canary import CANARY
from tests.support.virtual_loop import VirtualLoop

ADDRESS = "10.0.0.1:8000"
LABELS = RequestLabels("m", "m", "none", 0)


def decided(api="chat"):
    endpoint = Endpoint(ADDRESS)
    return Decision(
        InferenceRequest(api, "m", prompt=CANARY.encode(), prompt_tokens=12, session=CANARY),
        [endpoint],
        profile="adaptive",
        candidates=[Candidate(endpoint)],
        matched_tokens=4,
        plugin_keys={"session": CANARY},
    )


class RequestLogFixture:
    """A recorder of streams that logs requests, and the lines it wrote."""

    def __init__(self, caplog, mode):
        self._caplog = caplog
        self.recorder = StreamRecorder(
            ProcessCounters(), DecisionLog(10), lambda: 0.0, pool_log.recorder_type(mode)
        )

    def route(self, *, api="chat", wait_s=None):
        request = self.recorder.observe_request("demo")
        if wait_s is not None:
            request.on_dequeued(wait_s, priority=0)
        request.on_routed(
            decided(api), request_id="id", labels=LABELS, trace_id="", now=1.0, duration_s=0.001
        )
        return request

    def serve(self, status, *, api="chat", wait_s=None, usage=None):
        """A request from its start to its end."""
        request = self.route(api=api, wait_s=wait_s)
        if status:
            request.on_response_headers(
                0.25, elapsed_s=0.75, status=status, is_stream=False, is_shown=False
            )
        if usage:
            request.on_usage(usage)
        request.on_finished(endpoint=ADDRESS, status=status, duration_s=2.0)

    def refuse(self, request_id="id"):
        request = self.recorder.observe_request("demo")
        rejection = Rejection(429, CANARY, retry_after_s=3, cause="rate-limited")
        request.on_rejected(rejection, request_id=request_id, labels=LABELS, now=1.0)

    def take(self):
        lines = [(record.message, record.fields) for record in self._caplog.records]
        self._caplog.clear()
        return lines


def test_a_line_has_times_tokens_and_the_pick(caplog):
    """Wait, result and reason of the choice of a request."""
    scene = RequestLogFixture(caplog, "all")
    usage = {"prompt": 11, "cached": 8, "completion": 3}
    scene.serve("200", wait_s=0.5, usage=usage)
    assert scene.take() == [
        (
            "request",
            {
                "id": "id",
                "pool": "demo",
                "model": "m",
                "endpoint": ADDRESS,
                "status": 200,
                "prompt_tokens": 11,
                "cached_tokens": 8,
                "output_tokens": 3,
                "estimated_prompt_tokens": 12,
                "predicted_cached_tokens": 4,
                "queue_s": 0.5,
                "response_headers_s": 0.25,
                "total_s": 2.0,
                "pick": f"adaptive; chose={ADDRESS}; cached=4/12",
            },
        )
    ]


def test_a_line_that_a_bug_prevents_takes_no_other_with_it(caplog):
    """The bug is counted as an exception."""
    scene = RequestLogFixture(caplog, "all")
    requests = scene.route(), scene.route()
    scene.recorder.settle()
    requests[0].decision = None

    async def end_together():
        for request in requests:
            request.on_finished(endpoint=ADDRESS, status="200", duration_s=2.0)
        scene.recorder.settle()

    asyncio.run(end_together())
    assert [record.message for record in caplog.records].count("request") == 1
    assert sum(scene.recorder.counters.exceptions.values()) == 1


def test_a_line_of_a_stream_has_the_first_token(caplog):
    """Headers of a stream may come long before, so both are there where chunks are shown."""
    scene = RequestLogFixture(caplog, "all")
    request = scene.route()
    request.on_response_headers(0.25, elapsed_s=0.3, status="200", is_stream=True, is_shown=True)
    request.on_response_chunk(0.9)
    request.on_finished(endpoint=ADDRESS, status="200", duration_s=2.0)
    ((_, fields),) = scene.take()
    assert (fields["response_headers_s"], fields["first_token_s"]) == (0.25, 0.85)


def test_a_line_of_a_refused_request_has_the_cause(caplog):
    """The message for the client may name what the client wrote, and is not logged."""
    scene = RequestLogFixture(caplog, "errors")
    scene.refuse()
    fields = {"id": "id", "pool": "demo", "model": "m", "status": 429, "cause": "rate-limited"}
    assert scene.take() == [("request refused", {**fields, "retry_after_s": 3})]


@pytest.mark.parametrize(("mode", "count"), [("off", 0), ("errors", 1), ("all", 1)])
def test_an_abandoned_request_has_a_line(caplog, mode, count):
    """It got no answer, so it is an error."""
    scene = RequestLogFixture(caplog, mode)
    request = scene.recorder.observe_request("demo")
    rejection = Rejection(499, CANARY, cause="client-left")
    request.on_abandoned(rejection, request_id="id", labels=None, now=1.0)
    fields = {"id": "id", "pool": "demo", "model": None, "status": 499, "cause": "client-left"}
    expected = ("request abandoned", {name: value for name, value in fields.items() if value})
    assert scene.take() == [expected] * count


def test_a_request_that_fails_after_its_choice_has_one_line(caplog):
    """A bug of ours is answered with 500, and then the stream ends."""
    scene = RequestLogFixture(caplog, "all")
    request = scene.recorder.observe_request("demo")
    request.on_routed(
        decided(), request_id="id", labels=LABELS, trace_id="", now=1.0, duration_s=0.001
    )
    rejection = Rejection(500, "bug", cause="bug")
    request.on_rejected(rejection, request_id="id", labels=None, now=1.0)
    request.on_finished(endpoint=ADDRESS, status="", duration_s=2.0)
    assert [message for message, _ in scene.take()] == ["request refused"]


def test_ids_of_a_line_are_bounded(caplog):
    """As everywhere else."""
    scene = RequestLogFixture(caplog, "all")
    scene.refuse("x" * 10_000)
    ((_, fields),) = scene.take()
    assert len(fields["id"]) <= 256


@pytest.mark.parametrize(
    ("status", "api", "logged"),
    [
        ("200", "chat", False),
        ("301", "chat", False),
        ("404", "chat", True),
        ("503", "chat", True),
        ("", "chat", True),
        ("", "count_tokens", False),
    ],
)
def test_errors_are_responses_without_a_good_status(caplog, status, api, logged):
    """A response that is not watched has no status, which is no error."""
    scene = RequestLogFixture(caplog, "errors")
    scene.serve(status, api=api)
    assert len(scene.take()) == logged


def test_requests_are_not_logged_unless_wanted(caplog):
    """Off, requests have the recorder that knows nothing of a log."""
    scene = RequestLogFixture(caplog, "off")
    scene.serve("503")
    scene.refuse()
    assert not scene.take()
    assert type(scene.recorder.observe_request("demo")) is RequestRecorder


def test_the_level_of_the_log_does_not_hide_requests(caplog):
    """`log.requests` alone decides."""
    ours = logging.getLogger("extproc")
    before = ours.level
    ours.setLevel(logging.ERROR)
    try:
        scene = RequestLogFixture(caplog, "all")
        scene.serve("200")
        assert len(scene.take()) == 1
    finally:
        ours.setLevel(before)


def test_a_line_waits_for_others_from_its_own_end_on(caplog):
    """The timer of lines that were written before, because counters were read, does not end the wait."""
    scene = RequestLogFixture(caplog, "all")
    loop = VirtualLoop()

    async def serve():
        scene.serve("200")
        await asyncio.sleep(0.1)
        scene.recorder.settle()
        assert len(scene.take()) == 1
        scene.serve("200")
        await asyncio.sleep(0.1)
        assert scene.take() == []
        await asyncio.sleep(0.1)
        assert len(scene.take()) == 1

    with contextlib.closing(loop):
        loop.run_until_complete(serve())
