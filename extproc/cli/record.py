"""`extproc record`: write the decisions of a running server to a file, for replay, tune and plan.

    extproc record decisions.jsonl --seconds 600
    extproc replay decisions.jsonl

The recording begins now and has what the scheduler saw for every request: hashes of prompts, loads of
the endpoints, the choice, and when the answer came. It has no prompt, no header and no session. To
record always, in files of bounded size, set `decisions.record`.

Exit status: 0 done, also after Ctrl-C; 1 the server does not answer or went away; 2 wrong flags or
files.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from extproc.cli import explain, main
from extproc.errors import file_error
from extproc.recording import parquet
from extproc.recording.parquet import RecordingFile

#: Seconds without a row after which the server is looked for: it may have no requests.
_IDLE_S = 30.0

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
        "file is replaced",
    )
    add("--server", metavar="URL", default=explain.SERVER, help="metrics port (%(default)s)")
    add(
        "--seconds",
        type=main.seconds_parser(1.0, 86_400.0),
        default=60.0,
        help="length (%(default)s)",
    )
    add("--token-file", metavar="FILE", help="with the token of --server (server.admin_token_file)")


def run(args: argparse.Namespace) -> int:
    """Record; returns the exit status, see the head of this module.

    Raises:
        ConfigError: A file or flag is wrong.
        UnreachableError: The server does not answer.
    """
    parquet.require(args.file)
    url = f"{explain.base_url(args.server)}/debug/record?seconds={args.seconds:g}"
    request = urllib.request.Request(url)  # noqa: S310 - base_url made it http or https
    token = explain.read_token(args)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with (
            urllib.request.urlopen(request, timeout=args.seconds + _IDLE_S) as response,  # noqa: S310
            contextlib.closing(open_recording(args.file)) as file,
        ):
            lines = copy_lines(response, file)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise explain.UnreachableError(
            wanted=f"decisions from {url}",
            got=str(getattr(error, "reason", error)),
            fix="give the host and the --metrics-port of a running `extproc serve`",
        ) from None
    print(f"{lines} rows in {args.file}", file=sys.stderr)
    if not lines:
        print("no request was routed; record while there is traffic", file=sys.stderr)
    return 0


def copy_lines(response: Any, file: RecordingFile) -> int:
    """Copy until the recording ends or Ctrl-C; returns the number of lines."""
    lines = 0
    try:
        while piece := response.read1(_CHUNK_BYTES):
            file.write(piece)
            lines += piece.count(b"\n")
    except KeyboardInterrupt:
        pass  # what is there is a recording
    return lines


def open_recording(path: Path) -> RecordingFile:
    """Open the file of a recording, in the format that its name says.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        return parquet.for_lines(path.open("wb"), path)
    except OSError as error:
        raise file_error(path, error, wanted="a file that can be written") from None


def _refusal(url: str, error: urllib.error.HTTPError) -> explain.UnreachableError:
    message = error.read(1000).decode(errors="replace").strip()
    return explain.UnreachableError(
        wanted=f"decisions from {url}",
        got=f"status {error.code}: {message}",
        fix="name the file of its server.admin_token_file with --token-file"
        if error.code in (401, 403)
        else "check that an extproc of this version listens there",
    )
