"""Recorder: decisions of a running picker as rows of a recording, in bounded memory.

A request costs an entry in a queue; rows are made later, in batches, beside the requests. A queue that
is full drops what comes, and counts it: no request ever waits for a recording.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import mmh3
import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate, Endpoint, Load, StepTimeModel
from extproc.errors import ConfigError
from extproc.parsing import surfaces
from extproc.prefix_cache import blocks
from extproc.recording import parquet, rows
from extproc.recording.parquet import RecordingFile
from extproc.request import InferenceRequest, hash_affinity_key


class RotatingFile:
    """A file that becomes `NAME.1` when it is full, which was `NAME.2` before, and so on.

    Writes block; call them in a thread.

    Args:
        path: The file, as `for_lines` writes it; one from before becomes `NAME.1`.
        max_bytes: Bytes of a file; it may exceed them by one write, or by a row group of Parquet.
    """

    def __init__(self, path: str, *, max_bytes: int, max_files: int) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: RecordingFile | None = None
        # Bytes of the last file that later rows can follow; None where they belong in another file.
        self._sound_bytes: int | None = None

    def write(self, lines: bytes) -> bool:
        """Append lines.

        Returns:
            True if the file is full: what is written next begins another one.

        Raises:
            OSError: It cannot be written; the next write goes on behind what was written before, in
                Parquet at the beginning of the same file.
        """
        try:
            if self._file is None:
                self._file = self._open()
            self._file.write(lines)
            self._file.flush()
            is_full = self._file.tell() >= self._max_bytes
            if is_full:
                self.close()
            elif not isinstance(self._file, parquet.ParquetFile):
                self._sound_bytes = self._file.tell()
        except OSError:
            # No rotation: while a disk is full, each would cost a file of before.
            sound_bytes = self._sound_bytes
            with contextlib.suppress(OSError):
                self.close()
            self._sound_bytes = sound_bytes
            raise
        return is_full

    def close(self) -> None:
        """Close the file; the next write begins another one."""
        file, self._file = self._file, None
        if file is not None:
            file.close()
        self._sound_bytes = None

    def _open(self) -> RecordingFile:
        """Open another file, or the one of a failed write without what that write left of its rows."""
        if self._sound_bytes is None:
            self._rotate()
        # Readable by this user only: rows name models and say when requests came.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        file = os.fdopen(descriptor, "ab")
        self._sound_bytes = self._sound_bytes or 0
        if file.tell() > self._sound_bytes:
            file.truncate(self._sound_bytes)
        return parquet.for_lines(file, self._path)

    def _rotate(self) -> None:
        """Move every file to the next number; the last one is gone, and so are any beyond it."""
        if not self._path.exists():
            return
        for number in range(self._max_files - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        number = self._max_files
        while (surplus := self._numbered(number)).is_file():
            surplus.unlink()
            number += 1

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path


def require(path: str) -> None:
    """Check that `RotatingFile` can write a file, or may once its folder is there.

    Raises:
        ConfigError: It is a folder, a pipe or a device, or needs pyarrow, which is not installed.
    """
    parquet.require(path)
    file = Path(path)
    if file.exists() and not file.is_file():
        raise ConfigError(
            path,
            wanted="a regular file, or none yet, as a full one gets another name",
            got="a folder, pipe or device",
            fix="name a file in that folder or in another one",
        )


def find_obstacle(path: str) -> str:
    """Reason for which `RotatingFile` cannot write a file on this machine now; empty without one."""
    folder = Path(path).parent
    is_writable = os.access(folder, os.W_OK | os.X_OK) and folder.is_dir()
    return "" if is_writable else f"the folder {folder} is missing or not writable"


#: Entries that may wait for their rows, and the same times the candidates of a decision (count). A
#: second of 1,000 requests has two entries each; a candidate takes some 300 bytes.
MAX_ENTRIES: Final = 4096
_MAX_CANDIDATES: Final = 80_000

#: Candidates recorded per second (count), so that this work has a bound: some 2 us each. Decisions that
#: come faster have rows without candidates in between.
_CANDIDATES_PER_S: Final = 250.0

#: Entries that become lines together (count).
_BATCH: Final = 256

#: Of a candidate as a tuple, the fields of a table.
_read_columns: Final = operator.itemgetter(
    *map(Candidate.__struct_fields__.index, rows.CANDIDATE_FIELDS)
)


#: A decision that waits for its lines: its row, without endpoint and candidates and with hashes as they
#: came, the decision without its prompt, and whether its candidates are to be recorded.
_RoutedRow: TypeAlias = tuple[rows.DecisionRow, Decision, bool]

#: Hashes of the blocks of a prompt, and the hash by which ties are broken.
PromptHashes: TypeAlias = tuple[Sequence[int], int | None]


def hash_session(session: str) -> int:
    """Hash of a session, 60 bits; 0 for none."""
    if not session:
        return 0
    return mmh3.mmh3_x64_128_uintdigest(session.encode("utf-8", "surrogatepass")) & blocks.HASH_MASK


def affinity_seed(request: InferenceRequest) -> int | None:
    """Hash of session or first user message, as pickers break ties by it; None without either."""
    key = request.session or surfaces.find_first_user_message(request)
    return hash_affinity_key(key) if key else None


class Recording:
    """One recording under way. Mutable; on the event loop only.

    Args:
        counts: Rows by result, `recorded` or `dropped`; updated here.
    """

    def __init__(self, header: Callable[[], rows.HeaderRow], counts: Counter[str]) -> None:
        self._header = header
        self._counts = counts
        self._entries: list[_RoutedRow | rows.EndRow | rows.HeaderRow] = []
        # Lines of entries that were added before, and their number.
        self._lines: list[bytes] = []
        self._num_lines = 0
        self._is_held = False
        self._dropped = 0
        self._encoder = msgspec.json.Encoder()
        self.restart()

    def restart(self) -> None:
        """Begin anew with the next row, as at the beginning of a file."""
        # By pool and address: pools may share endpoints, each with loads and step times of its own.
        self._states: dict[tuple[str, str], _KnownEndpoint] = {}
        self._is_headed = False

    def add_header(self) -> None:
        """Begin anew behind the entries that wait, as with other settings."""
        if self._is_headed or self._entries:
            self._entries.append(self._header())

    def add(self, entry: _RoutedRow, num_candidates: int) -> None:
        """Record a decision with so many candidates, or drop it where too many wait."""
        waiting = len(self._entries)
        is_full = waiting + self._num_lines >= MAX_ENTRIES
        if is_full or waiting * num_candidates > _MAX_CANDIDATES:  # lines hold none of them
            self._drop(1)
        else:
            self._entries.append(entry)

    def add_ends(self, ends: Sequence[rows.EndRow]) -> None:
        """Record ends of requests, or drop those for which there is no room."""
        room = max(0, MAX_ENTRIES - len(self._entries) - self._num_lines)
        self._entries += ends[:room]
        if len(ends) > room:
            self._drop(len(ends) - room)

    def _drop(self, count: int) -> None:
        self._dropped += count
        self._counts["dropped"] += count

    def hold(self) -> bytes:
        """Make no lines before `resume` or `take`, as while a file is written that may be full then.

        Returns:
            Those that were made.
        """
        self._is_held = True
        return self._take_lines()

    def resume(self) -> None:
        """Make lines of what is added."""
        self._is_held = False

    def _take_lines(self) -> bytes:
        lines, self._lines = self._lines, []
        self._num_lines = 0
        return b"".join(lines)

    def encode(self, most: int) -> None:
        """Make the lines of entries now, with other work on the same requests."""
        if not self._is_held:
            self._lines.append(self._encode(most))

    def take(self, most: int) -> bytes:
        """Lines of the entries that wait, oldest first.

        Args:
            most: Entries that become lines now (count), besides lines that were made before.

        Returns:
            Complete lines; empty where nothing waits.
        """
        self._lines.append(self._encode(most))
        return self._take_lines()

    def _encode(self, most: int) -> bytes:
        batch = self._entries[:most]
        self._num_lines += len(batch)
        del self._entries[:most]
        lines: list[rows.Row] = []
        if not self._is_headed and (batch or self._dropped):
            self._is_headed = True
            lines.append(self._header())
        if self._dropped:
            lines.append(rows.LossRow(rows=self._dropped))
            self._dropped = 0
        num_rows = len(batch)
        for entry in batch:
            if isinstance(entry, tuple):
                self._add_rows(*entry, lines)
                continue
            lines.append(entry)
            if isinstance(entry, rows.HeaderRow):
                self.restart()
                self._is_headed = True
                num_rows -= 1
        if num_rows:
            self._counts["recorded"] += num_rows
        return self._encoder.encode_lines(lines) if lines else b""

    def _add_rows(
        self,
        row: rows.DecisionRow,
        decision: Decision,
        has_candidates: bool,  # noqa: FBT001 - of an entry
        lines: list[rows.Row],
    ) -> None:
        """Complete the row of a decision, and add it behind those of endpoints and states in it."""
        known, chosen, candidates = self._states, decision.endpoints[0], decision.candidates
        pool, table = decision.pool, None
        # A file begins with the states of all.
        if candidates and (has_candidates or not known):
            lines += self._rows_of_states(candidates, row.at, pool)
            columns = [*zip(*map(msgspec.structs.astuple, candidates), strict=True)]
            numbers = [known[pool, candidate.endpoint.address].n for candidate in candidates]
            table = rows.CandidateTable(numbers, *_read_columns(columns))
        state = known.get((pool, chosen.address))
        if state is None:
            same = [candidate for candidate in candidates if candidate.endpoint is chosen]
            lines += self._rows_of_endpoint((*same, Candidate(chosen))[0], row.at, pool)
            state = known[pool, chosen.address]
        row.complete(state.n, table)
        lines.append(row)

    def _rows_of_states(
        self, candidates: Sequence[Candidate], now: float, pool: str
    ) -> Iterator[rows.Row]:
        """Endpoints and states that changed."""
        known = self._states
        for candidate in candidates:
            state = known.get((pool, candidate.endpoint.address))
            if (
                state is None
                or state.load is not candidate.load
                or state.rates is not candidate.rates
                or state.endpoint is not candidate.endpoint
                or state.page is not candidate.page
            ):
                yield from self._rows_of_endpoint(candidate, now, pool)

    def _rows_of_endpoint(self, candidate: Candidate, now: float, pool: str) -> Iterator[rows.Row]:
        """State of an endpoint, and the endpoint if it is new or was relabeled."""
        endpoint, known = candidate.endpoint, self._states
        state = known.get((pool, endpoint.address))
        number = len(known) if state is None else state.n
        if state is None or state.endpoint is not endpoint:
            yield rows.AddressRow(
                n=number,
                address=endpoint.address,
                name=endpoint.name,
                labels=endpoint.labels,
                pool=pool,
            )
        known[pool, endpoint.address] = _KnownEndpoint(
            number, endpoint, candidate.load, candidate.rates, candidate.page
        )
        yield rows.StateRow(
            n=number,
            load=rows.record_load(candidate.load),
            rates=candidate.rates,
            is_imputed=candidate.is_imputed,
            scraped_at=now - candidate.age_s
            if candidate.is_imputed and candidate.age_s < now
            else None,
        )


class _KnownEndpoint(NamedTuple):
    """An endpoint as its last rows have it."""

    n: int
    endpoint: Endpoint
    load: Load
    rates: StepTimeModel
    page: Load | None


class Recordings:
    """All recordings under way, with the numbers of decisions.

    Args:
        on_change: Called with the number of recordings when one starts or stops.
    """

    def __init__(
        self,
        counts: Counter[str],
        header: Callable[[], rows.HeaderRow],
        *,
        schedule: blocks.Schedule,
        on_change: Callable[[int], None],
    ) -> None:
        self._counts = counts
        self._header = header
        self._schedule = schedule
        self._on_change = on_change
        self._active: list[Recording] = []
        self._number = 0
        # Candidates that may be recorded as of the monotonic second behind (count).
        self._credit, self._credited_at = _CANDIDATES_PER_S, -math.inf

    def __len__(self) -> int:
        return len(self._active)

    def start(self) -> Recording:
        """Start a recording."""
        recording = Recording(self._header, self._counts)
        self._active.append(recording)
        self._on_change(len(self._active))
        return recording

    def add_header(self) -> None:
        """Let every recording under way go on behind a new header."""
        for recording in self._active:
            recording.add_header()

    def stop(self, recording: Recording) -> None:
        """Stop a recording; what waits in it can still be taken."""
        self._active.remove(recording)
        self._on_change(len(self._active))

    def hash_prompt(self, decision: Decision) -> PromptHashes:
        """Hash the prompt of a decision, of which recordings have nothing else."""
        request, chain = decision.request, decision.block_hashes
        if not chain and request.prompt:
            # A strategy that reads no prefixes is compared with strategies that do.
            root = blocks.seed(request.model, request.adapter)
            chain = blocks.chain(request.prompt, root, schedule=self._schedule)
        seed = decision.affinity_seed
        return chain, affinity_seed(request) if seed is None else seed

    def add_routed(
        self, decision: Decision, hashes: PromptHashes, *, now: float, queued_s: float
    ) -> int:
        """Record a decision.

        Args:
            decision: Without its prompt, and with its pool.

        Returns:
            Its number.
        """
        self._number += 1
        num_candidates = len(decision.candidates)
        if (credit := self._credit + (now - self._credited_at) * _CANDIDATES_PER_S) > 0.0:
            self._credit = min(credit, _CANDIDATES_PER_S) - num_candidates
            self._credited_at = now
        request, (chain, seed) = decision.request, hashes
        session = request.session
        # By position, which is ten times as fast: in the order of the fields.
        row = rows.DecisionRow(
            self._number,
            now,
            -1,
            queued_s,
            decision.pool,
            decision.profile,
            decision.picker,
            decision.degraded,
            request.api,
            request.model,
            request.adapter,
            request.prompt_tokens,
            request.stable_bytes,
            request.max_tokens,
            request.stream,
            request.priority,
            hash_session(session) if session else 0,
            seed,
            rows.pack_hashes(chain),
            decision.matched_tokens,
            decision.conversation_stats,
        )
        if decision.disaggregation is not None:
            row.set_stages(decision.disaggregation)
        for at, recording in enumerate(self._active):
            # Endpoints may have another number in each.
            own = copy.copy(row) if at else row
            recording.add((own, decision, credit > 0.0), num_candidates)
        return self._number

    def add_ends(self, ends: Sequence[rows.EndRow]) -> None:
        """Record ends of requests."""
        for recording in self._active:
            recording.add_ends(ends)

    def encode(self) -> None:
        """Make the lines of what was added, few at a time."""
        for recording in self._active:
            recording.encode(_BATCH)
