"""Recordings as Parquet files; all of it needs pyarrow."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import pytest

from extproc.cli import record
from extproc.errors import ConfigError
from extproc.recording import parquet, reader
from extproc.recording.recorder import RotatingFile
from extproc.simulator import replay, replay_traces
from tests.recording.test_rotating_file import files_of_at_most

table = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install '.[parquet]'")

EXAMPLE = Path(__file__).parents[2] / "docs/examples/decisions.jsonl"


def events(path):
    """All events of a recording."""
    return list(reader.RecordingReader(str(path)).read(reader.read_lines(path)))


@pytest.fixture
def written(tmp_path):
    """The example of the guide as Parquet, written as `extproc record` does."""
    path = tmp_path / "decisions.parquet"
    assert record.write_recording(path, iter([EXAMPLE.read_bytes()])) > 200
    return path


def test_a_recording_comes_back_as_it_was(written):
    """Decisions with their candidates, and ends, in their order."""
    assert replay_traces.find_format(written) == "recording"
    assert events(written) == events(EXAMPLE)
    assert written.stat().st_size < EXAMPLE.stat().st_size / 2


def test_it_is_replayed_like_json_lines(written):
    """Traffic and agreement are the same."""
    first, second = (
        replay.load(path, strategies=["random"], configs=()) for path in (written, EXAMPLE)
    )
    assert first.traffic == second.traffic
    assert first.agreements == second.agreements


def test_numbers_are_columns(written):
    """So other tools need nothing of ours to chart them."""
    rows = table.read_table(written)
    kinds = rows["kind"].to_pylist()
    assert kinds[0] == "recording"
    assert {kinds.count("decision"), kinds.count("end")} == {112}
    assert max(seconds or 0.0 for seconds in rows["total_s"].to_pylist()) > 0.0
    assert type(rows["blocks"][kinds.index("decision")].as_py()[0]) is int
    assert sum(tokens or 0 for tokens in rows["output_tokens"].to_pylist()) > 0


def test_pieces_may_end_within_a_line(tmp_path):
    """A client reads what the network brings; a line that is cut off at the end is left out."""
    path, data = tmp_path / "f.parquet", EXAMPLE.read_bytes()
    with contextlib.closing(parquet.ParquetFile(path.open("wb"))) as file:
        for begin in range(0, len(data) - 10, 777):
            file.write(data[begin : min(begin + 777, len(data) - 10)])
    assert events(path) == events(EXAMPLE)[:-1]


def test_full_files_move_on(tmp_path, monkeypatch):
    """Each is complete, and the limit is that of the file, not of its lines."""
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1000)
    file = RotatingFile(str(tmp_path / "f.parquet"), max_bytes=20_000, max_files=100)
    lines = EXAMPLE.read_bytes().splitlines(keepends=True)
    full = [file.write(b"".join(lines[at : at + 10])) for at in range(0, len(lines), 10)]
    assert any(full)
    file.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:2] == ["f.parquet", "f.parquet.1"]
    assert sum(len(list(reader.read_lines(tmp_path / name))) for name in names) == len(lines)


def test_a_full_disk_costs_no_file_from_before(tmp_path, monkeypatch):
    """A file that cannot be read, as it has no end, takes the place of none that can."""
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1000)
    file = RotatingFile(str(tmp_path / "f.parquet"), max_bytes=20_000, max_files=2)
    lines = EXAMPLE.read_bytes()
    assert file.write(lines)
    with files_of_at_most(8):
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                file.write(lines)
    file.write(lines)
    file.close()
    assert {path.name: events(path) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("f.parquet", "f.parquet.1"), events(EXAMPLE)
    )


def test_a_file_without_its_end_is_refused(written):
    """The error says what can be read in part."""
    written.write_bytes(written.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="a complete Parquet file of a recording"):
        events(written)


def test_any_damage_is_read_or_refused(written):
    """Most of it is in the description of the columns at the end, which has lengths and types."""
    complete, rng = written.read_bytes(), random.Random(2)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(complete)
        for _ in range(rng.randrange(1, 5)):
            reach = rng.choice((len(damaged), 3000)) - len(parquet.MAGIC)
            damaged[-1 - rng.randrange(reach)] = rng.randrange(256)
        written.write_bytes(damaged)
        try:
            events(written)
        except ConfigError:
            num_refused += 1
    assert num_refused > 200


def test_other_tables_are_refused(tmp_path):
    """Whatever their columns are."""
    arrow = pytest.importorskip("pyarrow")
    for columns in ({"x": [1, 2]}, {"kind": ["decision"]}, {"kind": [1], "settings": ["{"]}):
        path = tmp_path / "other.parquet"
        table.write_table(arrow.table(columns), path)
        with pytest.raises(ConfigError, match="a row of a recording"):
            events(path)


@pytest.mark.parametrize("blocks", [[-1], [None], ["x"], [1.5], 7])
def test_other_block_hashes_are_refused(tmp_path, blocks):
    """They are whole numbers, not below 0."""
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "other.parquet"
    table.write_table(arrow.table({"kind": ["decision"], "blocks": [blocks]}), path)
    with pytest.raises(ConfigError, match="a complete Parquet file of a recording"):
        events(path)


def test_a_disk_that_is_full_is_an_error_of_the_disk(tmp_path, monkeypatch):
    """The recorder counts the rows and begins another file."""
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1000)

    class FullDisk(io.BytesIO):
        def write(self, data):
            if self.tell() > 4:
                raise OSError(28, "No space left on device")
            return super().write(data)

    file = parquet.ParquetFile(FullDisk())
    with pytest.raises(OSError, match="No space left"):
        file.write(EXAMPLE.read_bytes())
