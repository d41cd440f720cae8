"""Log lines as text and as JSON, with what clients write in them."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import json
import logging
import sys
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.supervision import ExceptionLog
from extproc.telemetry import log_format

_log = logging.getLogger("extproc.pool")


class LinesFixture(logging.Handler):
    """The lines that a formatter makes of what is logged."""

    def __init__(self, name):
        super().__init__()
        self.setFormatter(log_format.build_formatter(name))
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.fixture
def lines(request):
    handler = LinesFixture(request.param)
    _log.addHandler(handler)
    yield handler.lines
    _log.removeHandler(handler)


@pytest.mark.parametrize("lines", ["text"], indirect=True)
def test_text_has_fields_after_the_message(lines):
    """Values are bare where nothing in them could be misread; None is left out."""
    log_format.log_event(
        _log,
        logging.WARNING,
        "endpoint ejected",
        pool="",
        cause="two words",
        after_s=1.23456,
        pod=None,
    )
    assert lines[0].endswith(
        ' WARNING extproc.pool endpoint ejected pool="" cause="two words" after_s=1.235'
    )


@pytest.mark.parametrize("lines", ["text"], indirect=True)
@pytest.mark.parametrize("text", ["a\nERROR b", "x=1 y=2", 'say "hi"', "\ud800", "\x1b[2J", "ü"])
def test_text_quotes_what_could_be_another_field_or_line(lines, text):
    """An id of a client neither begins a line nor adds a field."""
    log_format.log_event(_log, logging.INFO, "request", id=text, model="m")
    assert lines[0].endswith(f" id={json.dumps(text)} model=m")
    assert len(lines[0].splitlines()) == 1
    assert lines[0].isprintable()


@pytest.mark.parametrize("text", ["a\n2026-11-23 ERROR b", "a\r\x85\u2028b", "\x1b[2J", "\ud800"])
def test_text_escapes_what_could_be_another_line_in_a_message(text):
    """An annotation of a tenant begins no line and steers no terminal."""
    message = f"pool ü/p matches nothing: {text}"
    record = log_format.EventRecord("extproc.server", logging.WARNING, message, {})
    line = log_format.build_formatter("text").format(record)
    assert line.endswith(f" pool ü/p matches nothing: {ascii(text)[1:-1]}")
    assert line.isprintable()


def test_the_stack_of_a_bug_is_beside_its_message(caplog):
    """It has lines of its own in text, and a field in JSON."""
    try:
        {}["x"]
    except KeyError as error:
        ExceptionLog(Counter(), lambda: 0.0).record(error)
    (record,) = caplog.records
    first, *stack = log_format.build_formatter("text").format(record).splitlines()
    shown = json.loads(log_format.build_formatter("json").format(record))
    assert first.endswith(" ERROR extproc.server a request ran into a bug: KeyError")
    assert shown["message"] == "a request ran into a bug: KeyError"
    assert shown["stack"].splitlines() == stack
    assert "test_log_format.py" in stack[0]


@pytest.mark.parametrize("pick", ["a; cost=1", "ü", 'a "b" \\c', "a\x7fb", "\x1b[2J", "\ud800"])
def test_the_reason_of_a_pick_is_quoted_in_ascii(pick):
    """A profile may have any name."""
    line = log_format.RequestLine("id", total_s=1.0, pick=pick)
    text = log_format.TextFormatter().format_requests([(0.0, line)])[0].removesuffix("\n")
    assert text.endswith(f" pick={json.dumps(pick)}")
    assert text.isprintable()


@pytest.mark.parametrize("lines", ["json"], indirect=True)
def test_json_is_an_object_for_each_line(lines):
    """Fields stand beside time, level, logger and message."""
    log_format.log_event(_log, logging.INFO, "request", id="a\nb", status=200, total_s=0.12345)
    _log.warning("plain %s", "text")
    log_format.log_event(_log, logging.INFO, "request", id="\ud800")
    first, second, third = map(json.loads, lines)
    assert third["id"] == "\ud800"
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "extproc.pool",
        "message": "request",
        "id": "a\nb",
        "status": 200,
        "total_s": 0.123,
    }
    assert second["message"] == "plain text"


@pytest.mark.parametrize("lines", ["json"], indirect=True)
def test_json_has_the_stack_of_an_exception(lines):
    """It stays in its line."""
    try:
        {}["x"]
    except KeyError:
        _log.error("failed", exc_info=sys.exc_info())
    assert "KeyError" in json.loads(lines[0])["exception"]


def test_fields_are_not_built_below_the_level(caplog):
    """An event below the log level produces no record."""
    caplog.set_level(logging.ERROR, "extproc.pool")
    log_format.log_event(_log, logging.INFO, "request", id="x")
    assert not caplog.records


class Written(io.StringIO):
    """A stream that counts its writes."""

    writes = 0

    def write(self, text):
        self.writes += 1
        return super().write(text)


async def turn():
    """Let timers without a delay run."""
    for _ in range(2):
        await asyncio.sleep(0)


def test_lines_of_requests_are_written_together():
    """Before whatever else is logged, and at once where no event loop runs."""
    stream = Written()
    handler = log_format.LogHandler(stream, delay_s=0.0)
    handler.setFormatter(logging.Formatter("%(message)s"))

    def handle(logger, message):
        handler.handle(log_format.EventRecord(logger, logging.INFO, message, {}))

    async def scene():
        for number in range(3):
            handle(log_format.REQUESTS, f"request {number}")
        assert stream.writes == 0
        await turn()
        assert (stream.getvalue(), stream.writes) == ("request 0\nrequest 1\nrequest 2\n", 1)
        handle(log_format.REQUESTS, "request 3")
        handle("extproc.pool", "endpoint ejected")
        assert stream.getvalue().endswith("request 3\nendpoint ejected\n")
        handle(log_format.REQUESTS, "request 4")

    asyncio.run(scene())
    handle(log_format.REQUESTS, "request 5")
    assert stream.getvalue().endswith("request 4\nrequest 5\n")


@pytest.mark.parametrize("name", ["text", "json"])
@given(
    facts=st.fixed_dictionaries(
        {
            "id": st.text(),
            "endpoint": st.just("10.0.0.1:8000"),
            "pick": st.text().map("a; {}".format),
        },
        optional={
            **dict.fromkeys(("pool", "model"), st.text()),
            **dict.fromkeys(("status", "prompt_tokens", "output_tokens"), st.integers(0, 2**40)),
            **dict.fromkeys(
                ("queue_s", "response_headers_s", "first_token_s"), st.floats(0.0, 1e6)
            ),
        },
    ),
    at=st.floats(0.0, 4e9),
)
@settings(max_examples=50)
def test_a_line_of_a_request_is_that_of_an_event(name, facts, at):
    """The formatter of request lines writes what that of all events writes."""
    known = {"estimated_prompt_tokens": 5, "total_s": 0.1 + 0.2}
    line = log_format.RequestLine(**known, predicted_cached_tokens=0, **facts)
    record = log_format.EventRecord(
        log_format.REQUESTS, logging.INFO, log_format.REQUEST, line.to_fields()
    )
    record.created, record.msecs = at, at % 1.0 * 1000.0
    formatter = log_format.build_formatter(name)
    assert formatter.format_requests([(at, line)]) == [formatter.format(record) + "\n"]


def test_requests_are_logged_by_any_handler(caplog):
    """One of ours gets a line, any other one an event."""
    stream = Written()
    handler = log_format.LogHandler(stream, delay_s=0.0)
    handler.setFormatter(log_format.build_formatter("json"))
    logger = logging.getLogger(log_format.REQUESTS)
    line = log_format.RequestLine(
        id="a", pool=None, model="m", endpoint="10.0.0.1:8000", total_s=0.25, pick="p"
    )

    logger.addHandler(handler)
    try:
        log_format.log_requests([(1.0, line)] * 2)
    finally:
        logger.removeHandler(handler)
    fields = {"id": "a", "model": "m", "endpoint": "10.0.0.1:8000", "total_s": 0.25, "pick": "p"}
    written = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert (stream.writes, len(written)) == (1, 2)
    for shown in written:
        del shown["time"]
        head = {"level": "info", "logger": "extproc.requests", "message": "request"}
        assert shown == {**head, **fields}
    assert [record.fields for record in caplog.records] == [fields] * 2


class SlowFormatter(log_format.TextFormatter):
    """Formats requests while another thread logs."""

    def format_requests(self, lines):
        record = log_format.EventRecord("extproc.traces", logging.WARNING, "span export failed", {})
        thread = threading.Thread(target=self.handler.handle, args=(record,))
        thread.start()
        thread.join()
        return super().format_requests(lines)


def test_lines_of_requests_are_kept_when_another_thread_logs_meanwhile():
    """The thread writes what waits, and the lines come after it."""
    stream, formatter = Written(), SlowFormatter()
    formatter.handler = handler = log_format.LogHandler(stream)
    handler.setFormatter(formatter)
    line = log_format.RequestLine(id="a", total_s=0.25, pick="p")
    handler.add_requests([(1.0, line)] * 2)
    written = stream.getvalue().splitlines()
    assert [" id=a " in text for text in written] == [False, True, True]


class BrokenStream(io.StringIO):
    """A stream whose reader left."""

    def write(self, text):
        raise BrokenPipeError(text)


def test_a_stream_that_fails_does_not_fail_requests(monkeypatch):
    """Their lines are lost, as those of other handlers."""
    handler = log_format.LogHandler(BrokenStream())
    handler.setFormatter(log_format.build_formatter("text"))
    reported = []
    monkeypatch.setattr(handler, "handleError", reported.append)
    handler.add_requests([(1.0, log_format.RequestLine(id="a", total_s=0.1))])
    assert [record.name for record in reported] == [log_format.REQUESTS]


def test_a_line_that_waits_for_a_stream_that_fails_fails_no_other_call():
    """It is lost, and a call that logs something else goes on."""
    handler, reported = log_format.LogHandler(BrokenStream()), []
    handler.setFormatter(log_format.build_formatter("text"))
    handler.handleError = reported.append

    async def scene():
        for name in (log_format.REQUESTS, "extproc.pool"):
            handler.handle(log_format.EventRecord(name, logging.INFO, "event", {}))

    asyncio.run(scene())
    assert [record.name for record in reported] == [log_format.REQUESTS, "extproc.pool"]


@pytest.mark.parametrize("name", ["text", "json"])
def test_times_are_those_of_other_records(name):
    """Local time in text and UTC in JSON, both with milliseconds."""
    record = log_format.EventRecord("extproc.pool", logging.INFO, "event", {})
    line = log_format.build_formatter(name).format(record)
    if name == "text":
        plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
        assert line == plain.format(record)
    else:
        at = dt.datetime.fromisoformat(json.loads(line)["time"])
        assert abs(at.timestamp() - record.created) < 0.002
