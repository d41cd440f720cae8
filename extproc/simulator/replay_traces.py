"""Published traces and datasets as traffic: Mooncake, Azure, BurstGPT, ShareGPT, `vllm bench`.

They have no fleet and some have no times, so flags of `extproc replay` name both.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import mmh3
import msgspec

from extproc.errors import ConfigError, file_error
from extproc.recording import parquet
from extproc.recording.reader import read_lines
from extproc.request import BYTES_PER_TOKEN
from extproc.simulator.fleet import traces
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, SimSession
from extproc.simulator.traffic import Traffic, TrafficRequest, require_short_gaps

Format = Literal["recording", "sharegpt", "vllm-bench"] | traces.Format

#: Characters of ShareGPT that are read at a time, and longest conversation (characters).
_PIECE: Final = 1 << 20
_MAX_OBJECT: Final = 1 << 24

#: Names that an error lists at most (count), and characters of each.
_SHOWN: Final = 20

#: What may stand between the objects of a list.
_GAP: Final = re.compile(r"[\s,\[\]]*")

#: Bytes of the beginning of a file that show its format.
_HEAD_BYTES: Final = 4096

#: Tokens of an answer that a dataset does not have, as `vllm bench serve` sets them for its own.
_DEFAULT_OUTPUT: Final = 256

_KEY_BYTES: Final = KEY_TOKENS * BYTES_PER_TOKEN


#: Character of the token 0 and largest token: each is a character of as many bytes as a token counts.
_FIRST_CHARACTER: Final = 0x10000
_MAX_TOKEN: Final = 0x10FFFF - _FIRST_CHARACTER

#: Names by which published datasets call who asks, who answers, and who does neither.
_ASKERS: Final = frozenset({"human", "user", "prompter"})
_ANSWERERS: Final = frozenset(
    {"gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "chatbot", "ai"}
)
_OTHERS: Final = frozenset({"system", "developer", "tool", "function"})


class _Part(msgspec.Struct, frozen=True):
    """A part of a message; images have no text."""

    text: str = ""


class _Message(msgspec.Struct, frozen=True):
    """A message of ShareGPT, or of its likes that name its fields as OpenAI does."""

    value: str | None = None
    speaker: str = msgspec.field(name="from", default="")
    content: str | Sequence[_Part] | None = None
    role: str = ""

    @property
    def name(self) -> str:
        """Name of the speaker, in lower case; empty for none."""
        return (self.speaker or self.role).lower()

    @property
    def text(self) -> str:
        """All text of the message."""
        content = self.value or self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


_OutputTokens = Annotated[int, msgspec.Meta(ge=0)]


class _Conversation(msgspec.Struct, frozen=True):
    """A conversation of ShareGPT, or one with the messages of a request to OpenAI's API."""

    conversations: Sequence[_Message] = ()
    messages: Sequence[_Message] = ()
    output_tokens: _OutputTokens | None = None


class _Prompt(msgspec.Struct, frozen=True):
    """A line of a custom dataset of `vllm bench`; a list has tokens, texts or messages."""

    prompt: str | list[Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKEN)] | str | _Message]
    output_tokens: _OutputTokens | None = None


def find_format(path: Path) -> Format:
    """Format of a file, from its beginning.

    Raises:
        ConfigError: It cannot be read, is a pipe, or is none of the formats.
    """
    head = next(iter(_head_lines(path)), b"")
    if head.startswith(parquet.MAGIC):
        return "recording"
    if head.startswith(b"TIMESTAMP,"):
        return "azure"
    if head.startswith(b"Timestamp,"):
        return "burstgpt"
    if head.startswith(b"["):
        return "sharegpt"
    bare = head.replace(b" ", b"")
    for mark, name in _MARKS:
        if head.startswith(b"{") and mark in bare:
            return name
    raise ConfigError(
        f"{path}: line 1",
        wanted="a recording, a trace of Mooncake (JSON lines with hash_ids), Azure or BurstGPT (CSV "
        "with its first line), a ShareGPT file (JSON with conversations or messages) or a custom "
        "dataset of vllm bench (JSON lines with prompt)",
        got=repr(head[:60].decode(errors="replace")) if head else "nothing",
        fix="name a file in one of these formats",
    )


def has_times(format_: Format) -> bool:
    """True for formats whose requests have times."""
    return format_ not in ("sharegpt", "vllm-bench")


#: What the first line of JSON lines has, by format.
_MARKS: Final[Sequence[tuple[bytes, Format]]] = (
    (b'"kind":"recording"', "recording"),
    (b'"hash_ids"', "mooncake"),
    (b'"conversations"', "sharegpt"),
    (b'"messages"', "sharegpt"),
    (b'"prompt"', "vllm-bench"),
)


def _head_lines(path: Path) -> Iterator[bytes]:
    """Lines at the beginning that are not blank; a long one only as far as it is needed."""
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(
                path,
                wanted="a regular file, as it is read more than once",
                got="a pipe or device",
                fix="write the rows to a file first",
            )
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES).lstrip()
    except OSError as error:
        raise file_error(path, error) from None
    yield from (line for line in head.splitlines() if line.strip())


def read(path: Path, format_: Format, *, rate_per_s: float | None, max_requests: int) -> Traffic:
    """Requests of a trace or a dataset.

    Args:
        format_: Its format, other than `recording`.
        rate_per_s: Sessions that begin per second, as a Poisson process, for formats without times.

    Raises:
        ConfigError: A line is not what its format says, or the rate is missing.
    """
    if format_ == "mooncake" or format_ == "azure" or format_ == "burstgpt":  # noqa: PLR1714
        if rate_per_s is not None:
            raise ConfigError(
                "--rate",
                wanted=f"no rate: requests of {path} have their times",
                got=f"{rate_per_s:g}",
                fix="remove it; --rate-scale 2 is twice their rate",
            )
        lines = (line.decode("utf-8", "replace") for line in read_lines(path))
        timed = traces.read(format_, lines, where=str(path))
        return _from_timed(itertools.islice(timed, max_requests), where=str(path))
    if rate_per_s is None:
        raise ConfigError(
            "--rate",
            wanted=f"sessions per second, as {path} has no times",
            got="none",
            fix="write --rate 2",
        )
    conversations = _sharegpt(path) if format_ == "sharegpt" else _prompts(path)
    return _from_conversations(
        conversations, rate_per_s=rate_per_s, max_requests=max_requests, where=str(path)
    )


def _from_timed(timed: Iterable[tuple[float, RequestSpec]], *, where: str) -> Traffic:
    """Traffic of requests with times, each a session of its own."""
    requests = [TrafficRequest(at, spec) for at, spec in timed]
    requests.sort(key=lambda request: request.at)
    _require(requests, where)
    require_short_gaps([request.at for request in requests], where)
    begin = requests[0].at
    for n, request in enumerate(requests):
        requests[n] = TrafficRequest(request.at - begin, request.spec)
    sessions = [SimSession((request.spec,), at=request.at) for request in requests]
    return Traffic(requests, sessions, list(range(len(requests))))


def _from_conversations(
    conversations: Iterable[Sequence[tuple[str, int]]],
    *,
    rate_per_s: float,
    max_requests: int,
    where: str,
) -> Traffic:
    """Traffic of conversations that begin at random; a turn follows the answer before it at once."""
    rng, at, num_requests = random.Random(1), 0.0, 0
    requests: list[TrafficRequest] = []
    sessions: list[SimSession] = []
    for number, turns in enumerate(conversations):
        specs = [
            _spec_of(text, output, session=str(number))
            for text, output in turns[: max_requests - num_requests]
        ]
        if not specs:
            break
        num_requests += len(specs)
        sessions.append(SimSession(specs, [0.0] * (len(specs) - 1), at))
        requests += [TrafficRequest(at, spec) for spec in specs]
        at += rng.expovariate(rate_per_s)
        if num_requests >= max_requests:
            break
    _require(requests, where)
    return Traffic(requests, sessions, list(range(len(requests))))


def _require(requests: Sequence[TrafficRequest], where: str) -> None:
    if not requests:
        raise ConfigError(where, wanted="requests", got="none", fix="name another file")


def _spec_of(text: str, output_tokens: int, *, session: str) -> RequestSpec:
    """A request with this prompt, and the answer behind it where the text goes on.

    Tokens are estimated as four bytes each.
    """
    data = text.encode("utf-8", "surrogatepass")
    tokens = max(1, len(data) // BYTES_PER_TOKEN)
    hasher = mmh3.mmh3_x64_128()
    keys: list[int] = []
    for begin in range(0, len(data) - _KEY_BYTES + 1, _KEY_BYTES):
        hasher.update(data[begin : begin + _KEY_BYTES])
        keys.append(hasher.uintdigest() & ((1 << 60) - 1))
    return RequestSpec(tokens, max(1, output_tokens), keys, session=session, opening=text[:100])


def _prompts(path: Path) -> Iterator[Sequence[tuple[str, int]]]:
    """Prompts of a custom dataset of `vllm bench`, each by itself."""
    decoder = msgspec.json.Decoder(_Prompt)
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: line {number}",
                wanted="a JSON object with prompt, and output_tokens from 0 if known",
                got=str(error),
                fix="check the line; it is the custom dataset of vllm bench serve",
            ) from None
        output_tokens = _DEFAULT_OUTPUT if row.output_tokens is None else row.output_tokens
        for text in [row.prompt] if isinstance(row.prompt, str) else _texts(row.prompt):
            yield [(text, output_tokens)]


def _texts(prompt: Iterable[int | str | _Message]) -> Iterator[str]:
    """Prompts of a list: each text is one, and all tokens or all messages together are one."""
    joined = ""
    for item in prompt:
        if isinstance(item, str):
            yield item
        else:
            joined += chr(_FIRST_CHARACTER + item) if isinstance(item, int) else item.text
    if joined:
        yield joined


def _sharegpt(path: Path) -> Iterator[Sequence[tuple[str, int]]]:
    """Turns of every conversation."""
    names: dict[str, None] = {}
    fields: dict[str, None] = {}
    is_empty = True
    for number, value in enumerate(_objects(path), 1):
        try:
            row = msgspec.convert(value, _Conversation)
        except msgspec.ValidationError as error:
            raise _bad_sharegpt(path, number, str(error)) from None
        messages = row.conversations or row.messages
        # A request may end with its question, of which the answer is not known.
        output_tokens = _DEFAULT_OUTPUT if row.output_tokens is None else row.output_tokens
        missing = None if row.conversations else output_tokens
        if turns := _turns(messages, missing_output_tokens=missing):
            is_empty = False
            yield turns
        elif is_empty:
            fields.update(dict.fromkeys(value if isinstance(value, dict) else ()))
            names.update(dict.fromkeys(message.name or "without a name" for message in messages))
    if is_empty:
        raise ConfigError(
            path,
            wanted="conversations or messages in which one of "
            f"{', '.join(sorted(_ANSWERERS))} answers a question, or two speakers take turns",
            got=f"only speakers {_first(names)}"
            if names
            else f"no message, but fields {_first(fields)}"
            if fields
            else "nothing",
            fix="rename the speakers or fields, or name another file",
        )


def _first(words: Iterable[str]) -> str:
    """The first of some words, as short text."""
    return ", ".join(word[:_SHOWN] for word in itertools.islice(words, _SHOWN))


def _turns(
    messages: Sequence[_Message], *, missing_output_tokens: int | None
) -> list[tuple[str, int]]:
    """Turns of a conversation: the text until the question, and the tokens of the answer.

    Args:
        missing_output_tokens: Of an answer that is missing at the end; None leaves the question out.
    """
    turns: list[tuple[str, int]] = []
    text = ""
    is_answer = False
    for message, is_answer in zip(messages, _find_answers(messages), strict=True):
        words = message.text
        if is_answer and text:
            answer = len(words.encode("utf-8", "surrogatepass"))
            turns.append((text, answer // BYTES_PER_TOKEN))
        text += words
    if text and not is_answer and missing_output_tokens is not None:
        turns.append((text, missing_output_tokens))
    return turns


def _find_answers(messages: Sequence[_Message]) -> Sequence[bool]:
    """True for each message that is an answer: by the name of its speaker, or else by turn."""
    names = [message.name for message in messages]
    if not _ANSWERERS.isdisjoint(names):
        return [name in _ANSWERERS for name in names]
    speakers = [name for name in dict.fromkeys(names) if name not in _OTHERS]
    if speakers == [""]:
        return [place % 2 == 1 for place in range(len(names))]
    if len(speakers) != 2:
        return [False] * len(names)
    first, second = speakers
    answerer = first if second in _ASKERS else second
    return [name == answerer for name in names]


def _objects(path: Path) -> Iterator[object]:
    """Objects of a JSON list or of JSON lines, of which one after the other is in memory."""
    decoder = json.JSONDecoder()
    number, text, at, is_ended = 1, "", 0, False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while True:
                gap = _GAP.match(text, at)
                at = gap.end() if gap else at
                try:
                    value, at = decoder.raw_decode(text, at)
                except (json.JSONDecodeError, RecursionError) as error:
                    rest = text[at:]
                    if is_ended and not rest:
                        return
                    if is_ended or len(rest) > _MAX_OBJECT or isinstance(error, RecursionError):
                        raise _bad_sharegpt(path, number, str(error)) from None
                    piece = file.read(_PIECE)
                    text, at, is_ended = rest + piece, 0, not piece
                    continue
                yield value
                number += 1
    except OSError as error:
        raise file_error(path, error) from None


def _bad_sharegpt(path: Path, number: int, got: str) -> ConfigError:
    return ConfigError(
        f"{path}: conversation {number}",
        wanted='objects with conversations: [{"from": "human", "value": "..."}, ...], or with '
        'messages: [{"role": "user", "content": "..."}, ...]',
        got=got,
        fix="check the file; ShareGPT_V3 has this format",
    )
