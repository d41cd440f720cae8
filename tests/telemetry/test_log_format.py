"""Log lines as text and as JSON, with what clients write in them."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import json
import logging
import sys

import pytest

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


def test_lines_of_requests_are_written_at_the_end_of_a_turn():
    """Together, before whatever else is logged, and at once where no event loop runs."""
    stream = Written()
    handler = log_format.LogHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))

    def handle(logger, message):
        handler.handle(log_format.EventRecord(logger, logging.INFO, message, {}))

    async def scene():
        for number in range(3):
            handle(log_format.REQUESTS, f"request {number}")
        assert stream.writes == 0
        await asyncio.sleep(0)
        assert (stream.getvalue(), stream.writes) == ("request 0\nrequest 1\nrequest 2\n", 1)
        handle(log_format.REQUESTS, "request 3")
        handle("extproc.pool", "endpoint ejected")
        assert stream.getvalue().endswith("request 3\nendpoint ejected\n")
        handle(log_format.REQUESTS, "request 4")

    asyncio.run(scene())
    handle(log_format.REQUESTS, "request 5")
    assert stream.getvalue().endswith("request 4\nrequest 5\n")


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
