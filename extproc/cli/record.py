"""`extproc record`: write the decisions of a running server to a file, for replay, tune and plan.

    extproc record decisions.jsonl --seconds 600
    extproc replay decisions.jsonl

The recording begins now and has what the scheduler saw for every request: hashes of prompts, loads of
the endpoints, the choice, and when the answer came. It has no prompt, no header and no session. To
record always, in files of bounded size, set `decisions.record`.

The file is opened when the server answers as extproc does, and an older one stays until the first
rows came.

Exit status: 0 done, also after Ctrl-C or SIGTERM; 1 the server does not answer or went away; 2 wrong
flags or files.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec

from extproc.cli import explain, main
from extproc.errors import ConfigError
from extproc.recording import parquet, rows

#: Seconds without a row after which the server is looked for: it may have no requests.
_IDLE_S = 30.0

#: Type of the answer of /debug/record.
_CONTENT_TYPE = "application/jsonl"

#: What came from a server that went away.
_CUT_OFF = "an answer that is cut off"

_STANDARD_OUTPUT = Path("-")

#: Bytes read at a time.
_CHUNK_BYTES = 1 << 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        type=Path,
        help="written as JSON lines, or as Parquet if it ends in .parquet (extra parquet); an older "
        "file is replaced; - is standard output",
    )
    add("--server", metavar="URL", default=explain.SERVER, help="metrics port (%(default)s)")
    add(
        "--seconds",
        type=main.seconds_parser(1.0, 86_400.0),
        default=60.0,
        help="seconds to record (%(default)s)",
    )
    add("--token-file", metavar="FILE", help="with the token of --server (server.admin_token_file)")


def run(args: argparse.Namespace) -> int:
    """Record; returns the exit status, see the head of this module.

    Raises:
        ConfigError: A file or flag is wrong.
        UnreachableError: The server does not answer, or not as extproc does, or went away.
    """
    parquet.require(args.file)
    url = f"{explain.base_url(args.server)}/debug/record?seconds={args.seconds:g}"
    request = urllib.request.Request(url)  # noqa: S310 - base_url made it http or https
    token = explain.read_token(args)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    with _ask(request, timeout_s=args.seconds + _IDLE_S) as response:
        lines = write_recording(args.file, read_lines(response, url))
    is_output = args.file == _STANDARD_OUTPUT
    if lines:
        place = "on standard output" if is_output else f"in {args.file}"
        print(f"{lines} rows {place}", file=sys.stderr)
    else:
        print(
            "no request was routed, so nothing was written to "
            f"{'standard output' if is_output else args.file}; record while there is traffic",
            file=sys.stderr,
        )
    return 0


def read_lines(response: http.client.HTTPResponse, url: str) -> Iterator[bytes]:
    """Complete lines of a recording, many at a time.

    Raises:
        UnreachableError: They are no recording, or the server went away before its end.
    """
    if response.headers.get_content_type() != _CONTENT_TYPE:
        raise explain.not_extproc_error(
            url, f"an answer of type {response.headers.get_content_type()}"
        )
    cut_line, is_headed = b"", False
    try:
        while piece := response.read1(_CHUNK_BYTES):
            complete, end, cut_line = (cut_line + piece).rpartition(b"\n")
            if not end:
                continue
            if not is_headed and not _is_header(complete.partition(b"\n")[0]):
                raise explain.not_extproc_error(url, "lines that are no recording")
            is_headed = True
            yield complete + end
    except http.client.HTTPException:  # the end of a chunk is missing
        raise _cut_error(url, _CUT_OFF) from None
    except OSError as error:
        raise _cut_error(url, str(error)) from None
    if cut_line or response.length:
        raise _cut_error(url, _CUT_OFF)


def write_recording(path: Path, pieces: Iterator[bytes]) -> int:
    """Write complete lines to a file until they end, Ctrl-C or SIGTERM; returns their number.

    The file `-` is standard output. Without any line there is no new file.

    Raises:
        ConfigError: The file cannot be written.
        UnreachableError: A line is no row, which only Parquet looks at.
    """
    is_output = path == _STANDARD_OUTPUT
    lines, interrupts, is_new = 0, _Interrupts(), not (is_output or path.exists())
    try:
        # Without O_TRUNC: the older recording stays until there is a new one.
        descriptor = os.dup(1) if is_output else os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        with (
            interrupts.handled(),
            os.fdopen(descriptor, "wb") as file,
            contextlib.ExitStack() as stack,
        ):
            recording: parquet.RecordingFile | None = None
            while piece := interrupts.read(pieces):
                if recording is None:
                    if not is_output and path.is_file():  # a device or a pipe has no length
                        file.truncate()
                    recording = parquet.for_lines(file, path)
                    stack.callback(recording.close)
                recording.write(piece)
                if is_output:
                    file.flush()  # its reader waits for rows
                lines += piece.count(b"\n")
    except BrokenPipeError:
        raise  # as of any other command whose reader is gone
    except OSError as error:
        raise ConfigError(
            path,
            wanted="a file that can be written",
            got=error.strerror or str(error),
            fix="check the path and the free space of its disk",
        ) from None
    except (ValueError, OverflowError) as error:
        raise explain.UnreachableError(
            wanted="rows of a recording",
            got=str(error),
            fix="record from an extproc of this version, or as JSON lines",
        ) from None
    finally:
        if is_new and not lines:
            with contextlib.suppress(OSError):  # where it could not be opened
                path.unlink()
    return lines


class _Interrupts:
    """SIGINT, and SIGTERM as `timeout` sends it: they end reading, and never a write.

    A Parquet file whose writing is interrupted cannot be read. Mutable; one recording.
    """

    def __init__(self) -> None:
        self._is_reading = self._is_due = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals, except those that the caller of the process ignores."""
        if threading.current_thread() is not threading.main_thread():
            yield  # handlers are for the main thread
            return
        previous = {
            number: signal.signal(number, self._take)
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def read(self, pieces: Iterator[bytes]) -> bytes:
        """The next piece; empty at the end, or once there was a signal."""
        try:
            self._is_reading = True
            return b"" if self._is_due else next(pieces, b"")
        except KeyboardInterrupt:
            return b""
        finally:
            self._is_reading = False

    def _take(self, *_: object) -> None:
        self._is_due = True
        if self._is_reading:
            raise KeyboardInterrupt


def _is_header(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line, type=rows.Row), rows.HeaderRow)
    except (ValueError, RecursionError):
        return False


def _ask(request: urllib.request.Request, *, timeout_s: float) -> http.client.HTTPResponse:
    url = request.full_url
    try:
        return explain.open_page(request, timeout_s=timeout_s)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error) from None
    except http.client.HTTPException:
        raise explain.not_extproc_error(url, "an answer that is not HTTP") from None
    except (OSError, ValueError) as error:
        raise _cut_error(url, str(getattr(error, "reason", error))) from None


def _cut_error(url: str, got: str) -> explain.UnreachableError:
    return explain.UnreachableError(
        wanted=f"decisions from {url}",
        got=got,
        fix="give the host and the --metrics-port of a running `extproc serve`",
    )


def _refusal(url: str, error: urllib.error.HTTPError) -> explain.UnreachableError:
    message = ""
    with contextlib.suppress(OSError, http.client.HTTPException):
        message = error.read(1000).decode(errors="replace").strip()
    return explain.UnreachableError(
        wanted=f"decisions from {url}",
        got=f"status {error.code}: {message}",
        fix="name the file of its server.admin_token_file with --token-file"
        if error.code in (401, 403)
        else "check that an extproc of this version listens there",
    )
