"""Addresses of other replicas: names that resolve, and who is admitted."""

from __future__ import annotations

import asyncio

import pytest

from extproc.config import loader
from extproc.discovery.static_discovery import DnsResolver
from extproc.errors import ConfigError
from extproc.server.peer_addresses import PeerAddresses, PeerDirectory
from tests.support.canary import CANARY


def peers_at(*written, resolver=None):
    return PeerAddresses(written, where="peer_sync.peers", resolver=resolver)


@pytest.mark.parametrize("written", ["host", "host:", ":9", "host:x", "host:0", "host:70000"])
def test_addresses_need_a_port(written):
    """Anything else is refused at start, with the name of the setting."""
    with pytest.raises(ConfigError, match=r"peer_sync\.peers"):
        peers_at(written)


@pytest.mark.parametrize(
    "written", ["http://host:9", f"http://u:{CANARY}@host:9", f"u:{CANARY}@host:9", "u@host:9"]
)
def test_addresses_are_no_urls(written):
    """One with a password would be logged; the error leaves it out."""
    with pytest.raises(ConfigError, match=r"peer_sync\.peers: expected host:port") as refused:
        peers_at(written)
    assert CANARY not in str(refused.value) + refused.value.got


async def test_a_name_whose_servers_never_answer_is_unresolved():
    """The look ends after its own limit: the resolver's can be minutes."""

    async def silent(_):
        await asyncio.Event().wait()

    resolver = DnsResolver(timeout_s=0.0, look_up=silent)
    subject = peers_at("extproc-peers:9090", resolver=resolver)
    async with asyncio.timeout(300):
        assert await subject.resolve() == []
        assert subject.unresolved == {"extproc-peers:9090"}
        assert not await subject.is_peer("127.0.0.1")


async def test_addresses_of_peers_are_looked_up_for_a_new_one():
    """Once a second at most, and a name that has none for a moment keeps those of before."""
    answers = [["10.0.0.1", "fd00::2"]]
    looks = []

    async def look_up(host):
        looks.append(host)
        return answers[0]

    subject = peers_at("others:9090", resolver=DnsResolver(look_up=look_up))
    assert await subject.is_peer("10.0.0.1")
    assert await subject.is_peer("fd00::2")
    for _ in range(100):
        assert not await subject.is_peer("10.0.0.9")
    assert looks == ["others"]
    answers[0] = []
    await subject.resolve()
    assert await subject.is_peer("10.0.0.1")
    answers[0] = ["10.0.0.9"]
    await subject.resolve()
    assert await subject.is_peer("10.0.0.9")
    assert not await subject.is_peer("10.0.0.1")
    assert not await peers_at().is_peer("10.0.0.1")


async def test_own_and_repeated_addresses_are_left_out():
    """A list may name this process, and a peer twice; an address is connected to once."""
    subject = peers_at("127.0.0.1:1", "127.0.0.2:1", "127.0.0.1:1")
    assert await subject.resolve() == ["127.0.0.1:1", "127.0.0.2:1"]
    subject.record_own("127.0.0.1:1")
    assert await subject.resolve() == ["127.0.0.2:1"]
    assert await subject.is_peer("127.0.0.1")


@pytest.mark.parametrize(
    ("section", "requests", "counters"),
    [
        ("", [], []),
        ("peer_sync: {peers: ['127.0.0.1:1']}", ["127.0.0.1:1"], ["127.0.0.1:1"]),
        ("autoscaling: {peers: ['127.0.0.2:1']}", [], ["127.0.0.2:1"]),
        (
            "peer_sync: {peers: ['127.0.0.1:1']}\nautoscaling: {peers: ['127.0.0.2:1']}",
            ["127.0.0.1:1"],
            ["127.0.0.2:1"],
        ),
    ],
)
async def test_the_peers_of_requests_count_for_autoscaling(section, requests, counters):
    """One list is enough; that of autoscaling alone goes on to mean counters only."""
    text = f"apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n{section}\n"
    subject = PeerDirectory(loader.settings(loader.parse(text, where="f")), str)
    assert await subject.requests.resolve() == requests
    assert await subject.counters.resolve() == counters
    for address in (*requests, *counters):
        assert await subject.is_peer(address.partition(":")[0])
    assert not await subject.is_peer("127.0.0.9")
