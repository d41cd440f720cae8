"""Bodies of every size arrive unchanged through FULL_DUPLEX_STREAMED, with every Envoy."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from extproc.demo import stack
from tests.e2e import backend, http1, http2, installation

MIB = 1 << 20
LIMIT = 32 * MIB
SIZES = [0, 1, 61_999, 62_000, 62_001, MIB - 1, MIB, 8 * MIB, 20 * MIB, LIMIT]

#: Sizes of the pieces of a chunked body; none divides or is divided by what Envoy reads at once.
PIECES = [1, 16_383, 262_145, 99_991]

HEAD, TAIL = b'{"model":"demo","messages":[{"role":"user","content":"', b'"}]}'


@pytest.fixture(scope="module")
def place(live, binary):
    """The lean profile in front of one simulated engine, which tells what it received."""
    with live.holding(stack.stack()) as children:
        _, address = live.run(children.engine())
        with live.holding(installation.installed(address, binary=binary)) as item:
            yield item


def json_body(size):
    """A chat body of exactly this size."""
    room = size - len(HEAD) - len(TAIL)
    words = b"the quick brown fox jumps over \\u00e9 the lazy dog, "
    return b"".join([HEAD, (words * (room // len(words))).ljust(room, b"."), TAIL])


def binary_body(size):
    """Bytes that repeat nowhere."""
    return random.Random(size).randbytes(size)


def cut(body):
    """The body in pieces of several sizes."""
    pieces, at = [], 0
    while at < len(body):
        size = PIECES[len(pieces) % len(PIECES)]
        pieces.append(body[at : at + size])
        at += size
    return pieces


#: There is no chat body of 0 or 1 bytes.
CASES = [
    *((binary_body, size) for size in SIZES),
    *((json_body, size) for size in SIZES[2:-1]),
    pytest.param(json_body, SIZES[-1], marks=pytest.mark.slow),
]


@pytest.mark.versions
def test_image_versions_are_known():
    """The versions are those of `make versions`."""
    if not os.environ.get("EXTPROC_ENVOYS"):
        pytest.skip("EXTPROC_ENVOYS names no folder with Envoys; `make versions` installs them")
    assert sorted(Path(os.environ["EXTPROC_ENVOYS"]).glob("*/envoy/_bin/envoy"))


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
@pytest.mark.parametrize(("content", "size"), CASES)
async def test_026_bodies_arrive_unchanged(place, content, size, framing):
    """The hash of the received body is that of the sent one."""
    body = content(size)
    path = "/v1/chat/completions" if content is json_body else "/upload"
    how = {"chunks": cut(body)} if framing == "chunked" else {"body": body}
    answer = await http1.ask(place.port, path, headers=[("x-engine-echo", "sha256")], **how)
    assert answer.status == 200, answer.body
    assert answer.json() == {"bytes": size, "sha256": hashlib.sha256(body).hexdigest()}


@pytest.mark.parametrize("framing", ["content-length", "chunked"])
async def test_124_body_over_the_limit(place, framing):
    """One byte more than the limit is a 413 in JSON, and nothing stays assembled."""
    body = bytes(LIMIT + 1)
    how = {"chunks": cut(body)} if framing == "chunked" else {"body": body}
    answer = await http1.ask(place.port, "/upload", **how)
    assert answer.status == 413
    assert answer.head.get("content-type") == "application/json"
    assert answer.json()["error"]["code"] == 413
    await place.settled()


async def test_022_body_ended_by_trailers(place):
    """A body that ends with trailers arrives once, not twice (Envoy issue 45470)."""
    body = json_body(20_000)
    answer = await http2.ask(
        place.port,
        "/v1/chat/completions",
        body,
        headers=[("x-engine-echo", "sha256")],
        trailers=[("x-checksum", "1")],
    )
    assert answer.json() == {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}


async def test_buffered_body_over_http2():
    """The profile that buffers takes a body of the limit over HTTP/2 as well."""
    body = json_body(LIMIT)
    async with (
        backend.backend() as engine,
        installation.installed(engine.address, template="original-dst-buffered.yaml") as fixture,
    ):
        answer = await http2.ask(fixture.port, "/v1/chat/completions", body)
        assert answer.json()["sha256"] == hashlib.sha256(body).hexdigest()
