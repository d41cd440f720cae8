import asyncio
import errno
import os
import socket
import ssl

import pytest
import uvloop

from extproc.scrape import client
from tests.support.certificates import write_certificate


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request):
    """Both event loops: their transports differ."""
    return request.param


def subject(**options):
    return client.ScrapeClient(**{"timeout_s": 60.0, "cap_bytes": 10_000, "idle_s": 60.0} | options)


def at(server, host="127.0.0.1"):
    return client.target(host, server.port, path="/metrics")


def test_the_request_is_a_plain_get():
    """IPv6 hosts stand in brackets; no compression is asked for."""
    request = client.target("fd00::1", 8000, path="/m").request
    assert request.startswith(b"GET /m HTTP/1.1\r\nhost: [fd00::1]:8000\r\n")
    assert b"accept-encoding: identity\r\n" in request
    assert request.endswith(b"\r\n\r\n")


def test_the_connection_is_reused(run, http):
    """Many pages come over one connection."""

    async def scene():
        async with http.serving(http.ScriptedServer()) as server:
            fetch = subject()
            pages = [await fetch.get(at(server)) for _ in range(5)]
            fetch.close()
            return pages, server.connections

    assert run(scene()) == ([http.PAGE] * 5, 1)


def test_a_closed_connection_is_replaced_at_once(run, http):
    """A server that closes after each answer costs a connection, not a page."""

    async def scene():
        async with http.serving(http.ScriptedServer(close_after=True)) as server:
            fetch = subject()
            pages = [await fetch.get(at(server)) for _ in range(3)]
            fetch.close()
            return pages, server.connections

    pages, connections = run(scene())
    assert (pages, connections) == ([http.PAGE] * 3, 3)


def test_a_fresh_connection_is_not_tried_twice(run, http):
    """A server that closes without an answer is a failure after one try."""

    async def scene():
        async with http.serving(http.ScriptedServer(b"", close_after=True)) as server:
            return await subject().get(at(server)), server.connections

    assert run(scene()) == (client.FetchFailed("closed"), 1)


def test_an_idle_connection_is_not_used(run, http):
    """Past the idle time the client takes a fresh connection by itself."""

    async def scene():
        async with http.serving(http.ScriptedServer()) as server:
            fetch = subject(idle_s=-1.0)
            pages = [await fetch.get(at(server)) for _ in range(2)]
            fetch.close()
            return pages, server.connections

    assert run(scene()) == ([http.PAGE] * 2, 2)


def test_116_a_status_other_than_200_is_a_failure(run, http):
    """Checklist 116: the status is the reason, and the next page is read."""

    async def scene():
        server = http.ScriptedServer(http.answer(b"no", status="500 Oops"), http.answer())
        async with http.serving(server):
            fetch = subject()
            pages = [await fetch.get(at(server)) for _ in range(2)]
            fetch.close()
            return pages

    assert run(scene()) == [client.FetchFailed("status 500"), http.PAGE]


def test_116_a_hanging_server_times_out(run, http):
    """Checklist 116: no answer is a time-out; a late one cannot meet the next request."""

    async def scene():
        async with http.serving(http.ScriptedServer(None, http.answer())) as server:
            fetch = subject(timeout_s=0.05)
            first = await fetch.get(at(server))
            # On a busy machine an answer may be late as well.
            while (later := await fetch.get(at(server))) == first:
                pass
            fetch.close()
            return first, later, server.connections

    first, later, connections = run(scene())
    assert (first, later) == (client.FetchFailed("timeout"), http.PAGE)
    assert connections >= 2


def test_a_body_that_stops_halfway_times_out(run, http):
    """A server that sends half a page and hangs is a time-out."""

    async def scene():
        async with http.serving(http.ScriptedServer(http.answer()[:-5])) as server:
            return await subject(timeout_s=0.05).get(at(server))

    assert run(scene()) == client.FetchFailed("timeout")


def test_a_closed_port_is_refused(run):
    """A closed port differs from a silent one."""
    with socket.socket() as queued:
        queued.bind(("127.0.0.1", 0))
        where = client.target("127.0.0.1", queued.getsockname()[1], path="/metrics")

        async def scene():
            return await subject().get(where)

        assert run(scene()) == client.FetchFailed("refused")


def test_a_reset_during_the_handshake_is_no_unreachable_engine(run):
    """An engine that wants a client certificate ends the handshake of TLS 1.2 so."""

    async def reset(reader, writer):
        await reader.read(1)
        writer.transport.abort()

    async def scene():
        async with await asyncio.start_server(reset, "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            fetch = subject(tls=ssl.create_default_context())
            return await fetch.get(client.target("127.0.0.1", port, path="/metrics"))

    assert run(scene()) == client.FetchFailed("tls")


def test_authorities_need_no_extensions_of_their_own(run, http, tmp_path):
    """Python 3.13 would refuse those that name no use of their key, which Envoy and Go take."""
    path = write_certificate(tmp_path, "authority")
    served, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), client.build_tls()
    served.load_cert_chain(path, path.with_suffix(".key"))
    trusting.load_verify_locations(path)

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(http.answer(b"page"))
        await writer.drain()
        writer.close()

    async def scene():
        async with await asyncio.start_server(answer, "127.0.0.1", ssl=served) as server:
            port = server.sockets[0].getsockname()[1]
            fetch = subject(tls=trusting)
            page = await fetch.get(client.target("127.0.0.1", port, path="/metrics"))
            fetch.close()
            return page

    assert run(scene()) == b"page"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.EMFILE, "too many open files"),
        (errno.ENFILE, "too many open files"),
        (errno.EHOSTUNREACH, "unreachable"),
    ],
)
def test_a_lack_of_files_is_no_unreachable_engine(monkeypatch, code, reason):
    """It is the fault of this process or machine."""

    async def scene():
        async def fail(*_, **__):
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", fail)
        return await subject().get(client.target("127.0.0.1", 1, path="/metrics"))

    assert asyncio.run(scene()) == client.FetchFailed(reason)


def test_a_page_over_the_cap_is_a_failure(run, http):
    """Memory is bounded by the cap."""

    async def scene():
        async with http.serving(http.ScriptedServer(http.answer(b"x" * 10_001))) as server:
            return await subject().get(at(server))

    assert run(scene()) == client.FetchFailed("too large")


def test_unexpected_bytes_end_the_connection(run, http):
    """An answer with more behind it is taken, and its connection is not used again."""

    async def scene():
        async with http.serving(http.ScriptedServer(http.answer() + b"HTTP/1.1 200")) as server:
            fetch = subject()
            pages = [await fetch.get(at(server)) for _ in range(2)]
            fetch.close()
            return pages, server.connections

    assert run(scene()) == ([http.PAGE] * 2, 2)


def test_a_forgotten_target_is_closed(run, http):
    """After `forget` the server sees the connection end, and another get opens a new one."""

    async def scene():
        async with http.serving(http.ScriptedServer()) as server:
            fetch = subject()
            await fetch.get(at(server))
            fetch.forget(at(server))
            await fetch.get(at(server))
            fetch.forget(at(server))
            return server.connections

    assert run(scene()) == 2


def test_an_ipv6_endpoint(run, http):
    """Pages come over IPv6."""

    async def scene():
        async with http.serving(http.ScriptedServer(), "::1") as server:
            fetch = subject()
            page = await fetch.get(at(server, "::1"))
            fetch.close()
            return page, server.requests[0]

    try:
        page, request = run(scene())
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    assert page == http.PAGE
    assert b"host: [::1]:" in request


def test_an_answer_to_a_body_is_fetched(run, http):
    """The body follows the head, with its length."""

    async def scene():
        async with http.serving(http.ScriptedServer(http.answer(b"{}"))) as server:
            fetch = subject()
            where = client.post_target(f"http://127.0.0.1:{server.port}/v1/render")
            answers = await fetch.post(where, b"12\r\n\r\n")
            fetch.close()
            return answers, server.requests[0]

    answer, request = run(scene())
    assert answer == b"{}"
    assert request.startswith(b"POST /v1/render HTTP/1.1\r\n")
    assert b"content-length: 6\r\n" in request


@pytest.mark.parametrize(
    "url",
    ["http://", "http://host:99999/", "http://user:password@host", "http://a..b", "http://[::1"],
)
def test_a_url_without_a_host_and_port_is_refused(url):
    """A user is not sent, so that it is refused as well."""
    with pytest.raises(ValueError, match=r"URL|[Pp]ort|label"):
        client.post_target(url)


def test_of_two_calls_at_a_time_one_connection_is_kept(run, http):
    """The other one is closed, and not only forgotten."""

    async def scene():
        async with http.serving(http.ScriptedServer()) as server:
            fetch = subject()
            await asyncio.gather(fetch.get(at(server)), fetch.get(at(server)))
            while sum(not writer.is_closing() for writer in server.writers) > 1:
                await asyncio.sleep(0)
            await fetch.get(at(server))
            fetch.close()
            return server.connections

    assert run(scene()) == 2


def test_connections_that_are_too_old_are_closed(run, http):
    """By the end of any call: targets of which no page is wanted any more leave none."""

    async def scene():
        async with (
            http.serving(http.ScriptedServer()) as old,
            http.serving(http.ScriptedServer()) as new,
        ):
            fetch = subject(idle_s=-1.0)
            await fetch.get(at(old))
            await fetch.get(at(new))
            while not old.writers[0].is_closing():
                await asyncio.sleep(0)
            fetch.close()

    run(scene())
