"""Headers of clients that must not be trusted, through a real Envoy."""

from __future__ import annotations

import asyncio
import json

import pytest

from extproc.protocol.headers import CONTROL_HEADERS, SIDECAR_HEADERS
from tests.e2e import backend, http1, installation
from tests.e2e.test_configs import CONFIGS, CONTROL, TURNS
from tests.e2e.test_modes import CHAT, MODES, every_mode

PATH = "/v1/chat/completions"

#: Headers that the shipped files remove, but for the destination, which the picker overwrites.
REMOVED = sorted((CONTROL | TURNS | SIDECAR_HEADERS) - {"x-gateway-destination-endpoint"})


def pools(usual, observed):
    """A pool for each header, which takes what shows it to the picker; one for all the rest."""
    claims = [
        {"name": f"saw-{number}", "match": {"headers": {name: "steer"}}, "endpoints": [observed]}
        for number, name in enumerate(REMOVED)
    ]
    rest = {"name": "usual", "match": {"paths": ["/"]}, "endpoints": [usual]}
    config = {
        "apiVersion": "extproc/v1alpha1",
        "kind": "ExtProcConfig",
        "scrape": {"enabled": False},
        "scheduling": {"strategy": "round-robin"},
        "pools": [*claims, rest],
    }
    return ["--config-text", json.dumps(config)]


@pytest.fixture(scope="module")
def usual(live):
    with live.holding(backend.backend()) as item:
        yield item


@pytest.fixture(scope="module")
def second_backend(live):
    with live.holding(backend.backend()) as item:
        yield item


@pytest.fixture(scope="module", params=[path for path in CONFIGS if "eds" not in path.name])
def shipped(live, usual, second_backend, request):
    """The shipped files as they stand."""
    with live.holding(
        installation.installed(
            template=request.param.name,
            listed=[usual.address, second_backend.address],
            arguments=pools(usual.address, second_backend.address),
        )
    ) as item:
        yield item


@pytest.fixture(scope="module")
def listeners():
    return {}


@pytest.fixture(scope="module")
def trusting(live, usual, second_backend, listeners):
    """Every body mode, and an Envoy that removes nothing."""

    def change(config):
        every_mode(config, listeners)
        installation.keep_headers(config, *REMOVED)

    with live.holding(
        installation.installed(
            change=change, arguments=pools(usual.address, second_backend.address)
        )
    ) as item:
        yield item


async def test_shipped_files_remove_control_headers_before_ext_proc(shipped, usual, second_backend):
    """No header that steers picks or engines reaches the picker, whatever its case."""
    before = len(second_backend.asks)
    for name in REMOVED:
        answer = await http1.ask(shipped.port, PATH, CHAT, headers=[(name.title(), "steer")])
        assert answer.json()["by"] == usual.address, name
        present = {key.lower() for key, _ in usual.asks[-1].head.headers}
        assert not present & set(REMOVED)
    assert len(second_backend.asks) == before


@pytest.mark.parametrize("modes", MODES, ids="-".join)
async def test_extproc_removes_control_headers_in_every_mode(
    trusting, listeners, usual, second_backend, modes
):
    """Headers that Envoy lets in reach the picker, and no engine."""
    names = sorted(set(REMOVED) & CONTROL_HEADERS)
    assert set(names) >= SIDECAR_HEADERS
    for name in (names[0], names[-1], "x-prefiller-host-port"):
        for body in (CHAT, None):
            answer = await http1.ask(listeners[modes], PATH, body, headers=[(name, "steer")])
            assert answer.json()["by"] == second_backend.address
    everything = [(name, "other") for name in names]
    # Twice, as clients may.
    await http1.ask(listeners[modes], PATH, CHAT, headers=everything + everything)
    present = {
        key.lower() for item in (usual, second_backend) for key, _ in item.asks[-1].head.headers
    }
    assert not present & set(names)


async def stalled_upload(port):
    """The status line that ends a request whose body stops after a byte."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    status = await reader.readline()
    writer.close()
    return status


@pytest.mark.slow
async def test_request_timeout_ends_a_stalled_upload_and_spares_waits_and_answers(tmp_path):
    """A body that stops coming is 408; requests wait, and answers take, longer than that."""

    def change(config):
        installation.manager(config)["request_timeout"] = "1s"

    requested, released = asyncio.Event(), asyncio.Event()

    async def slow(_, peer):
        requested.set()
        await released.wait()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    listed = tmp_path / "endpoints.yaml"
    listed.write_text("endpoints: []\n")
    config = {
        "apiVersion": "extproc/v1alpha1",
        "kind": "ExtProcConfig",
        "scrape": {"enabled": False},
        "scheduling": {"strategy": "round-robin"},
        "flow_control": {"enabled": True, "empty_timeout_s": 2},
        "pool": {"endpoints_file": str(listed)},
    }
    async with (
        backend.backend() as engine,
        installation.installed(
            template="original-dst-buffered.yaml",
            change=change,
            arguments=["--config-text", json.dumps(config)],
        ) as fixture,
    ):
        engine.plays["/slow"] = slow
        assert b"408" in await stalled_upload(fixture.port)
        # Twice as long as the time-out, and then 503, for there is no engine.
        assert (await http1.ask(fixture.port, PATH, CHAT)).status == 503
        installation.replace_file(listed, f"endpoints: ['{engine.address}']\n")
        up = f'extproc_endpoint_up{{endpoint="{engine.address}"}}'
        await fixture.until(lambda result: up in result)
        answer = asyncio.ensure_future(http1.ask(fixture.port, "/slow", CHAT))
        await requested.wait()
        # An upload that begins later and is cut shows that the answer takes longer than the time-out.
        assert b"408" in await stalled_upload(fixture.port)
        released.set()
        assert (await answer).status == 200
