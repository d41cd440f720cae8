"""Requests and answers through the lean profile, seen by the client and by the backend."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from tests.e2e import backend, http1, http2, installation
from tests.support.canary import CANARY

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()


@pytest.fixture(scope="module")
def place(live, served):
    with live.holding(
        installation.installed(
            served.address,
            change=lambda config: installation.manager(config).update(
                {"http_protocol_options": {"enable_trailers": True}}
            ),
        )
    ) as item:
        yield item


async def test_003_plaintext_serving(place, served):
    """With --secure-serving=false Envoy reaches extproc without TLS."""
    answer = await http1.ask(place.port, "/v1/chat/completions", CHAT)
    assert (answer.status, answer.json()["by"]) == (200, served.address)


async def test_024_the_pick_is_where_envoy_connects(place, served):
    """The backend that extproc named sees the name, once, and x-request-id."""
    await http1.ask(place.port, "/v1/chat/completions", CHAT)
    head = served.asks[-1].head
    assert head.get("x-gateway-destination-endpoint") == served.address
    assert head.get("x-request-id")


@pytest.mark.parametrize("own", ["", "my-own-id-1"])
async def test_the_id_in_the_response_finds_the_decision(place, served, own):
    """It is the client's, or else Envoy's, and the engine sees the same."""
    headers = [("x-request-id", own)] if own else []
    answer = await http1.ask(place.port, "/v1/chat/completions", CHAT, headers=headers)
    request_id = answer.head.get("x-request-id")
    assert request_id == (own or request_id) != ""
    assert served.asks[-1].head.get("x-request-id") == request_id
    decision = await http1.ask(place.pages, f"/debug/decisions/{request_id}")
    assert decision.json()["endpoints"] == [served.address]


async def test_the_access_log_has_id_pick_and_endpoint(place, served):
    """One line per request, which names no query: it may hold a key."""
    headers = [("x-request-id", "logged-1")]
    path = f"/v1/chat/completions?key={CANARY}"
    answer = await http1.ask(place.port, path, CHAT, headers=headers)
    line = await place.access(id="logged-1")
    assert line["picked"] == line["endpoint"] == served.address
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["attempts"], line["details"]) == (1, "via_upstream")
    assert 0 <= line["first_byte_ms"] <= line["total_ms"]
    assert line["received_bytes"] == len(CHAT)
    assert line["decision"].startswith(f"least-request; chose={served.address}; ")
    assert not [text for _, text in answer.head.headers if "chose=" in text]


async def test_026_bodies_arrive_byte_for_byte(place, served):
    """White space, key order, unicode and big numbers are what the client sent."""
    body = (
        '{ "z": 1e400, "model":"m",\n\t"a": 123456789012345678901234567890, '
        '"messages": [{"role":"user","content":"\\u00e9 é 🙂  "}] , "a":2}'
    ).encode()
    answer = await http1.ask(place.port, "/v1/chat/completions", body)
    assert answer.status == 200
    assert served.asks[-1].body == body


@pytest.mark.parametrize("size", [61_000, 62_000, 62_001, 63_000, 125_000])
async def test_020_bodies_at_the_piece_limit(place, served, size):
    """Bodies around the size of one piece arrive whole."""
    body = random.Random(size).randbytes(size)
    answer = await http1.ask(place.port, "/upload", body)
    assert answer.status == 200
    assert served.asks[-1].body == body


async def test_028_body_in_odd_chunks(place, served):
    """A body cut inside a token, each piece sent only once the one before is on its way."""
    async with http1.calling(place.port) as call:
        await call.start("POST", "/v1/chat/completions", chunked=True)
        for at in range(0, len(CHAT), 7):
            await call.chunk(CHAT[at : at + 7])
        await call.end()
        assert (await call.answer()).status == 200
    assert served.asks[-1].body == CHAT


async def test_022_body_ended_by_trailers(place, served):
    """A chunked HTTP/1 body that ends with trailers is routed and arrives whole."""
    answer = await http1.ask(
        place.port, "/v1/chat/completions", chunks=[CHAT[:9], CHAT[9:]], trailers=[("x-sum", "1")]
    )
    assert answer.status == 200
    assert served.asks[-1].body == CHAT


async def test_022_http2_body_ended_by_trailers(place, served):
    """An HTTP/2 body that ends with trailers is routed and arrives whole."""
    answer = await http2.ask(place.port, "/v1/chat/completions", CHAT, trailers=[("x-sum", "1")])
    assert answer.status == 200
    assert served.asks[-1].body == CHAT


async def test_030_empty_chunked_body(place, served):
    """A request whose body turns out empty is routed like one without."""
    answer = await http1.ask(place.port, "/v1/chat/completions", chunks=[])
    assert answer.status == 200
    assert served.asks[-1].size == 0


@pytest.mark.parametrize("method", ["GET", "HEAD", "DELETE", "OPTIONS"])
async def test_032_requests_without_body(place, served, method):
    """Requests without a body go to any ready endpoint, whatever their path."""
    for path in ("/primary", "/test-primary-gateway", "/v1/models"):
        answer = await http1.ask(place.port, path, method=method)
        assert answer.status == 200
        assert served.asks[-1].head.line == f"{method} {path} HTTP/1.1"


async def test_033_post_to_an_unknown_path(place, served):
    """A JSON body on an unknown path is routed."""
    body = b'{"model":"conformance-fake-model","prompt":"Write as if you were a critic"}'
    answer = await http1.ask(place.port, "/primary-gateway-test", body)
    assert answer.status == 200
    assert served.asks[-1].body == body


async def test_034_bytes_that_are_no_json(place, served):
    """Bytes that are no JSON are routed unchanged on a path that does not ask for JSON."""
    answer = await http1.ask(place.port, "/anything", b"passthrough-parser \x00\xff")
    assert answer.status == 200
    assert served.asks[-1].body == b"passthrough-parser \x00\xff"


async def test_035_duplicate_request_headers(place, served):
    """Headers that are there twice reach the backend twice, in order."""
    twice = [("x-many", "one"), ("x-many", "two"), ("cookie", "a=1"), ("cookie", "b=2")]
    await http1.ask(place.port, "/v1/chat/completions", CHAT, headers=twice)
    head = served.asks[-1].head
    many = [part.strip() for value in head.all("x-many") for part in value.split(",")]
    cookies = [part.strip() for value in head.all("cookie") for part in value.split(";")]
    assert (many, cookies) == (["one", "two"], ["a=1", "b=2"])


@pytest.mark.parametrize("body", [None, CHAT])
async def test_039_client_named_destination(place, served, body):
    """A destination named by the client steers nothing and does not reach the backend."""
    async with backend.backend() as elsewhere:
        headers = [
            ("x-gateway-destination-endpoint", elsewhere.address),
            ("X-Gateway-Destination-Endpoint", elsewhere.address),
            ("x-gateway-destination-endpoint-subset", elsewhere.address),
            ("test-epp-endpoint-selection", elsewhere.address),
        ]
        answer = await http1.ask(place.port, "/v1/completions-not", body, headers=headers)
        assert elsewhere.asks == []
    assert answer.json()["by"] == served.address
    observed = served.asks[-1].head
    assert observed.all("x-gateway-destination-endpoint") == [served.address]
    assert observed.all("x-gateway-destination-endpoint-subset") == []
    assert observed.all("test-epp-endpoint-selection") == []


async def test_040_control_headers_stay_outside(place, served):
    """Headers that steer a picker do not reach the backend."""
    names = ["x-llm-d-inference-objective", "x-gateway-inference-fairness-id", "x-slo-ttft-ms"]
    await http1.ask(place.port, "/v1/models", headers=[(name, "v") for name in names])
    assert {name for name, _ in served.asks[-1].head.headers} & set(names) == set()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", b"no healthy upstream", ""),
        ("/v1/chat/completions", b'{"model":"m"}', "messages"),
        ("/v1/completions", b'{"model":"m"}', "prompt"),
        ("/v1/completions", b'{"prompt":"hello world"}', "model not found in request body"),
    ],
)
async def test_069_bad_bodies(place, served, path, body, message):
    """A body that cannot be read is a 400 in the OpenAI shape, and nothing reaches the backend."""
    before = len(served.asks)
    answer = await http1.ask(place.port, path, body)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["type"]) == (400, 400, "invalid_request_error")
    assert error["message"].startswith("inference error: BadRequest - ")
    assert message in error["message"]
    assert answer.head.get("content-type") == "application/json"
    assert len(served.asks) == before


async def test_091_sse_passes_unchanged(place, served):
    """The bytes of a stream of events are the backend's."""
    events = [b'data: {"n": %d}\n\n' % number for number in range(50)] + [b"data: [DONE]\n\n"]
    head = [("content-type", "text/event-stream")]
    served.plays["/v1/chat/completions"] = backend.saying(*events, headers=head)
    try:
        answer = await http1.ask(place.port, "/v1/chat/completions", CHAT)
    finally:
        served.plays.clear()
    assert answer.body == b"".join(events)
    assert answer.head.get("content-type") == "text/event-stream"
    assert answer.head.get("x-went-into-resp-headers") == "true"


async def test_092_first_event_before_the_second_exists(place, served):
    """An event is with the client before the backend has written the next."""
    observed = asyncio.Event()
    served.plays["/v1/chat/completions"] = backend.two_events(observed)
    try:
        async with http1.calling(place.port) as call:
            await call.start("POST", "/v1/chat/completions", [("content-length", str(len(CHAT)))])
            await call.send(CHAT)
            await call.begun()
            assert await call.body.piece() == b"data: 1\n\n"
            assert await place.total("extproc_endpoint_inflight_requests") == 1
            observed.set()
            assert await call.body.rest() == b"data: 2\n\n"
    finally:
        served.plays.clear()
    await place.settled()


async def test_101_cookies_are_not_merged(place, served):
    """Two Set-Cookie headers reach the client as two."""
    cookies = [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("x-one", "1")]
    served.plays["/cookies"] = backend.saying(b"ok", headers=cookies)
    answer = await http1.ask(place.port, "/cookies")
    assert answer.head.all("set-cookie") == ["a=1", "b=2"]


async def test_103_answers_without_body(place, served):
    """An answer that ends with its headers passes, and its account is closed."""

    async def play(_, peer):
        await peer.say(b"HTTP/1.1 204 No Content\r\n\r\n")

    served.plays["/nothing"] = play
    answer = await http1.ask(place.port, "/nothing", CHAT)
    assert (answer.status, answer.body) == (204, b"")
    await place.settled()


@pytest.mark.parametrize("status", ["302 Found", "404 Not Found", "429 No", "500 Oh", "503 Busy"])
async def test_104_other_statuses_pass(place, served, status):
    """An answer that is not 200 passes unchanged and is counted with its status."""
    text = b'{"error": {"message": "of the engine"}}'
    retry = [("retry-after", "7"), ("content-type", "application/json")]
    served.plays["/status"] = backend.saying(text, status=status, headers=retry)
    answer = await http1.ask(place.port, "/status", CHAT)
    code = status.split()[0]
    assert (str(answer.status), answer.body) == (code, text)
    assert answer.head.get("retry-after") == "7"
    counted = f'extproc_responses_total{{endpoint="{served.address}",status="{code}"}}'
    await place.until(lambda result: result.get(counted) == 1)


@pytest.mark.parametrize("sent", ["nothing", "half", "all"])
async def test_119_client_disconnects_before_the_answer(place, served, sent):
    """A client that leaves at any point of its request leaves nothing behind."""
    hung_up = asyncio.Event()

    async def play(_, peer):
        await peer.gone()
        hung_up.set()

    served.plays["/v1/chat/completions"] = play
    async with http1.calling(place.port) as call:
        await call.start("POST", "/v1/chat/completions", [("content-length", str(len(CHAT)))])
        if sent == "half":
            await call.send(CHAT[:20])
            await place.until(lambda result: result["extproc_body_buffer_bytes"] == 20)
        elif sent == "all":
            arrived = served.arrival()
            await call.send(CHAT)
            await arrived
            assert await place.total("extproc_endpoint_inflight_requests") == 1
        else:
            await place.until(lambda values: values["extproc_streams_open"] == 1)
        call.cut()
    await place.settled()
    if sent == "all":
        await hung_up.wait()
    served.plays.clear()


async def test_119_client_disconnects_mid_stream(place, served):
    """A client that leaves in the middle of an answer frees its account."""
    served.plays["/v1/chat/completions"] = backend.first_event
    async with http1.calling(place.port) as call:
        await call.start("POST", "/v1/chat/completions", [("content-length", str(len(CHAT)))])
        await call.send(CHAT)
        await call.begun()
        assert await call.body.piece() == b"data: 1\n\n"
        call.cut()
    await place.settled()
    served.plays.clear()


async def test_engine_that_resets_is_not_charged_for_ever(place, served):
    """An engine that cuts its answer, before or after the headers, frees the account."""

    async def silent(_, peer):
        peer.cut()

    async def half(_, peer):
        await peer.say(backend.EVENTS_HEAD + backend.framed(b"data: 1\n\n"))
        await observed.wait()
        peer.cut()

    observed = asyncio.Event()

    served.plays["/silent"], served.plays["/half"] = silent, half
    assert (await http1.ask(place.port, "/silent", CHAT)).status == 503
    async with http1.calling(place.port) as call:
        await call.start("POST", "/half", [("content-length", str(len(CHAT)))])
        await call.send(CHAT)
        await call.begun()
        assert await call.body.piece() == b"data: 1\n\n"
        observed.set()
        with pytest.raises(asyncio.IncompleteReadError):
            await call.body.rest()
    await place.settled()


async def test_request_that_breaks_off(place, served):
    """A request that Envoy itself gives up while its body is coming leaves nothing behind."""
    async with http1.calling(place.port) as call:
        await call.start("POST", "/v1/chat/completions", chunked=True)
        await call.chunk(CHAT[:10])
        await place.until(lambda result: result["extproc_body_buffer_bytes"] == 10)
        await call.send(b"this is no chunk\r\n")
        await call.ended()
    await place.settled()
