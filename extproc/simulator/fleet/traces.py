"""Recorded requests with times: the formats the field publishes."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Final, Literal

import msgspec

from extproc.errors import ConfigError
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, Streams

Format = Literal["mooncake", "azure", "burstgpt"]

#: Tokens of a Mooncake block.
_MOONCAKE_TOKENS = 512
_PER_BLOCK = _MOONCAKE_TOKENS // KEY_TOKENS

#: Largest id of a block; the keys of its tokens have 63 bits then.
_MAX_ID: Final = 2**63 // _PER_BLOCK - 2

_AZURE_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens"

#: Columns that are read, in this order; the files have more, not all of them the same.
_BURSTGPT_COLUMNS: Final = ("Timestamp", "Request tokens", "Response tokens")


class _Row(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_ID)]]


def read(
    format_: Format, rows: Iterable[str], *, where: str, spread_s: float = 0.0
) -> Iterator[tuple[float, RequestSpec]]:
    """Requests with their times in seconds, in the order of the file.

    Args:
        spread_s: Rows of one time stamp are spread evenly over so many seconds.

    Raises:
        ConfigError: A line is not what the format says.
    """
    requests = _READERS[format_](rows, where)
    return _spread(requests, spread_s) if spread_s else requests


def _spread(
    requests: Iterator[tuple[float, RequestSpec]], spread_s: float
) -> Iterator[tuple[float, RequestSpec]]:
    together: list[RequestSpec] = []
    stamp = 0.0
    for at, work in requests:
        if together and at != stamp:
            yield from _apart(stamp, together, spread_s)
            together = []
        stamp = at
        together.append(work)
    yield from _apart(stamp, together, spread_s)


def _apart(
    at: float, works: list[RequestSpec], spread_s: float
) -> Iterator[tuple[float, RequestSpec]]:
    for place, work in enumerate(works):
        yield at + spread_s * place / len(works), work


def _mooncake(rows: Iterable[str], where: str) -> Iterator[tuple[float, RequestSpec]]:
    decoder = msgspec.json.Decoder(_Row)
    for number, line in enumerate(rows, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _unreadable(
                where, number, "timestamp, input_length, output_length and hash_ids", str(error)
            ) from None
        ids, tokens = row.hash_ids, max(1, row.input_length)
        blocks = min(tokens // KEY_TOKENS, len(ids) * _PER_BLOCK)
        keys = [ids[k // _PER_BLOCK] * _PER_BLOCK + k % _PER_BLOCK + 1 for k in range(blocks)]
        # Every row begins with the same block: a system prompt. What follows is the user's.
        opening = str(ids[1] if len(ids) > 1 else ids[0] if ids else number)
        yield (
            row.timestamp / 1000,
            RequestSpec(tokens, max(1, row.output_length), keys, opening=f"block {opening}"),
        )


def _azure(rows: Iterable[str], where: str) -> Iterator[tuple[float, RequestSpec]]:
    streams = Streams()
    begin: dt.datetime | None = None
    for number, line in enumerate(rows, 1):
        text = line.strip()
        if not text or text == _AZURE_HEAD:
            continue
        try:
            stamp, prompt, output = text.split(",")
            # Seven digits of a second; datetime takes six. Some have a zone, which is always UTC.
            at = dt.datetime.fromisoformat(stamp[:26]).replace(tzinfo=None)
            tokens, answer = max(1, _length(prompt)), max(1, _length(output))
        except ValueError as error:
            raise _unreadable(where, number, _AZURE_HEAD, str(error)) from None
        begin = at if begin is None else begin
        work = RequestSpec(tokens, answer, streams.keys(number, tokens), opening=f"row {number}")
        yield (at - begin).total_seconds(), work


def _burstgpt(rows: Iterable[str], where: str) -> Iterator[tuple[float, RequestSpec]]:
    streams = Streams()
    places: list[int] = []
    for number, line in enumerate(rows, 1):
        cells = line.strip().split(",")
        if cells == [""]:
            continue
        try:
            if not places:
                places = [cells.index(name) for name in _BURSTGPT_COLUMNS]
                continue
            stamp, prompt, output = (cells[place] for place in places)
            at, tokens, answer = _seconds(stamp), max(1, _length(prompt)), _length(output)
        except (ValueError, IndexError) as error:
            raise _unreadable(where, number, ", ".join(_BURSTGPT_COLUMNS), str(error)) from None
        if answer:  # 0: the request failed
            keys = streams.keys(number, tokens)
            yield at, RequestSpec(tokens, answer, keys, opening=f"row {number}")


_READERS: Final[
    Mapping[Format, Callable[[Iterable[str], str], Iterator[tuple[float, RequestSpec]]]]
] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "burstgpt": _burstgpt,
}


def _seconds(text: str) -> float:
    """A time; raises `ValueError` for text that is none."""
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError(f"time {text}")
    return seconds


def _length(text: str) -> int:
    """A number of tokens; raises `ValueError` for text that is none."""
    length = int(text)
    if length < 0:
        raise ValueError(f"{length} tokens")
    return length


def _unreadable(where: str, number: int, wanted: str, got: str) -> ConfigError:
    return ConfigError(
        f"{where}: line {number}", wanted=wanted, got=got, fix="check the trace's format"
    )
