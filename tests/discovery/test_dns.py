import asyncio

from extproc.discovery import dns


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose resolver is scripted."""

    async def getaddrinfo(self, host, port, **options):
        if host == "hangs.example":
            await asyncio.Event().wait()
        if host == "fails.example":
            raise OSError("no such name")
        return [(2, 1, 6, "", ("10.0.0.1", 0)), (10, 1, 6, "", ("fd00::1", 0, 0, 0))]


def resolve(*names):
    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(dns.Resolver(timeout_s=0.05).resolve(names))


def test_a_and_aaaa_answers_are_taken():
    """Addresses of both families are returned as text."""
    assert resolve("engines.example") == {"engines.example": ("10.0.0.1", "fd00::1")}


def test_a_name_that_fails_or_hangs_harms_no_other():
    """Failures and time-outs are empty answers next to the good ones."""
    answers = resolve("fails.example", "hangs.example", "engines.example")
    assert answers["fails.example"] == answers["hangs.example"] == ()
    assert answers["engines.example"]


def test_the_system_resolver_knows_localhost():
    """The real resolver is asked in the real way."""
    answers = asyncio.run(dns.Resolver().resolve(["localhost"]))
    assert set(answers["localhost"]) & {"127.0.0.1", "::1"}
