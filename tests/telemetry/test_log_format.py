"""Log lines as text and as JSON, with what clients write in them."""

from __future__ import annotations

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
