"""Parquet files of recordings, through pyarrow: a table with the rows of a recording.

Numbers, texts and block hashes are columns; what is nested is text, as JSON. A row has null in the
columns of other kinds. The rows have the order of the lines, so a recording can be read back.

A file can be read once it is closed: a picker that is killed leaves the last one without its end.
"""

from __future__ import annotations

import contextlib
import importlib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from extproc import distribution
from extproc.errors import ConfigError
from extproc.recording import rows

#: First bytes of a file.
MAGIC: Final = b"PAR1"

#: End of the names of files that are written as Parquet.
_SUFFIX: Final = ".parquet"

#: Bytes of lines that become a row group; as much is held back in memory.
_GROUP_BYTES: Final = 4 << 20

#: Rows that are read at a time (count).
_BATCH_ROWS: Final = 1024

#: Column type by type of a field; other fields are JSON.
_COLUMN_TYPES: Final[Mapping[object, str]] = {
    int: "int64",
    int | None: "int64",
    float: "float64",
    float | None: "float64",
    str: "string",
    bool: "bool_",
    bytes: "hashes",
}

#: Column type by name, `json` for JSON; `kind` is the tag of the rows.
_COLUMNS: Final[Mapping[str, str]] = {
    "kind": "string",
    **{
        field.name: _COLUMN_TYPES.get(field.type, "json")
        for kind in typing.get_args(rows.Row)
        for field in msgspec.structs.fields(kind)
    },
}


class RecordingFile(Protocol):
    """A file that takes the lines of a recording; a binary file is one."""

    def write(self, lines: bytes, /) -> object:
        """Append lines, of which the last one may be cut off."""

    def flush(self) -> None:
        """Hand complete parts to the operating system."""

    def tell(self) -> int:
        """Bytes that were written."""

    def close(self) -> None:
        """Write the rest, and close the file."""


class ParquetFile:
    """A Parquet file that takes the lines of a recording. Mutable; one owner.

    Args:
        file: The file, which this one closes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._arrow: Any = importlib.import_module("pyarrow")
        self._schema = self._arrow.schema([(name, self._type(name)) for name in _COLUMNS])
        parquet: Any = importlib.import_module("pyarrow.parquet")
        self._writer = parquet.ParquetWriter(file, self._schema, compression="zstd")
        self._decoder = msgspec.json.Decoder(rows.Row)
        self._batches: list[Any] = []
        self._pending_bytes = 0
        self._cut_line = b""

    def write(self, lines: bytes) -> None:
        """See `RecordingFile`."""
        complete, _, self._cut_line = (self._cut_line + lines).rpartition(b"\n")
        if not complete:
            return
        self._batches.append(self._to_batch(complete.split(b"\n")))
        self._pending_bytes += len(complete)
        if self._pending_bytes >= _GROUP_BYTES:
            self._write_group()

    def flush(self) -> None:
        """See `RecordingFile`."""
        self._file.flush()

    def tell(self) -> int:
        """See `RecordingFile`."""
        return self._file.tell()

    def close(self) -> None:
        """See `RecordingFile`."""
        with contextlib.closing(self._file), contextlib.closing(self._writer):
            self._write_group()

    def _write_group(self) -> None:
        batches, self._batches, self._pending_bytes = self._batches, [], 0
        if batches:
            self._writer.write_table(self._arrow.Table.from_batches(batches, self._schema))

    def _to_batch(self, lines: Sequence[bytes]) -> Any:
        decoded = [self._decoder.decode(line) for line in lines]
        columns: dict[str, list[object]] = {name: [None] * len(decoded) for name in _COLUMNS}
        for at, row in enumerate(decoded):
            columns["kind"][at] = row.__struct_config__.tag
            for name in row.__struct_fields__:
                value = getattr(row, name)
                if _COLUMNS[name] == "json":
                    value = msgspec.json.encode(value).decode() if value else None
                elif _COLUMNS[name] == "hashes":
                    value = rows.unpack_hashes(value)
                columns[name][at] = value
        return self._arrow.record_batch(columns, schema=self._schema)

    def _type(self, name: str) -> Any:
        arrow, kind = self._arrow, _COLUMNS[name]
        if kind == "hashes":
            return arrow.list_(arrow.int64())
        return arrow.string() if kind == "json" else getattr(arrow, kind)()


def require(path: str | Path) -> None:
    """Check that a file can be written as its name demands.

    Raises:
        ConfigError: It ends in `.parquet`, and pyarrow is not installed.
    """
    if Path(path).suffix != _SUFFIX:
        return
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise _missing_error(path) from None


def for_lines(file: BinaryIO, path: str | Path) -> RecordingFile:
    """The file itself, or a Parquet file in it where the name ends in `.parquet`."""
    return ParquetFile(file) if Path(path).suffix == _SUFFIX else file


def is_parquet(path: Path) -> bool:
    """Check the first bytes of a file.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines of the recording in a Parquet file.

    Raises:
        ConfigError: pyarrow is not installed, or the file is no complete recording.
    """
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        arrow_error: type[Exception] = importlib.import_module("pyarrow").ArrowException
    except ImportError:
        raise _missing_error(path) from None
    encoder = msgspec.json.Encoder()
    try:
        # A file of others may have any number of columns.
        with parquet.ParquetFile(path) as file:
            names = [name for name in file.schema_arrow.names if name in _COLUMNS]
            for batch in file.iter_batches(_BATCH_ROWS, columns=names):
                for row in batch.to_pylist():
                    yield encoder.encode(_to_tree(row)) + b"\n"
    except (
        *(arrow_error, ValueError, TypeError, OSError, AttributeError),
        OverflowError,  # a block hash below 0
    ) as error:
        raise ConfigError(
            str(path),
            wanted="a complete Parquet file of a recording",
            got=str(error).partition("\n")[0],
            fix="name a file that extproc record or decisions.record closed; JSON lines can be read "
            "to where they end",
        ) from None


def _to_tree(row: Mapping[str, Any]) -> Mapping[str, object]:
    return {
        name: _to_field(_COLUMNS[name], value) for name, value in row.items() if value is not None
    }


def _to_field(kind: str, value: Any) -> object:
    if kind == "hashes":
        return rows.pack_hashes(value)
    return msgspec.Raw(value.encode()) if kind == "json" else value


def _missing_error(path: str | Path) -> ConfigError:
    return ConfigError(
        str(path),
        wanted="the Python package pyarrow, as the file is Parquet",
        got="none",
        fix=distribution.install_command("parquet"),
    )
