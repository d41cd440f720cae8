import contextlib
import os
import resource

import pytest

from extproc.cli import serve
from extproc.config.decisions import DecisionsSection, RecordSection
from extproc.config.settings import Settings
from extproc.recording.recorder import RotatingFile


def contents(folder):
    """Files by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextlib.contextmanager
def files_of_at_most(size):
    """Let writes fail that make a file longer, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_files_move_on_and_the_oldest_goes(tmp_path):
    """There are never more files than wanted."""
    file = RotatingFile(str(tmp_path / "f"), max_bytes=3, max_files=2)
    assert [file.write(word) for word in (b"ab", b"cd", b"ef", b"gh", b"ij")] == [
        *(False, True, False, True, False)
    ]
    assert contents(tmp_path) == {"f": b"ij", "f.1": b"efgh"}
    file.close()


def test_a_file_from_before_moves_on(tmp_path):
    """A restart does not lose the recording before it."""
    (tmp_path / "f").write_bytes(b"old")
    file = RotatingFile(str(tmp_path / "f"), max_bytes=100, max_files=3)
    file.write(b"new")
    file.close()
    assert contents(tmp_path) == {"f": b"new", "f.1": b"old"}


def test_other_users_cannot_read_it(tmp_path):
    """Names of models and times appear in no other recording."""
    file = RotatingFile(str(tmp_path / "f"), max_bytes=100, max_files=1)
    file.write(b"x")
    file.close()
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_a_failed_write_begins_another_file(tmp_path):
    """The folder may come back."""
    folder = tmp_path / "gone"
    file = RotatingFile(str(folder / "f"), max_bytes=100, max_files=2)
    with pytest.raises(OSError, match="No such file"):
        file.write(b"x")
    folder.mkdir()
    assert not file.write(b"y")
    file.close()
    assert contents(folder) == {"f": b"y"}


def test_a_full_disk_costs_only_the_rows_that_do_not_fit(tmp_path):
    """Files from before stay, and so do the rows in front of the ones that were cut off."""
    file = RotatingFile(str(tmp_path / "f"), max_bytes=100, max_files=3)
    file.write(b"a" * 100)
    file.write(b"b" * 100)
    file.write(b"good\n")
    with files_of_at_most(8):
        for _ in range(5):
            with pytest.raises(OSError, match="File too large"):
                file.write(b"lost\n")
    assert not file.write(b"next\n")
    assert file.write(b"c" * 100)
    file.write(b"d\n")
    file.close()
    assert contents(tmp_path) == {
        "f": b"d\n",
        "f.1": b"good\nnext\n" + b"c" * 100,
        "f.2": b"b" * 100,
    }


def test_a_folder_that_comes_back_has_its_files(tmp_path):
    """A volume that is mounted late may hold a recording from before."""
    file = RotatingFile(str(tmp_path / "late" / "f"), max_bytes=100, max_files=2)
    with pytest.raises(OSError, match="No such file"):
        file.write(b"x")
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "f").write_bytes(b"old")
    file.write(b"new")
    file.close()
    assert contents(tmp_path / "late") == {"f": b"new", "f.1": b"old"}


def test_a_smaller_number_of_files_removes_the_others(tmp_path):
    """The bound on the disk holds after a restart with another one."""
    for max_files in (5, 2):
        file = RotatingFile(str(tmp_path / "f"), max_bytes=1, max_files=max_files)
        for _ in range(6):
            file.write(b"x")
    assert set(contents(tmp_path)) == {"f", "f.1"}


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_place_that_is_no_file_is_refused(tmp_path, make):
    """A picker does not start, rather than move a folder away or wait for the reader of a pipe."""
    path = str(tmp_path / "f")
    record = RecordSection(file=path)
    settings = Settings(decisions=DecisionsSection(record=record))
    assert not serve.find_problems(settings)
    make(path)
    (problem,) = serve.find_problems(settings)
    assert str(problem).startswith(f"{path}: expected a regular file")
