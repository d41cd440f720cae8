"""Reader: rows of a recording back to decisions, with the candidates that the scheduler saw.

One pass in bounded memory: a decision is yielded when it is read, its end later.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from extproc.endpoint import (
    NO_LOAD,
    AdapterResidency,
    Candidate,
    Endpoint,
    Load,
    StepTimeModel,
)
from extproc.errors import ConfigError, file_error
from extproc.recording import parquet, rows

#: Longest line (bytes): a decision among ten thousand endpoints.
MAX_LINE_BYTES: Final = 4 * 1024 * 1024

#: Beginning of a header. Texts in a row have no quotes that are not escaped, so it is found nowhere else.
_HEADER: Final = b'{"kind":"recording"'

#: Headers without a process whose clocks differ by less are of one, while numbers grow (seconds).
_SAME_CLOCK_S: Final = 1.0

#: Range of a clock, of a wait, of the time of a step, of tokens of one request, and of a count. Clients
#: and engines choose tokens and waits: these are as wide as what a picker accepts.
_CLOCK_S: Final = (0.0, 1e11)
_WAIT_S: Final = (-0.001, 1e11)
_STEP_S: Final = (0.0, 3_600.0)
_TOKENS: Final = (0, 2**31 - 1)
_COUNT: Final = (0, 1e12)

#: Ranges of the numbers that a replay computes with, by row or part of one. They are far wider than what
#: pickers see, so a number beyond is an error of the file; other numbers may have any value.
_RANGES: Final[Mapping[type, Mapping[str, tuple[float, float]]]] = {
    rows.HeaderRow: {"unix_s": _CLOCK_S, "clock_s": _CLOCK_S},
    rows.StateRow: {"scraped_at": _CLOCK_S},
    rows.RecordedLoad: {
        "at": _CLOCK_S,
        **dict.fromkeys(("kv_blocks", "block_tokens", "adapter_slots"), _COUNT),
    },
    StepTimeModel: {
        **dict.fromkeys(
            ("step_s", "prefill_s", "decode_s", "context_s", "adapter_load_s", "reload_s"), _STEP_S
        ),
        **dict.fromkeys(("context_tokens", "output_tokens"), _TOKENS),
        **dict.fromkeys(("evidence", "max_num_seqs"), _COUNT),
    },
    rows.DecisionRow: {
        "at": _CLOCK_S,
        "queued_s": _WAIT_S,
        "prompt_tokens": _TOKENS,
        "matched_tokens": _TOKENS,
        "prompt_bytes": _COUNT,
    },
    rows.EndRow: {
        **dict.fromkeys(("ttft_s", "total_s"), _WAIT_S),
        **dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens"), _TOKENS),
    },
    rows.LossRow: {"rows": _COUNT},
}

_RESIDENCIES: Final = tuple(AdapterResidency)

_read_columns = operator.attrgetter(*rows.CandidateTable.__struct_fields__)


class RecordedDecision(msgspec.Struct, frozen=True, gc=False):
    """A decision as it was recorded.

    Attributes:
        key: Process and number: the key of its end.
        unix_s: Unix time of the decision.
        candidates: Candidates of the scheduler; empty where they were left out.
        chosen_candidate: Candidate of the endpoint that was chosen, as of the last decision that has it;
            None before.
    """

    key: tuple[int, int]
    unix_s: float
    row: rows.DecisionRow
    chosen: Endpoint
    candidates: Sequence[Candidate]
    chosen_candidate: Candidate | None


class RecordedEnd(msgspec.Struct, frozen=True, gc=False):
    """The end of a decision's request; `key` is that of the decision."""

    key: tuple[int, int]
    row: rows.EndRow


class RecordedEndpoint(msgspec.Struct, gc=False):
    """An endpoint as the rows until now have it. Mutable; owned by the reader.

    Attributes:
        state: Its last state; None before the first.
        page: As in `Candidate`.
        candidate: Candidate of the last decision that has it; None before.
    """

    endpoint: Endpoint
    pool: str
    state: rows.StateRow | None = None
    load: Load = NO_LOAD
    page: Load | None = None
    candidate: Candidate | None = None


class _Process(msgspec.Struct, gc=False):
    """A process of which there are rows. Mutable; owned by the reader.

    Attributes:
        number: Its number in this recording.
        offset_s: Unix time minus its monotonic clock.
        last_decision: Its highest decision.
    """

    number: int
    offset_s: float
    last_decision: int = -1


class RecordingReader:
    """Reads a recording, line by line. Mutable; one pass.

    Attributes:
        header: The last header; None before the first.
        endpoints: Endpoints by pool and address, as of their last state.
        lost: Rows that the recorder dropped (count).
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._decoder = msgspec.json.Decoder(rows.Row)
        self._processes: dict[str, _Process] = {}
        self._num_processes = 0
        self._last_decision = -1
        self.header: rows.HeaderRow | None = None
        self._by_number: dict[int, RecordedEndpoint] = {}
        self.endpoints: dict[tuple[str, str], RecordedEndpoint] = {}
        self.lost = 0

    def require_header(self) -> rows.HeaderRow:
        """The last header.

        Raises:
            ConfigError: There was none.
        """
        if self.header is None:
            raise ConfigError(
                self._where,
                wanted="a recording",
                got="an empty file",
                fix="write one with extproc record, or name another file",
            )
        return self.header

    def read(self, lines: Iterable[bytes]) -> Iterator[RecordedDecision | RecordedEnd]:
        """Decisions and ends in the order of the lines.

        Args:
            lines: Lines with their line feeds; a last one without may be cut off, and so may one
                that goes on with the header of the next of several files.

        Raises:
            ConfigError: A line is no row, has a number that cannot be, or refers to an endpoint
                without one.
        """
        for number, line in _number_parts(lines):
            if not line.strip():
                continue
            try:
                row = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if not line.endswith(b"\n") and self.header is not None:
                    continue  # the recorder was ended while it wrote
                raise _bad_line(self._where, number, str(error)) from None
            self._check_ranges(row, number)
            event = self._take(row, number)
            if event is not None:
                yield event

    def _take(self, row: rows.Row, number: int) -> RecordedDecision | RecordedEnd | None:
        if isinstance(row, rows.HeaderRow):
            self._begin(row, number)
            return None
        if self.header is None:
            raise _bad_line(self._where, number, f"a row of kind {_kind(row)} before any header")
        match row:
            case rows.DecisionRow():
                return self._to_decision(self.header, row, number)
            case rows.EndRow():
                return RecordedEnd((self._processes[self.header.process].number, row.n), row)
            case rows.AddressRow():
                endpoint = Endpoint(row.address, row.name, row.labels)
                known = self._by_number.get(row.n)
                if known is None:
                    self._by_number[row.n] = RecordedEndpoint(endpoint, row.pool)
                else:
                    known.endpoint = endpoint
            case rows.StateRow():
                known = self._find(row.n, number)
                known.state, known.load = row, rows.restore_load(row.load)
                self.endpoints[known.pool, known.endpoint.address] = known
                known.page = None
                if row.is_imputed:
                    at = row.scraped_at
                    known.page = NO_LOAD if at is None else Load(at=at)
            case rows.LossRow():
                self.lost += row.rows
        return None

    def _check_ranges(self, row: rows.Row, number: int) -> None:
        parts = (row, row.rates, row.load) if isinstance(row, rows.StateRow) else (row,)
        for part in parts:
            for name, (low, high) in _RANGES.get(type(part), {}).items():
                value = getattr(part, name)
                if value is not None and not low <= value <= high:
                    got = f"{name} of {value:g}, which is not from {low:g} to {high:g}"
                    raise _bad_line(self._where, number, got)

    def _begin(self, header: rows.HeaderRow, number: int) -> None:
        if header.version != rows.VERSION:
            raise _bad_line(self._where, number, f"version {header.version}")
        offset_s = header.unix_s - header.clock_s
        known = self._processes.get(header.process)
        is_unnamed = not header.process
        if known is None or (is_unnamed and abs(offset_s - known.offset_s) >= _SAME_CLOCK_S):
            self._add_process(header.process, offset_s)
        elif is_unnamed:
            known.offset_s = offset_s
        self.header = header
        self._last_decision = -1
        self._by_number = {}

    def _add_process(self, name: str, offset_s: float) -> _Process:
        process = self._processes[name] = _Process(self._num_processes, offset_s)
        self._num_processes += 1
        return process

    def _find_process(self, header: rows.HeaderRow, row: rows.DecisionRow) -> _Process:
        """The process of a decision."""
        process = self._processes[header.process]
        if not header.process and row.n <= process.last_decision:
            # Processes of one machine have the same clock, and each begins to count anew.
            process = self._add_process("", process.offset_s)
        process.last_decision = max(process.last_decision, row.n)
        return process

    def _to_decision(
        self, header: rows.HeaderRow, row: rows.DecisionRow, number: int
    ) -> RecordedDecision:
        if row.n <= self._last_decision:
            got = f"decision {row.n} behind decision {self._last_decision}, where numbers grow"
            raise _bad_line(self._where, number, got)
        self._last_decision = row.n
        chosen = self._find(row.endpoint, number)
        if len(row.blocks) % 8:
            got = f"blocks of {len(row.blocks)} bytes, where each takes 8"
            raise _bad_line(self._where, number, got)
        candidates: Sequence[Candidate] = ()
        if row.candidates is not None:
            candidates = self._to_candidates(row.candidates, row.at, number)
        process = self._find_process(header, row)
        return RecordedDecision(
            (process.number, row.n),
            row.at + process.offset_s,
            row,
            chosen.endpoint,
            candidates,
            chosen.candidate,
        )

    def _to_candidates(
        self, table: rows.CandidateTable, now: float, number: int
    ) -> list[Candidate]:
        columns = _read_columns(table)
        if len({*map(len, columns)}) > 1:
            raise _bad_line(self._where, number, "a table with columns of other lengths")
        return [self._to_candidate(values, now, number) for values in zip(*columns, strict=True)]

    def _to_candidate(self, values: tuple[Any, ...], now: float, number: int) -> Candidate:
        known = self._find(values[0], number)
        fields = dict(zip(rows.CANDIDATE_FIELDS, values[1:], strict=True))
        state, residency = known.state, fields["residency"]
        if state is None or not 0 <= residency < len(_RESIDENCIES):
            raise _bad_line(self._where, number, f"endpoint {values[0]} without a state before")
        fields["residency"] = _RESIDENCIES[residency]
        page = known.page
        at = known.load.at if page is None else page.at
        known.candidate = Candidate(
            endpoint=known.endpoint,
            load=known.load,
            age_s=now - at if at > -math.inf else math.inf,
            rates=state.rates,
            page=page,
            **fields,
        )
        return known.candidate

    def _find(self, n: int, number: int) -> RecordedEndpoint:
        known = self._by_number.get(n)
        if known is None:
            raise _bad_line(self._where, number, f"endpoint {n} without a row before")
        return known


def _number_parts(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers; a header within one, as where files are concatenated, by itself."""
    for number, line in enumerate(lines, 1):
        at = line.find(_HEADER, 1)
        if at > 0:
            yield number, line[:at]
            line = line[at:]  # noqa: PLW2901 - the rest
        yield number, line


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines of a file, with their line feeds; those of the recording in a Parquet file.

    Raises:
        ConfigError: It cannot be read, or a line is longer than `MAX_LINE_BYTES`.
    """
    number = 0
    try:
        if parquet.is_parquet(path):
            yield from parquet.read_lines(path)
            return
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{path}: line {number}",
                        wanted=f"a line of at most {MAX_LINE_BYTES} bytes",
                        got="a longer one",
                        fix="check that the file has a row or request per line",
                    )
                yield line
    except OSError as error:
        raise file_error(path, error) from None


def _kind(row: rows.Row) -> str:
    return str(type(row).__struct_config__.tag)


def _bad_line(where: str, number: int, got: str) -> ConfigError:
    return ConfigError(
        f"{where}: line {number}",
        wanted=f"a row of a recording, version {rows.VERSION}",
        got=got,
        fix="name a file that extproc record or decisions.record wrote",
    )
