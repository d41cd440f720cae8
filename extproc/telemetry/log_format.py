"""Log format: lines of text or JSON, in which an event is a message with named fields."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TextIO, TypeAlias

import msgspec

#: Value of a field as it stands in a log line; None leaves the field out.
FieldValue = str | int | float | None

#: Logger of the lines of requests.
REQUESTS: Final = "extproc.requests"

_encode = msgspec.json.Encoder().encode

#: Message of the line of a routed request.
REQUEST: Final = "request"

#: Text that needs no quotes; all other text could look like a further field or another line.
_BARE: Final = re.compile(r"[A-Za-z0-9_.:/@%+~\[\]-]+")

#: All other text, in quotes and with escapes: what `json.dumps` writes.
_quote: Final = json.encoder.encode_basestring_ascii

#: Text of a line of a request, and of times that it may have.
_LINE: Final = (
    f"%s,%03d INFO {REQUESTS} {REQUEST} id=%s%s%s%s%s estimated_prompt_tokens=%s"
    ' predicted_cached_tokens=%s%s%s%s total_s=%.3f pick="%s"\n'
)
_QUEUED, _ANSWERED = " queue_s=%.3f", " response_headers_s=%.3f"
_BEGUN: Final = " first_token_s=%.3f"

#: JSON of a line of a request between its time and its fields.
_JSON_HEAD: Final = f'"level":"info","logger":"{REQUESTS}","message":"{REQUEST}",'

#: `log.requests` alone decides what it writes, whatever `log.level` is.
_requests: Final = logging.getLogger(REQUESTS)
_requests.setLevel(logging.INFO)


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

    It names no line of code, no thread and no process: no format shows them, and finding them would
    take most of the time of a line.
    """

    def __init__(
        self,
        name: str,
        level: int,
        event: str,
        fields: Mapping[str, FieldValue],
        *,
        created: float = 0.0,
    ) -> None:
        created = created or time.time()  # noqa: TID251 - as other log records
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


#: Record in notes of errors with lines of requests.
_NO_LINE: Final = EventRecord(REQUESTS, logging.INFO, REQUEST, {})


class RequestLine(msgspec.Struct, omit_defaults=True, gc=False):
    """Fields of the line of a routed request, in their order; None leaves a field out.

    It is a struct, and formatted by code of its own, because there may be one for every request.
    """

    id: str
    pool: str | None = None
    model: str | None = None
    endpoint: str = ""
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    estimated_prompt_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    queue_s: float | None = None
    response_headers_s: float | None = None
    first_token_s: float | None = None
    total_s: float | None = None
    pick: str = ""

    def round_times(self) -> None:
        """Keep three digits of times."""
        if self.queue_s is not None:
            self.queue_s = round(self.queue_s, 3)
        if self.response_headers_s is not None:
            self.response_headers_s = round(self.response_headers_s, 3)
        if self.first_token_s is not None:
            self.first_token_s = round(self.first_token_s, 3)
        if self.total_s is not None:
            self.total_s = round(self.total_s, 3)

    def to_fields(self) -> dict[str, FieldValue]:
        """The fields by name, as `log_event` has them."""
        return _drop_unknown(msgspec.structs.asdict(self))


#: Unix times of the ends of requests, and their lines.
_RequestLines: TypeAlias = Sequence[tuple[float, RequestLine]]


class DelayedCall:
    """A call that an event loop makes in a moment; while it is due, no other one is."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def schedule(self, delay_s: float = 0.0) -> bool:
        """Make the call unless it is due already; False where no event loop runs."""
        if self._loop is None or self._loop.is_closed():
            try:
                self._loop = asyncio.get_running_loop()
            except RuntimeError:
                return False
            self._timer = self._loop.call_later(delay_s, self._run)
        return True

    def cancel(self) -> None:
        """Make no call that is due."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None

    def _run(self) -> None:
        self._loop = self._timer = None
        self._call()


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records at once, but those of requests together, a moment later.

    Args:
        delay_s: Seconds that records of requests wait for others: a write for every request would
            cost more than the line.
    """

    def __init__(self, stream: TextIO, *, delay_s: float = 0.1) -> None:
        super().__init__(stream)
        self._delay_s = delay_s
        self._waiting: list[str] = []
        self._due_flush = DelayedCall(self.flush)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or keep its line for the next write."""
        if record.name != REQUESTS:
            self.flush()
            super().emit(record)
            return
        try:
            self._waiting.append(self.format(record) + self.terminator)
        except Exception:  # noqa: BLE001 - as other handlers
            self.handleError(record)
        else:
            if not self._due_flush.schedule(self._delay_s):
                self.flush()

    def add_requests(self, lines: _RequestLines) -> None:
        """Write lines of routed requests, which waited for each other, at once."""
        formatter = self.formatter
        formatted: list[str] = []
        format_requests = (
            formatter.format_requests if isinstance(formatter, _OURS) else self._format_events
        )
        try:
            formatted += format_requests(lines)
        except Exception:  # noqa: BLE001 - all but the lines that cannot be formatted
            for pair in lines:
                try:
                    formatted += format_requests([pair])
                except Exception:  # noqa: BLE001 - as other handlers
                    self.handleError(_NO_LINE)
        self.acquire()
        try:
            self._waiting += formatted
            self.flush()
        finally:
            self.release()

    def flush(self) -> None:
        """Write the lines that wait; a stream that fails costs them, and raises nothing."""
        self.acquire()
        try:
            waiting, self._waiting = self._waiting, []
            if waiting:
                self.stream.write("".join(waiting))
            super().flush()
        except Exception:  # noqa: BLE001 - as other handlers
            self.handleError(_NO_LINE)
        finally:
            self.release()

    def _format_events(self, lines: _RequestLines) -> list[str]:
        return [self.format(_to_record(at, line)) + self.terminator for at, line in lines]


def _to_record(at: float, line: RequestLine) -> EventRecord:
    return EventRecord(REQUESTS, logging.INFO, REQUEST, line.to_fields(), created=at)


class TextFormatter(logging.Formatter):
    """Formats a record as text: time, level, logger, message, then fields as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802 - of logging.Formatter
        """Formats the local time."""
        del datefmt
        return f"{_format_second(int(record.created))},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of logging.Formatter
        """Formats all but an exception and a stack, in one line."""
        message = _escape_unprintable(record.message)
        line = f"{record.asctime} {record.levelname} {record.name} {message}"
        fields = _fields(record)
        return line + _to_assignments(fields) if fields else line

    def format_requests(self, lines: _RequestLines) -> list[str]:
        """Formats lines of routed requests, as any event: what needs quotes is found in all at once."""
        ids, picks = [line.id for _, line in lines], [line.pick for _, line in lines]
        if not (all(ids) and _BARE.fullmatch("".join(ids))):
            ids = list(map(_to_text, ids))
        if not _is_unescaped("".join(picks)):
            picks = [_quote(pick)[1:-1] for pick in picks]
        return [
            self._format_request(line, at, request_id, pick)
            for (at, line), request_id, pick in zip(lines, ids, picks, strict=True)
        ]

    def _format_request(self, line: RequestLine, at: float, request_id: str, pick: str) -> str:
        """Formats a line; numbers in one step, which takes half of the time of a step for each."""
        prompt, cached, output = line.prompt_tokens, line.cached_tokens, line.output_tokens
        queue_s, headers_s, token_s = line.queue_s, line.response_headers_s, line.first_token_s
        second = int(at)
        return _LINE % (
            _format_second(second),
            (at - second) * 1000.0,
            request_id,
            _to_labels(line.pool, line.model, line.endpoint, line.status),
            "" if prompt is None else f" prompt_tokens={prompt}",
            "" if cached is None else f" cached_tokens={cached}",
            "" if output is None else f" output_tokens={output}",
            line.estimated_prompt_tokens,
            line.predicted_cached_tokens,
            "" if queue_s is None else _QUEUED % queue_s,
            "" if headers_s is None else _ANSWERED % headers_s,
            "" if token_s is None else _BEGUN % token_s,
            line.total_s,
            pick,
        )


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and fields beside them."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record, exceptions and stacks included."""
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
        if record.stack_info:
            values["stack"] = record.stack_info
        try:
            return _encode(values).decode()
        except UnicodeEncodeError:  # half of a surrogate pair
            return json.dumps(values)

    def format_requests(self, lines: _RequestLines) -> list[str]:
        """Formats lines of routed requests."""
        return [self._format_request(line, at) + "\n" for at, line in lines]

    def _format_request(self, line: RequestLine, at: float) -> str:
        head = (
            f'{{"time":"{_format_utc_second(int(at))}.{int(at % 1.0 * 1000.0):03d}Z",{_JSON_HEAD}'
        )
        line.round_times()
        try:
            return head + _encode(line).decode()[1:]
        except UnicodeEncodeError:  # half of a surrogate pair
            return head + json.dumps(line.to_fields())[1:]


_OURS: Final = (TextFormatter, JsonFormatter)


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
        logger.handle(EventRecord(logger.name, level, event, _drop_unknown(fields)))


def log_requests(lines: _RequestLines) -> None:
    """Logs routed requests: as lines where the handler is ours, as events anywhere else.

    Args:
        lines: Unix times of their ends, and their lines.
    """
    logger: logging.Logger | None = _requests if _requests.isEnabledFor(logging.INFO) else None
    while logger is not None:
        for handler in logger.handlers:
            if isinstance(handler, LogHandler):
                handler.add_requests(lines)
            elif handler.level <= logging.INFO:
                for at, line in lines:
                    handler.handle(_to_record(at, line))
        logger = logger.parent if logger.propagate else None


def _drop_unknown(fields: Mapping[str, FieldValue]) -> dict[str, FieldValue]:
    """The fields that are known, with three digits of a float."""
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in fields.items()
        if value is not None
    }


@functools.lru_cache(maxsize=2)
def _format_second(second: int) -> str:
    """Formats a Unix time as local time, cached: many records are of one second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))


@functools.lru_cache(maxsize=2)
def _format_utc_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def _escape_unprintable(message: str) -> str:
    """Escape line breaks and control characters, which may come from objects of tenants."""
    if message.isprintable():
        return message
    return "".join([char if char.isprintable() else ascii(char)[1:-1] for char in message])


def _is_unescaped(text: str) -> bool:
    """True if `_quote` changes nothing of a text; by an encoder that takes half of its time."""
    if not text.isascii() or "\x7f" in text:  # which that encoder leaves as they are
        return False
    return len(_encode(text)) == len(text) + 2


def _fields(record: logging.LogRecord) -> Mapping[str, FieldValue]:
    """Returns the fields of a record; those of libraries have none."""
    return getattr(record, "fields", {})


def _to_text(value: FieldValue) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, int):
        return str(value)
    text = str(value)
    return text if _BARE.fullmatch(text) else _quote(text)


def _to_assignments(fields: Mapping[str, FieldValue]) -> str:
    return "".join([f" {name}={_to_text(value)}" for name, value in fields.items()])


@functools.lru_cache(maxsize=4096)
def _to_labels(pool: str | None, model: str | None, endpoint: str, status: int | None) -> str:
    """Fields that many lines of requests have alike, cached."""
    labels = {"pool": pool, "model": model, "endpoint": endpoint, "status": status}
    return _to_assignments(_drop_unknown(labels))
