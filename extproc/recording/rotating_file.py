"""Rotating file: recordings on disk, of bounded size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class RotatingFile:
    """A file that becomes `NAME.1` when it is full, which was `NAME.2` before, and so on.

    Writes block; call them in a thread.

    Args:
        path: The file; one from before becomes `NAME.1`.
        max_bytes: Bytes of a file; it may exceed them by one write.
        max_files: Files in total (count).
    """

    def __init__(self, path: str, *, max_bytes: int, max_files: int) -> None:
        self._path = Path(path)
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._file: BinaryIO | None = None
        self._size = 0

    def write(self, lines: bytes) -> bool:
        """Append lines.

        Returns:
            True if the file is full: what is written next begins another one.

        Raises:
            OSError: It cannot be written; the next write begins another file.
        """
        try:
            if self._file is None:
                self._rotate()
                # Not for other users: names of models, and when who asked.
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                self._file, self._size = os.fdopen(descriptor, "wb"), 0
            self._file.write(lines)
            self._file.flush()
        except OSError:
            self.close()
            raise
        self._size += len(lines)
        if self._size < self._max_bytes:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Close the file; the next write begins another one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rotate(self) -> None:
        """Move every file to the next number; the last one is gone."""
        if not self._path.exists():
            return
        for number in range(self._max_files - 1, 0, -1):
            older = self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path
