from __future__ import annotations

import asyncio

import grpc
import pytest

from extproc.decision import Outcome
from extproc.protocol.messages import MessageKind, RouteResponse
from extproc.routing.director import Director
from extproc.routing.request_preparer import PreparedRequest
from extproc.telemetry.request_series import merge_histogram
from tests.support import ext_proc_script, peer, serving
from tests.support.pool_fixture import PoolFixture

BODY = b'{"model":"m","prompt":"some text"}'
PLAIN = {**ext_proc_script.PLAIN, ":path": "/v1/completions"}


class BrokenDirector:
    """A director whose decisions have a bug."""

    def __init__(self, director: Director) -> None:
        self._director = director

    def __getattr__(self, name: str) -> object:
        return getattr(self._director, name)

    def decide(self, prepared: PreparedRequest, now: float) -> Outcome:
        raise ZeroDivisionError(prepared.raw.body)


def build_pool(*addresses: str) -> PoolFixture:
    return PoolFixture(dict.fromkeys(addresses or (ext_proc_script.ADDRESS,)))


async def test_037_a_request_id_is_generated_when_absent():
    """A request without x-request-id is given a unique one; one that has it keeps it."""
    async with serving.serving(build_pool()) as server:
        request_ids = set()
        for headers in ({":path": "/"}, {":path": "/"}, ext_proc_script.PLAIN):
            stream = server.stream()
            await stream.say(ext_proc_script.request_headers(headers, ends=True))
            (reply,) = await stream.hear()
            request_ids.add(reply.headers.get("x-request-id"))
            await stream.end()
        assert len(request_ids) == 3
        assert None in request_ids


async def test_075_a_refused_stream_ends_with_ok():
    """After an immediate response the stream ends with OK, whatever was sent besides."""
    async with serving.serving(PoolFixture({})) as server:
        stream = server.stream()
        await stream.say(
            ext_proc_script.request_headers(PLAIN),
            ext_proc_script.request_body(BODY, ends=True),
        )
        (reply,) = await stream.rest()
        assert (reply.part, reply.status) == ("immediate_response", 503)
        assert await stream.call.code() is grpc.StatusCode.OK
        await server.idle()
        assert server.servicer.shared.observer.counters.for_pool("").rejections == {
            (503, "rejected-no-endpoints"): 1
        }


async def test_076_an_exception_still_routes(caplog: pytest.LogCaptureFixture):
    """A bug in a decision costs its quality: the request goes to the least loaded endpoint."""
    fixture = build_pool()
    async with serving.serving(fixture, director=BrokenDirector(fixture.director)) as server:
        stream = server.stream()
        await stream.say(
            ext_proc_script.request_headers(PLAIN),
            ext_proc_script.request_body(BODY, ends=True),
        )
        assert await stream.hear(2) == [
            ext_proc_script.route(),
            ext_proc_script.hand_on(BODY, ends=True),
        ]
        assert await stream.end() is grpc.StatusCode.OK
        await server.idle()
        assert fixture.in_flight == 0
        assert server.servicer.shared.observer.counters.for_pool("").degraded.total() == 1
    assert "ZeroDivisionError" in caplog.text
    assert "some text" not in caplog.text


async def test_076_an_exception_without_endpoints_is_a_500_in_json():
    """A bug in a decision without a fallback: 500 in JSON, and the stream ends with OK."""
    empty = PoolFixture({})
    async with serving.serving(empty, director=BrokenDirector(empty.director)) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.request_headers(ends=True))
        (reply,) = await stream.rest()
        assert reply.status == 500
        assert reply.error["error"]["type"] == "server_error"
        assert await stream.call.code() is grpc.StatusCode.OK


ENDINGS = {
    "refused": [
        ext_proc_script.request_headers(PLAIN),
        ext_proc_script.request_body(b"nonsense", ends=True),
    ],
    "too large": [
        ext_proc_script.request_headers(PLAIN),
        ext_proc_script.request_body(b"x" * (1 << 20) + b"x"),
    ],
    "half a body": [ext_proc_script.request_headers(PLAIN), ext_proc_script.request_body(BODY)],
    "routed": [
        ext_proc_script.request_headers(PLAIN),
        ext_proc_script.request_body(BODY, ends=True),
    ],
    "misfit": [
        ext_proc_script.request_headers(ends=True),
        ext_proc_script.request_headers(ends=True),
    ],
    "early response": [ext_proc_script.request_headers(PLAIN), ext_proc_script.response_headers()],
    "response only": [
        ext_proc_script.response_headers(),
        ext_proc_script.response_body(b"x", ends=True),
    ],
    "nothing": [],
}


@pytest.mark.parametrize("how", ["half-close", "cancel"])
@pytest.mark.parametrize("messages", ENDINGS.values(), ids=ENDINGS)
async def test_077_no_ending_leaks_accounts(messages: list[ext_proc_script.Message], how: str):
    """However a stream ends, accounts and assembly bytes return to zero."""
    fixture = build_pool()
    async with serving.serving(fixture) as server:
        stream = server.stream()
        # The server may end the stream while we still speak.
        try:
            await stream.say(*messages)
            if how == "cancel":
                stream.call.cancel()
            await stream.end()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass
        await server.idle()
        assert fixture.in_flight == 0
        assert server.servicer.shared.body_budget.held_bytes == 0
        assert server.servicer.shared.observer.counters.streams_open == 0


async def test_077_garbage_ends_its_own_stream_only():
    """Bytes that are no message end their stream with INVALID_ARGUMENT; another one goes on."""
    fixture = build_pool()
    async with serving.serving(fixture) as server:
        good, bad = server.stream(), server.stream()
        await good.say(ext_proc_script.request_headers(PLAIN))
        await bad.call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await bad.rest()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await good.say(ext_proc_script.request_body(BODY, ends=True))
        assert (await good.hear(2))[0] == ext_proc_script.route()
        assert fixture.in_flight == 1
        assert await good.end() is grpc.StatusCode.OK
        await server.idle()
        assert fixture.in_flight == 0


async def test_092_a_piece_passes_before_the_next_exists():
    """Over gRPC a response piece is answered before the next one is sent."""
    async with serving.serving(build_pool()) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.request_headers(ends=True))
        await stream.hear()
        await stream.say(ext_proc_script.response_headers(ext_proc_script.SSE))
        assert await stream.hear() == [ext_proc_script.answer_headers()]
        for piece in (b"data: 1\n\n", b"data: 2\n\n", b""):
            await stream.say(ext_proc_script.response_body(piece, ends=not piece))
            (reply,) = await stream.hear()
            assert (reply.body, reply.ends) == (piece, not piece)
        assert await stream.end() is grpc.StatusCode.OK


RESPONSES = {
    "end of stream": [
        ext_proc_script.response_headers(),
        ext_proc_script.response_body(b"x", ends=True),
    ],
    "trailers": [
        ext_proc_script.response_headers(),
        ext_proc_script.response_body(b"x"),
        ext_proc_script.response_trailers(),
    ],
    "no body": [ext_proc_script.response_headers(ends=True)],
    "cut": [ext_proc_script.response_headers(), ext_proc_script.response_body(b"x")],
    "no response": [],
}


@pytest.mark.parametrize("how", ["half-close", "cancel"])
@pytest.mark.parametrize("messages", RESPONSES.values(), ids=RESPONSES)
async def test_105_the_end_is_accounted_exactly_once(
    messages: list[ext_proc_script.Message], how: str
):
    """Each way a routed request may end closes its account once and is counted once."""
    fixture = build_pool()
    async with serving.serving(fixture) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.request_headers(ends=True))
        await stream.hear()
        assert fixture.in_flight == 1
        for message in messages:
            await stream.say(message)
            await stream.hear()
        if how == "cancel":
            stream.call.cancel()
        else:
            assert await stream.end() is grpc.StatusCode.OK
        await server.idle()
        counters = server.servicer.shared.observer.counters
        pool = counters.for_pool("")
        assert fixture.in_flight == 0
        (series,) = pool.series
        duration_s = merge_histogram([series.histograms], *series.histograms.statuses)
        assert (series.running, duration_s.count, duration_s.counts[0]) == (0, 1, 1)
        assert pool.responses.total() + pool.without_response.total() == 1
        assert counters.streams.total() == 1
        assert set(counters.streams) <= {"ok", "cancelled"}


async def test_104_answers_are_counted_by_status():
    """An upstream error is counted under its :status."""
    async with serving.serving(build_pool()) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.request_headers(ends=True))
        await stream.hear()
        await stream.say(ext_proc_script.response_headers({":status": "503"}, ends=True))
        await stream.hear()
        await stream.end()
        await server.idle()
        assert server.servicer.shared.observer.counters.for_pool("").responses == {
            (ext_proc_script.ADDRESS, "503"): 1
        }


async def test_102_usage_is_added_up():
    """The usage an answer reports is counted when the stream ends."""
    async with serving.serving(build_pool()) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.request_headers(ends=True))
        await stream.hear()
        answer = b'{"usage":{"prompt_tokens":7,"completion_tokens":10,"total_tokens":17}}'
        await stream.say(
            ext_proc_script.response_headers(), ext_proc_script.response_body(answer, ends=True)
        )
        await stream.end()
        await server.idle()
        assert server.servicer.shared.observer.counters.for_pool("").usage == {
            "prompt": 7,
            "completion": 10,
        }


async def test_110_an_unwatched_stream_is_closed_with_ok():
    """After the pick of an unknown gRPC method the server ends the stream with OK."""
    async with serving.serving(build_pool()) as server:
        stream = server.stream()
        headers = {
            **ext_proc_script.PLAIN,
            ":path": "/a.B/C",
            "content-type": "application/grpc",
        }
        await stream.say(
            ext_proc_script.request_headers(headers),
            ext_proc_script.request_body(b"x", ends=True),
        )
        assert await stream.rest() == [
            ext_proc_script.route(),
            ext_proc_script.hand_on(b"x", ends=True),
        ]
        assert await stream.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("routed", [True, False])
async def test_119_a_client_that_leaves_frees_its_accounts(routed: bool):  # noqa: FBT001
    """A cancelled stream is a normal end, and nothing stays charged."""
    fixture = build_pool()
    async with serving.serving(fixture) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.request_headers(PLAIN))
        await stream.say(ext_proc_script.request_body(BODY, ends=routed))
        if routed:
            await stream.hear(2)
            assert fixture.in_flight == 1
        else:
            while not server.servicer.shared.body_budget.held_bytes:
                await asyncio.sleep(0)
        stream.call.cancel()
        await server.idle()
        assert fixture.in_flight == 0
        assert server.servicer.shared.body_budget.held_bytes == 0
        assert set(server.servicer.shared.observer.counters.streams) <= {"ok", "cancelled"}


async def test_123_a_thousand_slow_streams_do_not_wait_for_each_other():
    """With 1,000 bodies half sent, any stream can finish first, and all finish."""
    fixture = build_pool()
    async with serving.serving(fixture) as server:
        first = ext_proc_script.codec.encode(
            RouteResponse(MessageKind.REQUEST_HEADERS, ext_proc_script.ADDRESS)
        )
        streams = [server.stream() for _ in range(1000)]
        for stream in streams:
            await stream.say(
                ext_proc_script.request_headers(PLAIN), ext_proc_script.request_body(BODY[:9])
            )
        # The last one to come is the first to be answered.
        for stream in reversed(streams):
            await stream.say(ext_proc_script.request_body(BODY[9:], ends=True))
            assert await stream.call.read() == first
        assert fixture.in_flight == 1000
        for stream in streams:
            stream.call.cancel()
        await server.idle()
        assert fixture.in_flight == 0
        assert server.servicer.shared.body_budget.held_bytes == 0


async def test_streams_over_the_limit_are_refused():
    """A stream over the limit is refused with 429 and Retry-After; the others go on."""
    fixture = build_pool()
    async with serving.serving(fixture, max_streams=1) as server:
        first = server.stream()
        await first.say(ext_proc_script.request_headers(ends=True))
        await first.hear()
        second = server.stream()
        await second.say(ext_proc_script.request_headers(ends=True))
        (reply,) = await second.rest()
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        await first.say(ext_proc_script.response_headers())
        assert await first.hear() == [ext_proc_script.answer_headers()]
        assert await first.end() is grpc.StatusCode.OK


async def test_a_response_without_a_decision_is_not_timed():
    """The time to response headers is measured only from a pick."""
    async with serving.serving(build_pool()) as server:
        stream = server.stream()
        await stream.say(ext_proc_script.response_headers())
        await stream.hear()
        await stream.end()
        await server.idle()
        counters = server.servicer.shared.observer.counters.for_pool("")
        assert sum(counters.response_headers_s.counts) == 0


USED = b'data: {"usage":{"prompt_tokens":7,"completion_tokens":10,"total_tokens":17}}\n\n'
COSTS = {"prompt": 1.0, "completion": 0.5, "cached": -1.0}


def costs(*answer: ext_proc_script.Message) -> list[object]:
    """Cost in the metadata of each reply to an answer."""

    async def test() -> list[object]:
        async with serving.serving(build_pool(), request_cost=COSTS) as server:
            stream = server.stream()
            await stream.say(
                ext_proc_script.request_headers(PLAIN),
                ext_proc_script.request_body(BODY, ends=True),
            )
            await stream.hear(2)
            await stream.say(*answer)
            await stream.call.done_writing()
            replies = await stream.rest()
            await server.idle()
            return [reply.metadata.get(peer.BALANCER) for reply in replies]

    return serving.run(test())


COST = {"x-gateway-inference-request-cost": 7 + 0.5 * 10}


def test_106_the_cost_is_on_the_last_body_message():
    """On the last of a stream's messages, also where that is empty or long and cut; once."""
    begun = [
        ext_proc_script.response_headers(ext_proc_script.SSE),
        ext_proc_script.response_body(USED),
    ]
    assert costs(*begun, ext_proc_script.response_body(b"", ends=True)) == [None, None, COST]
    assert costs(*begun, ext_proc_script.response_body(b"x" * 70_000 + USED, ends=True)) == [
        *(None, None, None),
        COST,
    ]
    assert costs(
        ext_proc_script.response_headers(ext_proc_script.JSON),
        ext_proc_script.response_body(USED, ends=True),
    ) == [
        None,
        COST,
    ]


def test_106_the_cost_is_with_trailers_that_end_the_answer():
    """The last body message is known to be the last only then."""
    begun = [
        ext_proc_script.response_headers(ext_proc_script.SSE),
        ext_proc_script.response_body(USED),
    ]
    assert costs(*begun, ext_proc_script.response_trailers()) == [None, None, COST]


def test_106_an_answer_without_usage_has_no_cost():
    """Without reported usage there is no cost."""
    assert costs(
        ext_proc_script.response_headers(), ext_proc_script.response_body(b"{}", ends=True)
    ) == [None, None]
