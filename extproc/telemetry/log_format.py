"""Log format: lines of text or JSON, in which an event is a message with named fields."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Final, Literal, TextIO

import msgspec

#: Value of a field as it stands in a log line; None leaves the field out.
FieldValue = str | int | float | None

#: Logger of the lines of requests.
REQUESTS: Final = "extproc.requests"

_encode = msgspec.json.Encoder().encode

#: Text that needs no quotes; all other text could look like a further field or another line.
_BARE: Final = re.compile(r"[A-Za-z0-9_.:/@%+~\[\]-]+")


#: Attributes of other records that an event does not have.
_NO_PLACE: Final[Mapping[str, Any]] = {
    "args": (),
    **dict.fromkeys(("pathname", "filename", "module", "funcName"), ""),
    **dict.fromkeys(("exc_info", "exc_text", "stack_info"), None),
    **dict.fromkeys(("thread", "threadName", "process", "processName", "taskName"), None),
    **dict.fromkeys(("lineno", "relativeCreated"), 0),
}


class EventRecord(logging.LogRecord):
    """Record of an event.

    It has no place in the code, no thread and no process: no format shows them, and to find them
    takes longer than all else.

    Args:
        name: Name of the logger.
        fields: Values by name, without None.
    """

    def __init__(self, name: str, level: int, event: str, fields: Mapping[str, FieldValue]) -> None:
        created = time.time()  # noqa: TID251 - as other log records
        self.__dict__ = {
            **_NO_PLACE,
            "name": name,
            "msg": event,
            "levelno": level,
            "levelname": logging.getLevelName(level),
            "created": created,
            "msecs": created % 1.0 * 1000.0,
            "fields": fields,
        }


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records at once, but lines of requests together when the event loop is through a turn."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep its line for the end of the turn."""
        if record.name != REQUESTS or not self._will_flush():
            self.flush()
            super().emit(record)
            return
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - as other handlers
            self.handleError(record)

    def _will_flush(self) -> bool:
        """Flush at the end of the turn; False where no event loop runs."""
        if self._lines:
            return True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        loop.call_soon(self.flush)
        return True

    def flush(self) -> None:
        """Write the lines that wait."""
        self.acquire()
        try:
            lines, self._lines = self._lines, []
            if lines:
                self.stream.write("\n".join(lines) + self.terminator)
            super().flush()
        finally:
            self.release()


class TextFormatter(logging.Formatter):
    """Formats a record as text: time, level, logger, message, then fields as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - of logging.Formatter
        """Formats the local time."""
        del datefmt
        return f"{_format_second(int(record.created))},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of logging.Formatter
        """Formats all but an exception."""
        line = f"{record.asctime} {record.levelname} {record.name} {record.message}"
        fields = _fields(record)
        if not fields:
            return line
        return line + "".join([f" {name}={_to_text(value)}" for name, value in fields.items()])


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record, exceptions included."""
        second = _format_utc_second(int(record.created))
        values: dict[str, FieldValue] = {
            "time": f"{second}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        try:
            return _encode(values).decode()
        except UnicodeEncodeError:  # half of a surrogate pair
            return json.dumps(values)


def build_formatter(log_format: Literal["text", "json"]) -> logging.Formatter:
    """Builds the formatter of `log.format`."""
    return JsonFormatter() if log_format == "json" else TextFormatter()


def log_event(logger: logging.Logger, level: int, event: str, **fields: FieldValue) -> None:
    """Logs an event with fields.

    Args:
        event: Text that is the same for all events of a kind.
        fields: Values by name; of a float three digits are kept. None is left out.
    """
    if logger.isEnabledFor(level):
        known = {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in fields.items()
            if value is not None
        }
        logger.handle(EventRecord(logger.name, level, event, known))


@functools.lru_cache(maxsize=2)
def _format_second(second: int) -> str:
    """Formats a Unix time as local time, cached: many records are of one second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))


@functools.lru_cache(maxsize=2)
def _format_utc_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _fields(record: logging.LogRecord) -> Mapping[str, FieldValue]:
    """Returns the fields of a record; those of libraries have none."""
    return getattr(record, "fields", {})


def _to_text(value: FieldValue) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
