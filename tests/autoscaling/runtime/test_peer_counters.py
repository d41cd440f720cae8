from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from extproc.autoscaling.demand_estimator import MAX_REQUESTS, MAX_TOTAL, PickerCounters
from extproc.autoscaling.runtime.demand_counters import (
    PATH,
    PeerCounterClient,
    PeerReport,
    read_report,
)
from extproc.demo import stack
from extproc.discovery.static_discovery import DnsResolver
from extproc.server.peer_addresses import PeerAddresses


def peers_at(*written, resolver=None):
    return PeerAddresses(written, where="autoscaling.peers", resolver=resolver)


def client_of(*written, name="a", resolver=None, own_counters=dict, **more):
    """A client whose clock stands still."""
    return PeerCounterClient(
        name,
        peers_at(*written, resolver=resolver),
        timeout_s=300.0,
        own_counters=own_counters,
        **{"clock": lambda: 0.0, **more},
    )


@contextlib.asynccontextmanager
async def picker(name, *written, held=0, port=0, on_answer=lambda: None):
    """The part of a picker that talks to others, behind a port."""
    counters = {"p": PickerCounters(held=held, arrived=float(held))}
    received = []

    def own_counters():
        on_answer()
        return counters

    peers = client_of(*written, name=name, own_counters=own_counters, on_waiting=received.extend)
    peers.heard, peers.counters = received, counters
    application = web.Application()
    application.add_routes(peers.routes())
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    peers.port = runner.addresses[0][1]
    peers.stop = runner.cleanup
    try:
        yield peers
    finally:
        peers.close()
        await runner.cleanup()


async def test_peers_exchange_their_counters():
    """Each reads the others by name, and leaves itself out of the addresses it was given."""
    ports = [stack.free_port() for _ in range(2)]
    written = [f"127.0.0.1:{port}" for port in ports]
    async with (
        picker("a", *written, held=1, port=ports[0]) as subject,
        picker("b", *written, held=2, port=ports[1]) as other,
    ):
        assert await subject.read("p") == {"b": PickerCounters(held=2, arrived=2.0)}
        assert await other.read("p") == {"a": PickerCounters(held=1, arrived=1.0)}
        assert subject.last("p") == {"b": PickerCounters(held=2, arrived=2.0)}
        assert subject.last("other pool") == {"b": None}


async def test_pools_share_the_answers_of_peers():
    """A peer answers once for all that read within a second; no pool gets an answer twice."""
    now, answers = 0.0, []
    async with picker("b", on_answer=lambda: answers.append(now)) as other:
        subject = client_of(f"127.0.0.1:{other.port}", clock=lambda: now)
        await asyncio.gather(*[subject.read(f"pool {number}") for number in range(20)])
        now = 0.75
        assert await subject.read("p") == {"b": PickerCounters()}
        assert answers == [0.0]
        other.counters["p"] = PickerCounters(held=1)
        assert await subject.read("p") == {"b": PickerCounters(held=1)}
        now = 1.75
        await subject.read("q")
        assert answers == [0.0, 0.75, 1.75]
        subject.close()


async def test_a_pool_that_is_removed_as_it_reads_leaves_others_their_answers():
    """The next one reads for itself."""
    async with picker("b") as other:
        subject = client_of(f"127.0.0.1:{other.port}")
        removed = asyncio.ensure_future(subject.read("q"))
        read = asyncio.ensure_future(subject.read("p"))
        await asyncio.sleep(0)
        removed.cancel()
        assert await read == {"b": PickerCounters()}
        assert removed.cancelled()
        subject.close()


async def test_a_peer_that_cannot_be_read_is_unknown():
    """It stays in the picture under its name, as an unknown picker."""
    async with picker("b", held=1) as other:
        subject = client_of(f"127.0.0.1:{other.port}")
        assert await subject.read("p") == {"b": PickerCounters(held=1, arrived=1.0)}
        await other.stop()
        assert await subject.read("p") == {"b": None}
        subject.close()


async def test_a_peer_that_cannot_be_read_is_logged_once_until_it_answers(caplog):
    """However many pools read it, and also before its first answer."""
    port = stack.free_port()
    subject = client_of(f"127.0.0.1:{port}")
    for _ in range(3):
        await subject.read("p")
    (message,) = caplog.messages
    assert message.startswith(f"autoscaling: peer 127.0.0.1:{port}: ")
    async with picker("b", port=port):
        await subject.read("p")
    for _ in range(3):
        await subject.read("p")
    assert len(caplog.messages) == 2
    subject.close()


async def test_a_peer_that_does_not_scale_a_pool_is_logged_once(caplog):
    """Until it does: it keeps the pool from being scaled down, as an unreadable peer does."""
    async with picker("b") as other:
        subject = client_of(f"127.0.0.1:{other.port}")
        assert await subject.read("q") == {"b": None}
        assert caplog.messages == []  # it may find the pool a moment later
        for _ in range(3):
            await subject.read("q")
            await subject.read("p")
        (message,) = caplog.messages
        assert message.startswith("autoscaling: peer b has no counters of pool q, ")
        other.counters["q"] = PickerCounters()
        await subject.read("q")
        del other.counters["q"]
        for _ in range(2):
            await subject.read("q")
        assert len(caplog.messages) == 2
        subject.close()


async def test_a_name_that_cannot_be_resolved_is_unknown():
    """So is who may be behind it."""
    subject = client_of("no-such-name.invalid:9090")
    assert await subject.read("p") == {"no-such-name.invalid:9090": None}


async def test_peers_are_notified_of_a_queued_request():
    """Pushed counters are known without a request, and wake the pools in which requests wait."""
    ports = [stack.free_port() for _ in range(2)]
    written = [f"127.0.0.1:{port}" for port in ports]
    async with (
        picker("a", *written, port=ports[0]) as subject,
        picker("b", *written, held=3, port=ports[1]) as other,
    ):
        await subject.read("p")
        await other.read("p")
        other.counters.update(p=PickerCounters(held=9), q=PickerCounters())
        await other.push()
        assert subject.heard == ["p"]
        assert subject.last("p") == {"b": PickerCounters(held=9)}
        assert other.heard == []


async def test_counters_pushed_by_unknown_addresses_are_ignored():
    """It is reason to look, and no number."""
    async with picker("a") as subject:
        other = client_of(
            f"127.0.0.1:{subject.port}",
            name="stranger",
            own_counters=lambda: {"p": PickerCounters(held=5)},
        )
        await other.read("p")
        await other.push()
        assert (subject.heard, subject.last("p")) == (["p"], {})
        other.close()


async def test_invalid_bodies_are_refused():
    """With 400, and a page that is none is unknown."""
    async with picker("a") as subject, aiohttp.ClientSession() as http:
        async with http.post(f"http://127.0.0.1:{subject.port}{PATH}", data=b"[1]") as answer:
            assert answer.status == 400
        async with http.get(f"http://127.0.0.1:{subject.port}{PATH}") as answer:
            report = msgspec.json.decode(await answer.read(), type=PeerReport)
        assert report.picker == "a"


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b'{"picker":"\xff","pools":{}}',
        b'{"picker":"x","pools":' + b'{"a":' * 100_000,
        b'{"picker":"x","pools":{"p":{"held":-1}}}',
        b'{"picker":"x","pools":{"p":{"held":' + b"9" * 400 + b"}}}",
        b'{"picker":"x","pools":{"p":{"arrived":1e300}}}',
        b'{"picker":"x","pools":{"p":{"arrived":NaN}}}',
        b'{"picker":"x","pools":{"p":{"arrived":"5"}}}',
        b'{"picker":"' + b"x" * 257 + b'","pools":{}}',
    ],
)
def test_reports_out_of_range_are_unreadable(page):
    """Other bytes, endless nesting, wrong types and numbers beyond their ranges."""
    assert read_report(page) is None


_NUMBERS = st.one_of(
    st.integers(-(10**400), 10**400).map(str),
    st.floats().map(str),
    st.sampled_from(["9" * 400, "1e400", "NaN", "-0.0", "null", "true", '"7"', "[1]", "{}", "7"]),
)


@given(st.dictionaries(st.sampled_from(PickerCounters.__struct_fields__), _NUMBERS, max_size=3))
def test_any_report_is_in_range_or_unreadable(counters):
    """Whatever numbers a peer names, what is read can be summed over peers."""
    fields = ",".join(f'"{name}":{number}' for name, number in counters.items())
    report = read_report(b'{"picker":"x","pools":{"p":{%b}}}' % fields.encode())
    if report is not None:
        read = report.pools["p"]
        assert all(type(n) is int and 0 <= n <= MAX_REQUESTS for n in (read.held, read.in_flight))
        totals = (read.arrived, read.prompt_tokens, read.answered, read.answer_tokens)
        assert all(0.0 <= total <= MAX_TOTAL for total in totals)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_report_or_none(page):
    """Bytes of something else behind a peer's address raise nothing."""
    assert read_report(page) is None or page.lstrip().startswith(b"{")


async def test_an_address_that_is_no_name_is_unresolved():
    """A name that cannot be written for a resolver is one that does not resolve."""
    subject = client_of("a..b:9090")
    assert await subject.read("p") == {"a..b:9090": None}


async def test_connections_to_removed_peers_are_closed():
    """A rollout leaves nothing behind: what no name stands for any longer is forgotten."""
    async with picker("b") as other:
        addresses = ["127.0.0.1"]

        async def look_up(_):
            return addresses

        resolver = DnsResolver(look_up=look_up)
        subject = client_of(f"others:{other.port}", resolver=resolver)
        await subject.read("p")
        assert len(subject._client._idle_connections) == 1
        addresses.clear()
        await subject.read("p")
        assert len(subject._client._idle_connections) == 0
        subject.close()
