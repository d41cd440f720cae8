import os
import resource
from pathlib import Path

import pytest

from extproc.cli import main
from extproc.errors import ConfigError
from extproc.simulator import simulate_command


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["simulate", "{none}", "--quiet", "--json", "{none}/a.json"], "none/a.json"),
        (["simulate", "{none}", "--plots", "{file}/plots"], "file/plots"),
        (["simulate", "{none}", "--plots", "{none}", "--json", "{none}/b/a.json"], "none/b/a.json"),
        (["replay", "{none}", "--html", "{folder}"], "folder"),
        (["simulate", "{none}", "--html", "{folder}"], "folder"),
        (["replay", "{none}", "--json", "{file}/a"], "file/a"),
        (["plan", "{none}", "--slo", "ttft_p95=1s", "--plots", "{file}/a"], "file/a"),
        (["tune", "{none}", "--json", "{none}/a.json"], "none/a.json"),
    ],
)
def test_results_that_cannot_be_written_are_refused_before_the_work(words, path, tmp_path, capsys):
    """Not after it, when they are lost; even the input has not been read."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    places = {name: str(tmp_path / name) for name in ("none", "file", "folder")}
    assert main.main([word.format(**places) for word in words]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"extproc: {tmp_path / path}: expected a f")
    assert "that can be written, got " in message


def test_devices_and_new_folders_are_fit_for_results(tmp_path):
    """They are opened, or made, when the results are written."""
    simulate_command.require_outputs(Path("-"), Path("/dev/stdout"), Path("/dev/null"), None)
    folder = tmp_path / "plots" / "all"
    for path in (tmp_path, folder, folder.parent):
        simulate_command.require_outputs(path / "a.json", folder=folder)


@pytest.fixture
def small_disk():
    """No file grows beyond 64 kB, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_disk")
def test_results_are_written_whole_or_not_at_all(tmp_path):
    """A file of earlier results outlives a full disk, and no part of a new one is left."""
    path = tmp_path / "result.json"
    simulate_command.write(path, b"earlier")
    with pytest.raises(ConfigError, match=r"result\.json: expected a file that can be written"):
        simulate_command.write(path, bytes(100_000))
    with pytest.raises(ConfigError):
        simulate_command.write(tmp_path / "other.json", bytes(100_000))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [
        ("result.json", b"earlier")
    ]


def test_results_can_be_written_to_a_pipe(tmp_path):
    """A file that is no regular one keeps its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        simulate_command.write(pipe, b"result")
        assert os.read(descriptor, 100) == b"result"
    finally:
        os.close(descriptor)
