import asyncio
import socket
import threading

import hypothesis
from hypothesis import strategies as st

from extproc.discovery import endpoint_list, static_discovery
from extproc.endpoint import Endpoint
from tests.support.virtual_loop import VirtualLoop


class NameServer:
    """Scripted answers; a lookup of `hangs...` ends after a minute, in vain."""

    def __init__(self):
        self.rotated = 0
        self.running = []
        self.most_running = 0

    async def look_up(self, name):
        assert name not in self.running
        self.running.append(name)
        self.most_running = max(self.most_running, len(self.running))
        try:
            return await self._answer(name)
        finally:
            self.running.remove(name)

    async def _answer(self, name):
        if name.startswith("hangs"):
            await asyncio.sleep(60.0)
            raise OSError("no answer")
        if name == "fails.example":
            raise OSError("no such name")
        if name == "many.example":
            self.rotated += 1000
            at = [(number + self.rotated) % 9000 for number in range(9000)]
            return [f"10.0.{n // 250}.{n % 250}" for n in at]
        return ["10.0.0.1", "fd00::1", "10.0.0.1"]


def virtually(scene):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scene)


def resolve(*names):
    resolver = static_discovery.DnsResolver(look_up=NameServer().look_up)
    return virtually(resolver.resolve(names))


def test_a_and_aaaa_records_are_resolved():
    """Addresses of both families are returned as text, each of them once."""
    assert sorted(resolve("engines.example")["engines.example"]) == ["10.0.0.1", "fd00::1"]


def test_addresses_of_a_name_are_bounded():
    """Of a huge answer the same addresses are taken every time, however it is rotated."""
    resolver = static_discovery.DnsResolver(look_up=NameServer().look_up)
    first, second = (virtually(resolver.resolve(["many.example"])) for _ in range(2))
    assert first == second
    assert len(first["many.example"]) == static_discovery.MAX_ADDRESSES


def test_a_failing_name_does_not_affect_other_names():
    """Failures and time-outs are empty answers next to the good ones."""
    answers = resolve("fails.example", "hangs.example", "engines.example")
    assert answers["fails.example"] == answers["hangs.example"] == ()
    assert answers["engines.example"]


def test_many_hanging_names_keep_no_other_name_from_its_lookup():
    """A name that answered goes on to; a new one behind all that hang gets its turn."""

    async def scene():
        server = NameServer()
        resolver = static_discovery.DnsResolver(look_up=server.look_up)
        live = [f"live-{number}" for number in range(100)]
        assert all((await resolver.resolve(live)).values())
        hanging = [f"hangs-{number}" for number in range(200)]
        began = asyncio.get_running_loop().time()
        new_at = None
        while asyncio.get_running_loop().time() - began < 400.0:
            answers = await resolver.resolve([*hanging, "new", *live])
            assert all(answers[name] for name in live)
            if answers["new"] and new_at is None:
                new_at = asyncio.get_running_loop().time() - began
            await asyncio.sleep(3.0)
        # 48 places, each taken for a minute.
        assert new_at is not None
        assert new_at <= 60.0 * (200 // 48 + 1) + 5.0
        assert server.most_running <= 64

    virtually(scene())


def test_the_answer_of_a_slow_lookup_is_taken_in_the_next_round():
    """A lookup goes on beyond the time limit, and the name gets no second one meanwhile."""

    async def scene():
        lookups = []

        async def look_up(name):
            lookups.append(name)
            await asyncio.sleep(9.0)
            return ["10.0.0.1"]

        resolver = static_discovery.DnsResolver(timeout_s=5.0, look_up=look_up)
        assert await resolver.resolve(["slow"]) == {"slow": ()}
        assert await resolver.resolve(["slow"]) == {"slow": ("10.0.0.1",)}
        assert lookups == ["slow"]

    virtually(scene())


def test_lookups_that_hang_take_no_thread_of_the_event_loop(monkeypatch):
    """Files are read, and other resolvers answer, while more names hang than the loop has threads."""
    released = threading.Event()

    def getaddrinfo(name, *_, **__):
        if name.startswith("hangs"):
            released.wait()
        return [(2, 1, 6, "", ("10.0.0.1", 0))]

    async def scene():
        hanging = static_discovery.DnsResolver()
        names = [f"hangs-{number}" for number in range(48)]
        looking = asyncio.ensure_future(hanging.resolve(names))
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(300.0):
                assert await asyncio.to_thread(str, 1) == "1"
                peers = static_discovery.DnsResolver(timeout_s=300.0)
                assert await peers.resolve_name("peers") == ("10.0.0.1",)
            assert not looking.done()
        finally:
            released.set()
            await looking

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    asyncio.run(scene())


def test_the_system_resolver_knows_localhost():
    """The real resolver is asked in the real way."""
    answers = asyncio.run(static_discovery.DnsResolver().resolve(["localhost"]))
    assert set(answers["localhost"]) & {"127.0.0.1", "::1"}


def entries_of(places):
    """Entries from `host:port` texts, several of them separated by commas."""
    listed = [address for text in places for address in text.split(",")]
    return endpoint_list.from_document({"endpoints": listed}, where="f")


def addresses(resolution):
    return [endpoint.address for endpoint in resolution.endpoints]


def test_literals_need_no_answer():
    """IPv4 and IPv6 literals become endpoints in the order of the list."""
    listed = entries_of(["10.0.0.2:1", "[fd00::1]:2", "10.0.0.1:1"])
    result = static_discovery.merge_answers(listed, {}, last={})
    assert addresses(result) == ["10.0.0.2:1", "[fd00::1]:2", "10.0.0.1:1"]
    assert static_discovery.host_names(listed) == ()


def test_a_name_gives_one_endpoint_per_address():
    """Answers are sorted by number, whatever order the resolver chose."""
    listed = (endpoint_list.EndpointListEntry("engines", 8000, name="e", labels={"zone": "a"}),)
    fresh = {"engines": ("10.0.0.10", "10.0.0.9", "10.0.0.9")}
    assert static_discovery.merge_answers(listed, fresh, last={}).endpoints == (
        Endpoint("10.0.0.9:8000", name="e@10.0.0.9", labels={"zone": "a"}),
        Endpoint("10.0.0.10:8000", name="e@10.0.0.10", labels={"zone": "a"}),
    )


def test_a_name_of_two_families_gives_endpoints_of_one():
    """An engine with an A and an AAAA record is one endpoint; IPv6 counts where there is no IPv4."""
    listed = entries_of(["both:1,six:1"])
    fresh = {"both": ("1::2", "10.0.0.2", "fd00::1", "10.0.0.1"), "six": ("fd00::4", "fd00::3")}
    merged = static_discovery.merge_answers(listed, fresh, last={})
    assert addresses(merged) == ["10.0.0.1:1", "10.0.0.2:1", "[fd00::3]:1", "[fd00::4]:1"]
    failed = static_discovery.merge_answers(listed, {}, last=merged.answers)
    assert failed.endpoints == merged.endpoints


def test_the_order_does_not_depend_on_the_resolver():
    """Round-robin DNS does not reorder the pool."""
    listed = entries_of(["engines:1"])
    ordered = static_discovery.merge_answers(listed, {"engines": ("10.0.0.1", "10.0.0.2")}, last={})
    two = static_discovery.merge_answers(listed, {"engines": ("10.0.0.2", "10.0.0.1")}, last={})
    assert ordered == two


def test_a_name_on_two_ports_is_resolved_once():
    """Two ports of one name share its answer."""
    listed = entries_of(["engines:1,engines:2"])
    assert static_discovery.host_names(listed) == ("engines",)
    result = static_discovery.merge_answers(listed, {"engines": ("10.0.0.1",)}, last={})
    assert addresses(result) == ["10.0.0.1:1", "10.0.0.1:2"]


def test_an_address_named_twice_is_one_endpoint():
    """A literal and a name of the same place are one endpoint; the first one names it."""
    listed = entries_of(["10.0.0.1:1,engines:1"])
    result = static_discovery.merge_answers(listed, {"engines": ("10.0.0.1",)}, last={})
    assert result.endpoints == (Endpoint("10.0.0.1:1"),)


def test_a_failing_name_keeps_its_last_addresses():
    """A resolver that is down removes no endpoint, and the failure is logged."""
    listed = entries_of(["engines:1,others:1"])
    first = static_discovery.merge_answers(
        listed, {"engines": ("10.0.0.1",), "others": ()}, last={}
    )
    assert (first.stale, first.missing) == ((), ("others",))
    second = static_discovery.merge_answers(listed, {}, last=first.answers)
    assert addresses(second) == addresses(first) == ["10.0.0.1:1"]
    assert (second.stale, second.missing) == (("engines",), ("others",))


def test_answers_of_names_no_longer_listed_are_forgotten():
    """A name that left the list leaves the memory."""
    result = static_discovery.merge_answers((), {}, last={"engines": ("10.0.0.1",)})
    assert (result.answers, result.endpoints) == ({}, ())


_IPS = st.ip_addresses().map(str)


@hypothesis.given(
    rounds=st.lists(
        st.dictionaries(st.sampled_from("abc"), st.lists(_IPS, max_size=3).map(tuple)), max_size=6
    )
)
def test_repeated_failures_keep_the_last_addresses(rounds):
    """Once a name has resolved it has endpoints for ever, each address once."""
    listed = entries_of(["a:1,b:1,c:1"])
    last, resolved = {}, set()
    for fresh in rounds:
        result = static_discovery.merge_answers(listed, fresh, last=last)
        last = result.answers
        resolved |= {name for name, ips in fresh.items() if ips}
        assert set(last) == resolved
        assert all(last.values())
        assert len(set(addresses(result))) == len(result.endpoints)


def test_endpoints_of_all_names_are_bounded():
    """However many addresses names answer, a pool has as many endpoints as a list may have."""
    answers = {
        f"engine-{at}.example": tuple(f"10.{at}.{n // 250}.{n % 250}" for n in range(4000))
        for at in range(5)
    }
    listed = [endpoint_list.EndpointListEntry(name, 8000) for name in answers]
    merged = static_discovery.merge_answers(listed, answers, last={})
    assert len(merged.endpoints) == endpoint_list.MAX_ENDPOINTS
    assert merged.num_dropped == 20_000 - endpoint_list.MAX_ENDPOINTS
    assert merged.endpoints == static_discovery.merge_answers(listed, answers, last={}).endpoints
