"""`extproc record` against servers that break off, or are no extproc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.cli import main, record
from extproc.recording import parquet
from tests.support.raw_server import answering

EXAMPLE = Path(__file__).parents[2] / "docs/examples/decisions.jsonl"

OLDER = b"older\n"


def head(*, kind="application/jsonl", length=None):
    """Head of a 200 answer; without a length it ends with the connection."""
    more = "" if length is None else f"content-length: {length}\r\n"
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{more}\r\n".encode()


def run(path, server):
    """Exit status of the command."""
    return main.main(["record", str(path), "--server", server])


@pytest.mark.parametrize("server", ["127.0.0.1:abc", "http://[::1", "a..b:80", "me:secret@a:80"])
def test_a_wrong_address_is_status_2(server, file, capsys):
    """The error does not repeat what may hold a password."""
    assert run(file, server) == 2
    message = capsys.readouterr().err
    assert message.startswith("extproc: --server: expected host:port")
    assert "secret" not in message


@pytest.fixture
def file(tmp_path):
    """A file with an older recording."""
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(OLDER)
    return path


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (head(kind="text/html") + b"<html>\n</html>\n", "type text/html"),
        (head() + b"<html>\n</html>\n", "no recording"),
        (head() + b'{"kind":"end","n":1}\n', "no recording"),
        (head(length=1000), "cut off"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
    ],
)
def test_other_answers_leave_the_older_file(answer, got, file, capsys):
    """Status 1, with the address and what came."""
    with answering(answer) as server:
        assert run(file, server) == 1
    message = capsys.readouterr().err
    assert got in message
    assert server in message
    assert file.read_bytes() == OLDER
    file.unlink()
    with answering(answer) as server:
        assert run(file, server) == 1
    assert not file.exists()


def test_the_error_of_another_server_is_a_line(file, capsys):
    """Without control characters for the terminal."""
    with answering(b"HTTP/1.1 404 Not Found\r\n\r\n\x1b[31mpaths:\n/a\n") as server:
        assert run(file, server) == 1
    message = capsys.readouterr().err
    assert "status 404:  [31mpaths: /a; check" in message
    assert message.count("\n") == 1


def test_a_recording_replaces_the_older_file(file):
    """Nothing of that is left."""
    lines = EXAMPLE.read_bytes()
    file.write_bytes(OLDER * len(lines))
    with answering(head(length=len(lines)) + lines) as server:
        assert run(file, server) == 0
    assert file.read_bytes() == lines


def test_a_recording_goes_to_standard_output(tmp_path, capfd, monkeypatch):
    """There is no file of the name -, as with the other commands."""
    monkeypatch.chdir(tmp_path)
    rows = EXAMPLE.read_bytes()
    with answering(head() + rows) as server:
        assert run("-", server) == 0
    output = capfd.readouterr()
    assert output.out.encode() == rows
    assert output.err.endswith(" rows on standard output\n")
    assert not list(tmp_path.iterdir())


def test_rows_reach_standard_output_as_they_come(capfd):
    """A reader of the pipe sees the first ones before the end of the recording."""
    outputs = []

    def pieces():
        yield b"a\n"
        outputs.append(capfd.readouterr().out)
        yield b"b\n"

    assert record.write_recording(Path("-"), pieces()) == 2
    assert outputs == ["a\n"]


def test_no_rows_leave_the_older_file(file, capsys):
    """A time without requests is no error."""
    with answering(head(length=0)) as server:
        assert run(file, server) == 0
    assert "nothing was written" in capsys.readouterr().err
    assert file.read_bytes() == OLDER


def test_no_rows_make_no_file(file):
    """A file that was not there is not there afterwards."""
    file.unlink()
    with answering(head(length=0)) as server:
        assert run(file, server) == 0
    assert not file.exists()


@pytest.mark.parametrize("length", [None, 10_000_000])
def test_rows_before_a_break_are_kept(length, file, capsys):
    """Complete ones: another recording may be appended."""
    complete = b"".join(EXAMPLE.read_bytes().splitlines(keepends=True)[:5])
    with answering(head(length=length) + complete + b'{"kind":"en') as server:
        assert run(file, server) == 1
    assert "cut off" in capsys.readouterr().err
    assert file.read_bytes() == complete


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_of_the_file(capsys):
    """The server is not to blame."""
    lines = EXAMPLE.read_bytes()
    with answering(head(length=len(lines)) + lines) as server:
        assert run("/dev/full", server) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "extproc: /dev/full: expected a file that can be written, got No space"
    )
    assert server not in message


def test_sigterm_ends_a_parquet_recording(tmp_path):
    """The end of the file is written, without which it cannot be read."""
    pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install '.[parquet]'")
    path, lines = tmp_path / "decisions.parquet", EXAMPLE.read_bytes()
    lines *= 20_000_000 // len(lines) + 1  # more than is held back in memory
    answer = head(length=len(lines) + 1) + lines
    with answering(answer, is_open=True) as server:
        words = [sys.executable, "-m", "extproc", "record", str(path), "--server", server]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as command:
            while command.poll() is None and not (path.exists() and path.stat().st_size):
                os.sched_yield()
            command.send_signal(signal.SIGTERM)
            _, message = command.communicate()
    assert command.returncode == 0, message
    assert "rows in" in message
    assert 0 < len(list(parquet.read_lines(path))) <= lines.count(b"\n")
