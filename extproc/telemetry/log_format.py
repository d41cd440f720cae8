"""Log format: lines of text or JSON, in which an event is a message with named fields."""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

#: Value of a field as it stands in a log line; None leaves the field out.
FieldValue = str | int | float | None

_encode = msgspec.json.Encoder().encode

#: Text that needs no quotes; all other text could look like a further field or another line.
_BARE: Final = re.compile(r"[A-Za-z0-9_.:/@%+~\[\]-]+")


class TextFormatter(logging.Formatter):
    """Formats a record as text: time, level, logger, message, then fields as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of logging.Formatter
        """Formats all but an exception."""
        words = [super().formatMessage(record)]
        words += [f"{name}={_to_text(value)}" for name, value in _fields(record).items()]
        return " ".join(words)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record, exceptions included."""
        at = dt.datetime.fromtimestamp(record.created, dt.UTC)
        values: dict[str, FieldValue] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
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
        # `logger.log` would walk the stack for the line of code, which no format shows.
        logger.handle(
            logger.makeRecord(logger.name, level, "", 0, event, (), None, extra={"fields": known})
        )


def _fields(record: logging.LogRecord) -> Mapping[str, FieldValue]:
    """Returns the fields of a record; those of libraries have none."""
    return getattr(record, "fields", {})


def _to_text(value: FieldValue) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
