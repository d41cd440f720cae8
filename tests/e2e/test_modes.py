"""Every body mode through a real Envoy: one listener for each, all in front of one extproc."""

from __future__ import annotations

import asyncio
import copy
import json
import random

import pytest

from extproc.demo import stack
from tests.e2e import backend, http1, installation

#: Request body mode, response body mode; the other direction of each is the lean one.
MODES = [
    ("FULL_DUPLEX_STREAMED", "NONE"),
    ("BUFFERED", "NONE"),
    ("BUFFERED_PARTIAL", "NONE"),
    ("STREAMED", "NONE"),
    ("NONE", "NONE"),
    ("FULL_DUPLEX_STREAMED", "FULL_DUPLEX_STREAMED"),
    ("FULL_DUPLEX_STREAMED", "STREAMED"),
    ("FULL_DUPLEX_STREAMED", "BUFFERED"),
    ("FULL_DUPLEX_STREAMED", "BUFFERED_PARTIAL"),
    ("BUFFERED", "BUFFERED"),
    ("STREAMED", "STREAMED"),
    ("NONE", "FULL_DUPLEX_STREAMED"),
]

#: Modes in which extproc sees the whole body before it decides.
SEEING = ("FULL_DUPLEX_STREAMED", "BUFFERED", "BUFFERED_PARTIAL")

#: Envoy's buffer, above which BUFFERED refuses and BUFFERED_PARTIAL shows a part.
BUFFER_BYTES = 1 << 20

CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()


def every_mode(config, listeners):
    """Give each pair of modes a listener of its own.

    Args:
        config: The lean profile; edited.
        listeners: Called with the port of each pair.
    """
    (first,) = config["static_resources"]["listeners"]
    first["per_connection_buffer_limit_bytes"] = BUFFER_BYTES
    config["static_resources"]["listeners"] = []
    for request, response in MODES:
        item = copy.deepcopy(first)
        port = listeners[request, response] = stack.free_port()
        item["name"] = f"{request}-{response}"
        item["address"]["socket_address"]["port_value"] = port
        config["static_resources"]["listeners"].append(item)
        last = len(config["static_resources"]["listeners"]) - 1
        installation.manager(config, last)["stat_prefix"] = item["name"]
        duplex = "FULL_DUPLEX_STREAMED"
        installation.processor(config, last)["allow_mode_override"] = (
            request == response == "BUFFERED"
        )
        installation.processor(config, last)["processing_mode"] = {
            "request_header_mode": "SEND",
            "request_body_mode": request,
            "request_trailer_mode": "SEND" if request == duplex else "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": response,
            "response_trailer_mode": "SEND",
        }


@pytest.fixture(scope="module")
def listeners():
    return {}


@pytest.fixture(scope="module")
def place(live, served, listeners):
    change = lambda config: every_mode(config, listeners)  # noqa: E731  keeps the port table at hand
    with live.holding(installation.installed(served.address, change=change)) as item:
        yield item


@pytest.fixture(params=MODES, ids="-".join)
def modes(request):
    return request.param


async def test_041_bodies_pass(place, served, listeners, modes):
    """A body arrives as it was sent, whole or in chunks, and so does the answer."""
    port = listeners[modes]
    for body in (CHAT, random.Random(1).randbytes(200_000)):
        path = "/v1/chat/completions" if body is CHAT else "/upload"
        cut = [body[at : at + 9_999] for at in range(0, len(body), 9_999)]
        for how in ({"body": body}, {"chunks": cut}):
            answer = await http1.ask(port, path, **how)
            assert answer.status == 200
            assert served.asks[-1].body == body
            assert answer.json()["bytes"] == len(body)
            assert answer.head.get("x-went-into-resp-headers") == "true"


async def test_041_no_body_and_empty_body(place, served, listeners, modes):
    """Requests without a body and with an empty one are routed, and HEAD has no answer body."""
    port = listeners[modes]
    assert (await http1.ask(port, "/v1/models")).status == 200
    assert (await http1.ask(port, "/v1/models", method="HEAD")).body == b""
    assert (await http1.ask(port, "/v1/chat/completions", chunks=[])).status == 200


async def test_097_large_answers_pass(place, served, listeners, modes):
    """An answer in many chunks arrives whole."""
    pieces = [random.Random(n).randbytes(70_001) for n in range(10)]
    served.plays["/large"] = backend.saying(*pieces)
    answer = await http1.ask(listeners[modes], "/large", CHAT)
    assert answer.body == b"".join(pieces)


@pytest.mark.parametrize("modes", [pair for pair in MODES if pair[0] in SEEING], ids="-".join)
async def test_069_bad_body(place, served, listeners, modes):
    """A bad body that is visible is refused in JSON, and does not reach the backend."""
    before = len(served.asks)
    answer = await http1.ask(listeners[modes], "/v1/chat/completions", b"no healthy upstream")
    assert answer.status == 400
    assert answer.head.get("content-type") == "application/json"
    assert answer.json()["error"]["message"].startswith("inference error: BadRequest - ")
    assert len(served.asks) == before


@pytest.mark.parametrize("mode", ["STREAMED", "NONE"])
async def test_041_decided_on_headers(place, served, listeners, mode):
    """A request whose body is not visible in time is routed by its headers."""
    answer = await http1.ask(listeners[mode, "NONE"], "/v1/chat/completions", b"not JSON")
    assert answer.status == 200
    assert served.asks[-1].body == b"not JSON"


async def test_041_partial_body(place, served, listeners):
    """In BUFFERED_PARTIAL a body over the limit is routed by its beginning and arrives whole."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 3_000_000}]})
    port = listeners["BUFFERED_PARTIAL", "NONE"]
    answer = await http1.ask(port, "/v1/chat/completions", body.encode())
    assert answer.status == 200
    assert served.asks[-1].size == len(body)
    assert answer.json()["sha256"] == served.asks[-1].sha256


async def test_041_buffered_body_over_the_limit(place, served, listeners):
    """In BUFFERED a body over the limit is Envoy's own 413, and its account is closed."""
    body = bytes(3_000_000)
    assert (await http1.ask(listeners["BUFFERED", "NONE"], "/upload", body)).status == 413
    await place.settled()


@pytest.mark.parametrize(
    "modes",
    [pair for pair in MODES if "BUFFERED" not in pair[1] or pair[0] == "BUFFERED"],
    ids="-".join,
)
async def test_092_events_are_not_held_back(place, served, listeners, modes):
    """The first event is with the client before the second exists."""
    observed = asyncio.Event()
    served.plays["/events"] = backend.two_events(observed)
    async with http1.calling(listeners[modes]) as call:
        await call.start("POST", "/events", [("content-length", str(len(CHAT)))])
        await call.send(CHAT)
        await call.begun()
        assert await call.body.piece() == b"data: 1\n\n"
        observed.set()
        assert await call.body.rest() == b"data: 2\n\n"


async def test_119_client_disconnects(place, served, listeners, modes):
    """A client that leaves within its body, or within the answer, frees everything."""
    served.plays["/hang"] = backend.first_event
    async with http1.calling(listeners[modes]) as call:
        await call.start("POST", "/hang", [("content-length", "100")])
        await call.send(bytes(50))
        await place.until(lambda result: result["extproc_streams_open"] == 1)
        call.cut()
    await place.settled()
    async with http1.calling(listeners[modes]) as call:
        arrived = served.arrival()
        await call.start("POST", "/hang", [("content-length", str(len(CHAT)))])
        await call.send(CHAT)
        await arrived
        call.cut()
    await place.settled()
