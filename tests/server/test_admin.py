"""The pages on the metrics port."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import random
import re
import types

import pytest
from aiohttp import web

from extproc.cli import main
from extproc.demo import stack
from extproc.endpoint import Candidate, Endpoint
from extproc.errors import ConfigError
from extproc.pool.store import PoolStore
from extproc.request import InferenceRequest
from extproc.scheduling import registry
from extproc.scheduling.framework import SchedulingContext
from extproc.server import admin, admin_access, app
from extproc.telemetry import explanation
from extproc.telemetry.decision_log import DecisionLog
from tests.docs import http_reference
from tests.e2e import http1
from tests.support.canary import CANARY
from tests.support.config_text import read

#: A token of an operator, which no log may have.
TOKEN = f"{CANARY}-token"


@contextlib.asynccontextmanager
async def admin_pages():
    """The port of a picker that serves its pages only."""
    port = stack.free_port()
    server = f"server: {{host: 127.0.0.1, metrics_port: {port}}}\n"
    settings = read(server)
    picker = app.EndpointPickerProcess(settings)
    await picker.start_admin()
    try:
        yield port
    finally:
        await picker.admin_server.close()


async def test_pages_do_not_name_the_server_software():
    """No answer, be it a page, a 404 or one to what is no HTTP, has a Server header."""
    async with admin_pages() as port:
        for path, status in (("/healthz", 200), ("/metrics", 200), ("/nothing", 404)):
            answer = await http1.ask(port, path)
            assert answer.status == status
            assert answer.head.all("server") == []
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"no HTTP\r\n\r\n")
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.0 400 ")
        assert b"server:" not in answer.lower()


@pytest.mark.parametrize(
    ("accept", "kind", "ending"),
    [
        ("application/openmetrics-text;version=1.0.0;q=0.6,*/*;q=0.1", "openmetrics", b"# EOF\n"),
        ("Application/OpenMetrics-Text", "openmetrics", b"# EOF\n"),
        ("text/plain;version=0.0.4;q=0.5", "text/plain; version=0.0.4", b".0\n"),
        ("application/openmetrics-text; q=0.0, text/plain", "text/plain; version=0.0.4", b".0\n"),
    ],
)
async def test_metrics_have_the_format_that_the_scraper_accepts(accept, kind, ending):
    """Prometheus prefers OpenMetrics; a scraper that does not ask for it gets the older format."""
    async with admin_pages() as port:
        answer = await http1.ask(port, "/metrics", headers=[("accept", accept)])
    assert kind in answer.head.all("content-type")[0]
    assert answer.body.endswith(ending)


async def test_a_token_protects_debug_and_peer_pages(tmp_path, capsys):
    """Metrics and probes stay open; the rest wants the token, which pickers send each other."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    port = stack.free_port()
    server = (
        f"server: {{host: 127.0.0.1, metrics_port: {port}, admin_token_file: {file}}}\n"
        f"autoscaling: {{peers: ['127.0.0.1:{port}']}}\n"
    )
    settings = read(server)
    picker = app.EndpointPickerProcess(settings)
    await picker.start_admin()
    token = [("authorization", f"Bearer {TOKEN}")]
    try:
        for path, bare in (("/healthz", 200), ("/metrics", 200), ("/debug/pools", 401)):
            assert (await http1.ask(port, path)).status == bare
            assert (await http1.ask(port, path, headers=token)).status == 200
        for path in ("/internal/load", "/debug/decisions", "/debug/nothing"):
            wrong = [("authorization", f"Bearer {TOKEN[:-1]}")]
            assert (await http1.ask(port, path, headers=wrong)).status == 401
        peers = picker.autoscaler.peers
        await peers.read("")
        # It reached itself, which it leaves out; without the token it would be unknown.
        assert peers.last("") == {}
        url = f"http://127.0.0.1:{port}"
        words = ["explain", "--server", url, "--id", "none", "--token-file"]
        assert await asyncio.to_thread(main.main, words[:-1]) == 1
        assert "--token-file" in capsys.readouterr().err
        assert await asyncio.to_thread(main.main, [*words, str(file)]) == 1
        assert "no decision of that request id" in capsys.readouterr().err
    finally:
        await picker.admin_server.close()
        peers.close()


def test_a_token_file_without_a_token_is_refused(tmp_path):
    """An empty or missing file is an error, not a port without a token."""
    for text in ("", " \n"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(ConfigError):
            admin_access.read_token(str(tmp_path / "token"))
    with pytest.raises(ConfigError):
        admin_access.read_token(str(tmp_path / "missing"))
    assert admin_access.read_token("") == ""


def test_a_token_file_is_read_again_when_it_changes(tmp_path, caplog):
    """A renewed Secret is in force at the next request; one that cannot be read opens nothing."""
    caplog.set_level(logging.INFO, "extproc.server")
    file = tmp_path / "token"
    file.write_text("first")
    token = admin_access.AdminToken(str(file))
    assert (token.current(), caplog.messages) == ("first", [])
    draft = tmp_path / "draft"
    draft.write_text("second\n")
    draft.rename(file)
    assert (token.current(), token.current()) == ("second", "second")
    assert caplog.messages == ["server.admin_token_file: reloaded"]
    draft.write_text("")
    draft.rename(file)
    assert (token.current(), token.current()) == ("second", "second")
    file.unlink()
    assert (token.current(), token.current()) == ("second", "second")
    os.mkfifo(file)
    assert (token.current(), token.current()) == ("second", "second")
    warnings = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert len(warnings) == 3
    assert "without a token" in warnings[0]
    assert "No such file" in warnings[1]
    assert "a pipe, which is no regular file" in warnings[2]
    file.unlink()
    file.write_text("third")
    assert token.current() == "third"


def test_a_token_that_cannot_be_read_for_a_passing_reason_is_read_again(
    tmp_path, monkeypatch, caplog
):
    """Though its file does not change any more: such as while too many files are open."""
    file = tmp_path / "token"
    file.write_text("old")
    token = admin_access.AdminToken(str(file))
    file.write_text("renewed")

    def fail(name: str, _flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)

    with monkeypatch.context() as patch:
        patch.setattr(admin_access, "open_regular", fail)
        assert (token.current(), token.current()) == ("old", "old")
    assert len(caplog.messages) == 1
    assert "Too many open files" in caplog.messages[0]
    assert token.current() == "renewed"


async def test_a_configuration_without_its_token_file_is_refused(tmp_path):
    """A reload that names a file without a token changes nothing."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    written = [
        read(f"server: {{admin_token_file: {path}}}\n") for path in (file, tmp_path / "missing")
    ]
    picker = app.EndpointPickerProcess(written[0])
    with pytest.raises(ConfigError):
        picker.apply_settings(written[1])
    assert picker.admin_token.current() == TOKEN


PAGES = ["/debug/pools", "/debug/explain", "/debug/decisions/x", "/internal/load", "/else"]


def refusal(path, *, remote, token="", authorization="", host="", site=""):
    async def is_peer(address):
        return address == "10.0.0.7"

    access = admin_access.AdminAccess(lambda: token, is_peer)
    refused = asyncio.run(
        access.refusal(path, remote=remote, authorization=authorization, host=host, site=site)
    )
    return None if refused is None else refused[0]


@pytest.mark.parametrize("remote", ["10.0.0.7", "::ffff:10.0.0.7", "10.0.0.8", "fd00::1", ""])
def test_access_without_a_token_is_for_loopback_and_peers(remote):
    """Others read metrics and probes, and peers what pickers exchange."""
    for path in ("/metrics", "/healthz", "/readyz"):
        assert refusal(path, remote=remote) is None
    for path in PAGES:
        assert refusal(path, remote="127.0.0.1") is None
        assert refusal(path, remote="::1") is None
        assert refusal(path, remote="::ffff:127.0.0.1") is None
        is_exchange = path == "/internal/load" and remote.endswith("10.0.0.7")
        assert refusal(path, remote=remote) == (None if is_exchange else 403)


@pytest.mark.parametrize("remote", ["127.0.0.1", "10.0.0.7", "10.0.0.8"])
def test_access_with_a_token_requires_it_from_any_address(remote):
    """No address stands in for it."""
    for path in PAGES:
        assert refusal(path, remote=remote, token="s3cret") == 401
        assert refusal(path, remote=remote, token="s3cret", authorization="Bearer \udcff") == 401
        bearer = "Bearer s3cret"
        assert refusal(path, remote=remote, token="s3cret", authorization=bearer) is None


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9090", None),
        ("[::1]:9090", None),
        ("localhost:9090", None),
        ("LocalHost", None),
        ("10.0.0.5:9090", None),
        ("rebound.example:9090", 403),
        ("rebound.example", 403),
        ("localhost.rebound.example:9090", 403),
        ("127.0.0.1.rebound.example", 403),
    ],
)
def test_names_of_other_sites_do_not_reach_debug_pages(host, status):
    """A page of another site whose name resolves to this machine reads nothing in its browser."""
    for path in ("/debug/pools", "/debug/overview", "/console/", "/internal/load"):
        assert refusal(path, remote="127.0.0.1", host=host) == status
    assert refusal("/metrics", remote="127.0.0.1", host=host) is None


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin", "none", ""])
def test_pages_of_other_sites_hold_no_recordings(site):
    """Browsers name the origin of a request; links to the console and to open pages work from anywhere."""
    is_other = site in {"cross-site", "same-site"}
    for path in ("/debug/record", "/debug/explain", "/internal/requests"):
        assert refusal(path, remote="127.0.0.1", site=site) == (403 if is_other else None)
        bearer = {"token": "s3cret", "authorization": "Bearer s3cret"}
        assert refusal(path, remote="127.0.0.1", site=site, **bearer) is None
    for path in ("/metrics", "/console/"):
        assert refusal(path, remote="127.0.0.1", site=site) is None


async def test_a_page_of_another_site_is_refused_by_the_server():
    """The header that browsers send arrives at the check."""
    async with admin_pages() as port:
        foreign = [("sec-fetch-site", "cross-site")]
        answer = await http1.ask(port, "/debug/record?seconds=86400", headers=foreign)
        assert (answer.status, b"another site" in answer.body) == (403, True)
        assert (await http1.ask(port, "/debug/pools")).status == 200


async def test_the_index_lists_all_debug_pages():
    """Each in a line, with the names of its query."""
    async with admin_pages() as port:
        answer = await http1.ask(port, "/debug")
        lines = answer.body.decode().splitlines()
        listed = {line.split()[1].partition("?")[0] for line in lines}
        for path in listed - {"/debug/decisions/{id}", "/debug/explain"}:
            answer = await http1.ask(port, f"{path}?nothing=1")
            assert (answer.status, b"?nothing=; it takes: " in answer.body) == (400, True)
    routes = re.findall(r"\| `(/debug[^`]*)`", http_reference.block())
    assert listed == set(routes)


async def test_unknown_names_in_a_query_are_refused_with_the_known_ones():
    """A filter with a typing error must not show everything."""
    async with admin_pages() as port:
        answer = await http1.ask(port, "/debug/decisions/x?results=ok")
        assert answer.status == 400
        message = "no query of this page is ?results=; it takes: ?result=, ?sequence="
        assert answer.json()["error"]["message"].endswith(message)


async def test_pages_of_large_pools_leave_turns_to_requests(monkeypatch):
    """Pools are rendered endpoint by endpoint, with other work in between."""
    monkeypatch.setattr(admin, "_RENDER_TURN_S", 0.0)  # a turn after each endpoint
    store = PoolStore(on_gone=lambda _: None)
    store.set_endpoints([Endpoint(f"10.0.0.{at}:8000") for at in range(50)], 0.0)
    facts = dict.fromkeys(admin.AdminPages.__struct_fields__)
    facts |= {"pools": lambda: {"a": store.pool, "b": store.pool}, "clock": lambda: 1.0}
    rendering = asyncio.ensure_future(admin.AdminPages(**facts).all_pools(None))
    num_turns = 0
    while not rendering.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert num_turns >= 100
    pools = json.loads((await rendering).body)["pools"]
    assert [len(pools[name]["endpoints"]) for name in ("a", "b")] == [50, 50]


async def test_a_decision_of_a_large_pool_leaves_turns_to_requests(monkeypatch):
    """Its candidates are rendered one by one, with other work in between."""
    monkeypatch.setattr(admin, "_RENDER_TURN_S", 0.0)  # a turn after each candidate
    candidates = [Candidate(Endpoint(f"10.0.0.{at}:8000")) for at in range(50)]
    context = SchedulingContext(InferenceRequest("chat"), 0.0, random.Random(1))
    log = DecisionLog(10)
    record = log.add("a", registry.profiles()["least-request"].run(context, candidates), 0.0)
    facts = dict.fromkeys(admin.AdminPages.__struct_fields__)
    facts |= {"decisions": log, "clock": lambda: 1.0}
    request = types.SimpleNamespace(query={"id": "a"})
    rendering = asyncio.ensure_future(admin.AdminPages(**facts).decision_of_query(request))
    num_turns = 0
    while not rendering.done():
        num_turns += 1
        await asyncio.sleep(0)
    assert num_turns >= 100  # those that were scored, too
    page = json.loads((await rendering).body)
    assert page == json.loads(json.dumps(explanation.explain_record(record, 1.0)))


async def test_browsers_get_indented_json():
    """Programs get it in one line."""
    async with admin_pages() as port:
        for path in ("/debug/decisions", "/debug/overview", "/debug/pools"):
            short = await http1.ask(port, path)
            accept = [("accept", "text/html,application/xhtml+xml,*/*;q=0.8")]
            long = await http1.ask(port, path, headers=accept)
            assert short.body.count(b"\n") == 0
            assert long.body.startswith(b'{\n  "')
            assert long.json().keys() == short.json().keys()


def test_files_of_the_console_are_open_where_there_is_a_token():
    """A browser cannot send the token for a page; the files have no data, which it is for."""
    assert refusal("/console/", remote="10.0.0.8", token="s3cret") is None
    assert refusal("/console/app.js", remote="10.0.0.8", token="s3cret") is None
    assert refusal("/debug/overview", remote="10.0.0.8", token="s3cret") == 401
    assert refusal("/console/", remote="10.0.0.8") == 403


async def test_a_body_in_a_broken_encoding_is_refused(caplog):
    """It is a mistake of the client, with nothing for the log."""
    async with admin_pages() as port:
        answer = await http1.ask(
            port,
            "/debug/explain",
            method="POST",
            headers=[("content-encoding", "gzip")],
            body=b"no gzip",
        )
    assert answer.status == 400
    assert b"expected a body in the encoding of its headers" in answer.body
    assert not caplog.records


@pytest.mark.parametrize(
    "request_text",
    [
        f"GET /debug/pool HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}{'y' * 9000}\r\n\r\n",
        f"GET /debug/pool HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\x01\r\n\r\n",
        f"POST /debug/explain HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n{CANARY}\r\n",
    ],
)
async def test_malformed_requests_write_nothing_into_the_log(request_text, caplog):
    """They are mistakes of clients, and what aiohttp says of them quotes tokens and prompts."""

    async def page(request):
        await request.read()
        return web.Response()

    application = web.Application()
    application.router.add_route("*", "/debug/{name}", page)
    server = admin.AdminServer()
    port = await server.start(application, host="127.0.0.1", port=0)
    try:
        async with http1.calling(port) as call:
            await call.send(request_text.encode())
            await call.ended()
    finally:
        await server.close()
    assert not caplog.records


async def test_a_bug_of_a_page_is_logged_once_without_its_message(caplog):
    """A message may quote the request, and a client may ask again and again."""

    async def page(_):
        raise ValueError(CANARY)

    application = web.Application()
    application.router.add_get("/", page)
    server = admin.AdminServer()
    port = await server.start(application, host="127.0.0.1", port=0)
    try:
        assert [(await http1.ask(port, "/")).status for _ in range(3)] == [500] * 3
    finally:
        await server.close()
    assert caplog.messages == ["a request ran into a bug: ValueError"]
    assert "test_admin.py" in caplog.text
    assert CANARY not in caplog.text
