"""Pages of simulated engines and of servers that do what they like."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import threading

import pytest

from extproc.cli import main
from extproc.config.pool_sections import PoolSource
from extproc.config.settings import ScrapeSection, Settings
from extproc.diagnostics import collector
from extproc.discovery import static_discovery
from extproc.errors import ConfigError
from extproc.simulator import profiles
from extproc.simulator.http import server
from tests.support.virtual_loop import in_virtual_time


@contextlib.asynccontextmanager
async def serving(respond):
    """A server that answers what `respond` writes for a path; yields its address."""
    writers = []

    async def handle(reader, writer):
        writers.append(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            await respond(head.split()[1].decode(), writer)
        writer.close()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*listener.sockets[0].getsockname())
    finally:
        listener.close()
        for writer in writers:
            writer.transport.abort()
        await listener.wait_closed()
        # One turn for the aborted handlers to end.
        await asyncio.sleep(0)


async def collect(*addresses, timeout_s=30.0, scrape=None):
    settings = Settings(
        scrape=scrape or ScrapeSection(), pool=PoolSource(endpoints=tuple(addresses))
    )
    reader = collector.Collector(settings, timeout_s=timeout_s)
    pages = await reader.collect(envoy=None, picker=None)
    return pages, collector.diagnose(pages, settings)


async def test_simulated_engines_have_no_errors():
    """All pages are read; a simulated vLLM is as it should be."""
    engine = server.EngineServerSettings(profile=profiles.PROFILES["demo"])
    async with server.serving(engine) as first, server.serving(engine) as second:
        pages, result = await collect(f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}")
    assert len(pages.engines) == 2
    for engine in pages.engines:
        facts = engine.facts
        assert (facts.version, facts.models, facts.prefix_caching) == ("0.32.0", "demo", True)
        assert facts.max_model_len
        assert facts.load.engine == "vllm"
    # A page of metrics of a busy machine may be slow.
    checks = {finding.check for finding in result.findings if finding.severity != "fine"}
    assert checks <= {"metrics_time"}


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("metrics-status=500", "metrics_page"),
        ("metrics-empty", "metrics_page"),
        ("not-ready", "engine_health"),
    ],
)
async def test_a_simulated_fault_is_an_error(fault, check):
    """The exit status is 1."""
    engine = server.EngineServerSettings(profile=profiles.PROFILES["demo"], faults=(fault,))
    async with server.serving(engine) as running:
        _, result = await collect(f"127.0.0.1:{running.port}")
    errors = [finding.check for finding in result.findings if finding.severity == "error"]
    assert check in errors
    assert result.status == 1


async def endless(_, writer):
    """A body without end."""
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"vllm:num_requests_running 1.0\n" * 1000)
            await writer.drain()


async def endless_head(_, writer):
    """Header fields without end."""
    writer.write(b"HTTP/1.1 200 OK\r\n")
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(b"x: " + b"y" * 1000 + b"\r\n")
            await writer.drain()


async def redirecting(_, writer):
    """A redirect to somewhere else."""
    writer.write(
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"
    )


async def escaping(path, writer):
    """Escape sequences in a version."""
    body = json.dumps({"version": "\x1b[31m" + "9" * 10_000}).encode()
    if path == "/metrics":
        body = b"vllm:num_requests_running 1.0\n"
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize("respond", [endless, endless_head, redirecting, escaping])
async def test_hostile_engines_are_bounded(respond):
    """Neither memory nor time without limit, nothing followed, nothing raw on a terminal."""
    async with serving(respond) as address:
        _, result = await collect(address, scrape=ScrapeSection(max_page_bytes=100_000))
    assert [finding for finding in result.findings if finding.severity in ("error", "warning")]
    assert all(line.isprintable() and len(line) < 500 for line in result.to_lines())


async def test_an_engine_that_hangs_is_left_after_the_time_limit():
    """Its other pages are not tried."""
    paths = []

    async def hang(path, writer):
        paths.append(path)
        await writer.wait_closed()

    async with serving(hang) as address:
        while not paths:  # on a busy machine the time is over before the engine has the request
            _, result = await collect(address, timeout_s=0.05)
    assert paths == ["/metrics"]
    assert [finding.check for finding in result.findings] == ["engine_reachable"]


@in_virtual_time()
async def test_a_name_that_hangs_leaves_the_other_endpoints(monkeypatch):
    """The resolver's own limit ends its lookup, however short that of a page is."""

    async def look_up(name):
        if name == "hanging.example":
            await asyncio.get_running_loop().create_future()
        return ["127.0.0.2"]

    resolver = functools.partial(static_discovery.DnsResolver, look_up=look_up)
    monkeypatch.setattr(static_discovery, "DnsResolver", resolver)
    listed = ("127.0.0.1:1", "known.example:2", "hanging.example:3")
    reader = collector.Collector(
        Settings(pool=PoolSource(endpoints=listed)),
        timeout_s=1.0,
        clock=asyncio.get_running_loop().time,
    )
    pages = await reader.collect(envoy=None, picker=None)
    assert [member.address for member in pages.endpoints[""]] == ["127.0.0.1:1", "127.0.0.2:2"]


def test_a_lookup_that_hangs_does_not_outlive_the_time_of_its_page(monkeypatch):
    """The name of an admin port may have name servers that never answer."""
    released, ended = threading.Event(), []

    def getaddrinfo(*_, **__):
        released.wait(30.0)
        ended.append(1)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    url = collector.parse_url("hanging.example", where="--envoy", port=9901)
    reader = collector.Collector(Settings(), timeout_s=0.01)
    pages = asyncio.run(reader.collect(envoy=url, picker=None))
    assert not ended
    released.set()
    assert pages.envoy.server_info.failure == "timeout"


async def test_the_addresses_of_a_name_are_tried_in_turn(monkeypatch):
    """The first may be of a family on which nothing listens."""

    async def respond(_, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async def look_up(name):
        return {"envoy.example": ["127.0.0.2", "127.0.0.1"]}[name]

    monkeypatch.setattr(collector, "look_up_in_thread", look_up)
    async with serving(respond) as address:
        port = int(address.rpartition(":")[2])
        url = collector.parse_url("envoy.example", where="--envoy", port=port)
        pages = await collector.Collector(Settings(), timeout_s=30.0).collect(
            envoy=url, picker=None
        )
    assert pages.envoy.server_info.body == b"{}"


async def test_pages_of_envoy_and_extproc_share_the_deadline():
    """No page is requested once the time of all is over, which begins with the configuration."""
    paths = []

    async def respond(path, writer):
        paths.append(path)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with serving(respond) as address:
        url = collector.parse_url(address, where="--envoy", port=1)
        slow_s = collector.TOTAL_S / 2.5
        reader = collector.Collector(Settings(), timeout_s=30.0, clock=lambda: slow_s * len(paths))
        await reader.read_configuration(url)
        reader.reconfigure(Settings(pool=PoolSource(endpoints=("127.0.0.1:1",))))
        pages = await reader.collect(envoy=url, picker=url)
    assert paths == ["/debug/configuration", "/server_info", "/config_dump"]
    # There was time left to list the engines.
    assert [endpoint.address for endpoint in pages.endpoints[""]] == ["127.0.0.1:1"]
    assert (pages.envoy.stats.failure, pages.picker.ready.failure) == ("timeout", "timeout")


async def test_engines_beyond_the_deadline_are_counted(monkeypatch):
    """A pool of engines that hang does not hold the report up."""
    monkeypatch.setattr(collector, "TOTAL_S", 0.0)
    pages, result = await collect("127.0.0.1:1", "127.0.0.1:2")
    assert not pages.engines
    assert [finding.got for finding in result.findings] == ["2 of 2 engines were not read"]


@pytest.mark.parametrize(
    "text",
    [
        *("http://user:secret@127.0.0.1", "ftp://127.0.0.1", "127.0.0.1:99999", "host/path", ""),
        *("127.0.0.1:0", "127.0.0.1:9901#secret"),
        *("a..b:80", f"{'a' * 64}:80", "http://[::1"),
    ],
)
def test_addresses_of_admin_ports_are_checked(text):
    """The error does not repeat what may hold a password."""
    with pytest.raises(ConfigError) as refused:
        collector.parse_url(text, where="--envoy", port=9901)
    assert "secret" not in str(refused.value)
    assert refused.value.got == ("something else" if text else "nothing")


def test_addresses_of_admin_ports_are_parsed():
    """With and without scheme and port."""
    parse = collector.parse_url
    assert parse("localhost", where="--envoy", port=9901).text == "http://localhost:9901"
    assert parse("https://[::1]:1", where="--envoy", port=9901).text == "https://[::1]:1"


def test_without_flags_the_picker_of_this_machine_is_read(capsys):
    """By the default of --metrics-port, whatever is there."""
    assert main.main(["doctor", "--format", "json"]) in (0, 1)
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert "extproc http://127.0.0.1:9090" in {finding["place"] for finding in findings}


def test_the_command_prints_tables_and_json(capsys):
    """Exit status 1 with an error, 2 with a wrong flag."""
    words = ["doctor", "--endpoints", "127.0.0.1:1"]
    assert main.main(words) == 1
    output = capsys.readouterr().out
    assert "error    engine_reachable          engine 127.0.0.1:1" in output
    assert "fix      start the engine" in output
    assert output.endswith("1 error, 0 warnings, 0 notes, 0 checks passed\n")
    assert main.main([*words, "--format", "json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] is False
    assert result["findings"][0]["check"] == "engine_reachable"
    assert set(result["findings"][0]) >= {"severity", "place", "expected", "got", "fix"}
    assert main.main([*words, "--envoy", "http://a:b@c"]) == 2
    assert main.main([*words, "--envoy", ""]) == 2  # as of a variable that is not set
