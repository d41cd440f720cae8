import asyncio

from extproc.discovery import dns


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose resolver is scripted."""

    async def getaddrinfo(self, host, port, **options):
        if host == "hangs.example":
            await asyncio.Event().wait()
        if host == "fails.example":
            raise OSError("no such name")
        if host == "many.example":
            self.rotated = getattr(self, "rotated", 0) + 1000
            at = [(place + self.rotated) % 9000 for place in range(9000)]
            return [(2, 1, 6, "", (f"10.0.{n // 250}.{n % 250}", 0)) for n in at]
        return [(2, 1, 6, "", ("10.0.0.1", 0)), (10, 1, 6, "", ("fd00::1", 0, 0, 0))]


def resolve(*names):
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(dns.DnsResolver(timeout_s=0.05).resolve(names))


def test_a_and_aaaa_answers_are_taken():
    """Addresses of both families are returned as text."""
    assert set(resolve("engines.example")["engines.example"]) == {"10.0.0.1", "fd00::1"}


def test_addresses_of_a_name_are_counted():
    """Of a huge answer the same addresses are taken every time, however it is rotated."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        resolver = dns.DnsResolver()
        first = runner.run(resolver.resolve(["many.example"]))
        second = runner.run(resolver.resolve(["many.example"]))
    assert first == second
    assert len(first["many.example"]) == dns.MAX_ADDRESSES


def test_a_name_that_fails_or_hangs_harms_no_other():
    """Failures and time-outs are empty answers next to the good ones."""
    answers = resolve("fails.example", "hangs.example", "engines.example")
    assert answers["fails.example"] == answers["hangs.example"] == ()
    assert answers["engines.example"]


def test_the_system_resolver_knows_localhost():
    """The real resolver is asked in the real way."""
    answers = asyncio.run(dns.DnsResolver().resolve(["localhost"]))
    assert set(answers["localhost"]) & {"127.0.0.1", "::1"}
