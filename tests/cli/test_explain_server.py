import asyncio
import json
import os
import threading
import urllib.error
import urllib.request

import pytest
from aiohttp import web

from extproc.cli import explain, main
from extproc.config import factory, settings
from extproc.decision import model_not_found
from extproc.demo import stack
from extproc.endpoint import Endpoint
from extproc.request import HttpRequest
from extproc.server import admin, admin_access, health
from extproc.telemetry import counters, decision_log
from tests.cli.explain_inputs import BODY, told_by
from tests.support.metrics_pages import build_exposition, build_view
from tests.support.raw_server import answering


async def deny(_):
    """No address is that of another picker."""
    return False


@pytest.fixture
def decisions():
    return decision_log.DecisionLog(10)


@pytest.fixture
def dry_runs():
    """Requests that the server was to explain."""
    return []


@pytest.fixture
def tokens():
    """Tokens of the server; the last one is in force."""
    return []


@pytest.fixture
def server(decisions, dry_runs, tokens):
    """The pages of a picker with one busy endpoint, on a free port; yields `host:port`."""
    parts = factory.build(settings.Settings())
    parts.store.set_endpoints(
        [Endpoint("10.0.0.1:8000", name="one"), Endpoint("10.0.0.2:8000")], 0.0
    )
    parts.store.pool.members[0].account.open("m", 10, cached_tokens=0, now=0.0)
    log = decisions
    raw = HttpRequest({":method": "POST", ":path": "/v1/chat/completions"}, BODY.encode())
    decision = parts.director.route(raw, 0.5)
    log.add("id/0", decision, 0.2)
    log.find("id/0").status, log.find("id/0").seconds = "503", 4.0
    log.add("id/1", decision, 0.5).status = "200"

    async def dry_run(raw):
        dry_runs.append(raw)
        return parts.director.route(raw, 1.0)

    pages = admin.AdminPages(
        exposition=build_exposition(counters.ProcessCounters(), {"": build_view(parts.store.pool)}),
        readiness=health.Readiness(lambda: True),
        pools=lambda: {"": parts.store.pool},
        dry_run=dry_run,
        decisions=log,
        decision_recorder=None,
        clock=lambda: 1.0,
        access=admin_access.AdminAccess(lambda: tokens[-1] if tokens else "", deny),
        max_body_bytes=lambda: 1_000_000,
    )
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(pages.application(), access_log=None)

    async def start():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_running_server_explains(server, files, capsys):
    """A running server is asked for a dry run with what it knows now."""
    output = told_by(capsys, files["body"], "--server", f"http://{server}/")
    assert "chosen by rendezvous: 10.0.0.2:8000" in output


def test_a_proxy_of_the_environment_is_not_used(server, files, capsys, monkeypatch):
    """Proxies to the internet reach no metrics port, and get no token."""
    monkeypatch.setattr(urllib.request, "_opener", None)  # which keeps the environment it began in
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{stack.free_port()}")
    output = told_by(capsys, files["body"], "--server", server)
    assert "chosen by rendezvous: 10.0.0.2:8000" in output


def test_text_of_headers_is_sent_as_utf_8(server, dry_runs, files, capsys):
    """As clients send it to Envoy, which hands on its bytes."""
    flags = ["--header", "x-user=é日", "--path", "/v1/chat/completions?é"]
    told_by(capsys, files["body"], "--server", server, *flags)
    headers = dry_runs[0].headers
    texts = [headers[name].encode("latin-1").decode() for name in ("x-user", ":path")]
    assert texts == ["é日", "/v1/chat/completions?é"]
    told_by(capsys, files["body"], "--state", files["state"], *flags)


def test_running_server_refuses(server, tmp_path, capsys):
    """A refusal of the server is printed as the client would get it."""
    body = tmp_path / "body"
    body.write_text("{")
    assert "refused with 400" in told_by(capsys, str(body), "--server", server, status=3)


def test_a_recorded_request_is_explained_by_its_id(server, capsys):
    """With --id a server tells what was decided, how long ago, and what came of it."""
    output = told_by(capsys, "--server", server, "--id", "id/1")
    assert output.startswith("request id/1: 0.5 s ago, status 200, still open\n")
    assert "chosen by" in output
    for name in ("chatcmpl-id/1", "cmpl-id/1-0"):
        assert "request id/1:" in told_by(capsys, "--server", server, "--id", name)
    assert main.main(["explain", "--server", server, "--id", "nobody"]) == 1
    assert "no decision of that request id among the last 2" in capsys.readouterr().err
    assert main.main(["explain", "--state", "x", "--id", "nobody"]) == 2
    assert "expected --server" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--id", "refused"], ["--last"], ["--failed"]])
def test_a_refused_request_is_explained(words, server, decisions, capsys):
    """The client has an id of it, as of any other; a 404 of the model is no unknown id."""
    rejection = model_not_found("x", ["sql"])
    decisions.add_rejection(decision_log.RejectionRecord("refused", 0.75, "demo", "x", rejection))
    output = told_by(capsys, "--server", server, *words, status=3)
    assert output.startswith("request refused: 0.2 s ago, model x\ncause: unknown-model\n")
    assert "refused with 404: the model `x` does not exist; there are: sql" in output


def test_last_decisions_are_listed(server):
    """/debug/decisions lists the last decisions, newest first, each in a line."""
    with urllib.request.urlopen(f"http://{server}/debug/decisions?limit=1", timeout=300) as page:
        (decision,) = json.load(page)["decisions"]
    assert (decision["id"], decision["status"]) == ("id/1", "200")
    assert decision["why"].startswith("adaptive; chose=10.0.0.")


def test_an_unreachable_server_is_status_1(files, capsys):
    """A server that does not answer is a failure, status 1."""
    for words in ([files["body"]], ["--last"]):
        assert main.main(["explain", *words, "--server", "127.0.0.1:1"]) == 1
        assert capsys.readouterr().err == (
            "extproc: expected an extproc that answers at http://127.0.0.1:1, got Connection refused; "
            "start `extproc serve`, or give the host and the --metrics-port of a running one with "
            "--server\n"
        )


@pytest.mark.parametrize("text", ["", "s3cret\nsecond line", "s3cret \u00e9"])
def test_explain_refuses_a_token_file_without_quoting_it(text, server, tmp_path, capsys):
    """An invalid token exits with status 2, and its text is not printed."""
    path = tmp_path / "token"
    path.write_text(text)
    words = ["explain", "--server", server, "--id", "id/1", "--token-file", str(path)]
    assert main.main(words) == 2
    output = capsys.readouterr().err
    assert "--token-file: expected" in output
    assert "s3cret" not in output


def test_a_foreign_server_is_status_1(server, files, capsys):
    """A server that is no picker is a failure, status 1."""
    assert main.main(["explain", files["body"], "--server", f"{server}/metrics"]) == 1
    assert "status 404" in capsys.readouterr().err


def json_answer(text):
    """A 200 answer with this body."""
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"a" * 100_000, "not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "cut off"),
        (json_answer("<html>"), "not JSON"),
        (json_answer("[" * 100_000), "not JSON"),
        *(
            (json_answer(text), "JSON of another shape")
            for text in ("[1, 2]", "null", "{}", '{"outcome": 1}', '{"decisions": {"a": 1}}')
        ),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 9\r\n\r\n{", "status 404"),
    ],
)
@pytest.mark.parametrize("words", [["--last"], ["--id", "a", "--json"], []])
def test_any_other_server_is_status_1(words, answer, got, files, capsys):
    """The error has its address and says that it is no extproc."""
    with answering(answer) as server:
        request = [] if words else [files["body"]]
        assert main.main(["explain", *request, "--server", server, *words]) == 1
    message = capsys.readouterr().err
    assert message.startswith(
        f"extproc: expected the metrics port of an extproc at http://{server}"
    )
    assert got in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1:abc", "http://[::1", "a..b:80", "a b", "http://", "ftp://a"]
)
def test_a_wrong_address_is_status_2(address, capsys):
    """As any other flag."""
    assert main.main(["explain", "--last", "--server", address]) == 2
    assert capsys.readouterr().err.startswith("extproc: --server: expected host:port")


@pytest.mark.parametrize(
    ("flag", "name"), [("--last", "id/1"), ("--slowest", "id/0"), ("--failed", "id/0")]
)
def test_a_recorded_request_is_selected_by_flag(flag, name, server, capsys):
    """The newest, the slowest and the last failed request need no id."""
    assert told_by(capsys, "--server", server, flag).startswith(f"request {name}: ")


def test_a_websocket_has_not_failed(server, decisions, capsys):
    """Its status is 101, and `--failed` shows the request that did."""
    record = decisions.find("id/1")
    record.status, record.seconds = "101", 4.0
    assert record.result == "ok"
    assert told_by(capsys, "--server", server, "--failed").startswith("request id/0: ")


@pytest.mark.parametrize("flag", ["--failed", "--slowest"])
def test_a_selected_request_is_shown_where_another_has_its_id(flag, server, decisions, capsys):
    """A refused request and its retry have the same id; the one that the flag selects is shown."""
    decision = decisions.find("id/0").decision
    is_refused = flag == "--failed"
    refusal = decision_log.RejectionRecord(
        "same", 0.6 if is_refused else 0.8, "", "x", model_not_found("x", ["sql"])
    )
    decisions.add_rejection(refusal)
    retry = decisions.add("same", decision, 0.7)
    retry.status, retry.seconds = "200", 9.0
    status = 3 if is_refused else 0
    output = told_by(capsys, "--server", server, flag, status=status)
    assert output.startswith("request same: ")
    assert ("cause: unknown-model" in output) == is_refused


def test_each_request_of_an_id_is_explained(server, decisions, capsys):
    """An id that is sent again hides no earlier decision; sequence numbers tell them apart."""
    decision = decisions.find("id/0").decision
    for status, at in (("404", 0.6), ("200", 0.7)):
        record = decisions.add("dup", decision, at)
        record.status, record.seconds = status, 1.0
    flags = ["--server", server]
    assert "status 404" in told_by(capsys, *flags, "--failed").splitlines()[0]
    lines = told_by(capsys, *flags, "--id", "dup").splitlines()
    assert "status 200" in lines[0]
    assert lines[1] == "2 requests have this id, and this is --sequence 4; others: 3"
    assert "status 404" in told_by(capsys, *flags, "--sequence", "3").splitlines()[0]
    assert main.main(["explain", *flags, "--sequence", "9"]) == 1
    error = capsys.readouterr().err
    assert "lately as number 9" in error
    assert "no decision of that sequence number among the last 4" in error
    for wrong in ("-1", "x", "9" * 19):
        assert main.main(["explain", *flags, f"--sequence={wrong}"]) == 2
        assert f"expected a number such as 17, got '{wrong}'" in capsys.readouterr().err
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        urllib.request.urlopen(f"http://{server}/debug/decision?sequence=-1", timeout=300)
    with caught.value as answer:
        assert "expected a number as ?sequence=" in answer.read().decode()


def test_any_recorded_id_is_found(server, decisions, capsys):
    """Braces too, which patterns of paths in aiohttp exclude by default."""
    decisions.add("{id}", decisions.find("id/0").decision, 0.7)
    assert told_by(capsys, "--server", server, "--id", "{id}").startswith("request {id}: ")


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [("\udcff", 1, "no decision of that request id"), ("x" * 20_000, 2, "got 20000 characters")],
)
def test_an_odd_id_is_no_fault_of_the_server(name, status, text, server, capsys):
    """Bytes that are no UTF-8, and more of them than an address has."""
    assert main.main(["explain", "--server", server, "--id", name]) == status
    assert text in capsys.readouterr().err


def test_another_token_is_named_as_the_cause(tmp_path, capsys):
    """It does not help to name a token file where the command has one."""
    (tmp_path / "token").write_text("s3cret")
    words = ["--last", "--token-file", str(tmp_path / "token")]
    with answering(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n") as server:
        assert main.main(["explain", "--server", server, *words]) == 1
    assert "the token of --token-file is another one" in capsys.readouterr().err


def test_the_token_file_may_be_a_pipe(server, tokens, capsys):
    """It is read once, though --last takes two requests, which both need the token."""
    tokens.append("s3cret")
    reader, writer = os.pipe()
    os.write(writer, b"s3cret\n")
    os.close(writer)
    output = told_by(capsys, "--server", server, "--last", "--token-file", f"/dev/fd/{reader}")
    os.close(reader)
    assert output.startswith("request id/1: ")


@pytest.mark.parametrize("words", [["--last"], ["{body}"]])
def test_a_watch_sends_the_token_that_the_file_has_now(
    words, server, tokens, files, tmp_path, capsys, monkeypatch
):
    """Its server reads the token again as well, when a Secret changes."""
    path = tmp_path / "token"
    codes = []

    def watch(show, **_):
        for token in ("old", "new"):
            path.write_text(token)
            tokens.append(token)
            codes.append(show())
        return 0

    path.write_text("older")
    monkeypatch.setattr(explain, "watch", watch)
    words = [word.format(**files) for word in words]
    told_by(capsys, *words, "--server", server, "--token-file", str(path), "--watch")
    assert codes == [0, 0]


def test_an_unknown_result_is_refused(server):
    """A result that no request has selects nothing."""
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        urllib.request.urlopen(f"http://{server}/debug/decisions/a?result=x", timeout=300)
    caught.value.close()
