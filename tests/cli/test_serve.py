import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.cli import main, serve

COMMAND = """
import os, sys
from extproc.cli import main, serve
from extproc.config import lint
print(serve.configure_grpc_core(), os.environ["GRPC_EXPERIMENTS"])
"""


@pytest.mark.parametrize(("preset", "then"), [(None, serve.EXPERIMENTS), ("tcp_x", "tcp_x")])
def test_environment_variables_override_grpc_experiments(monkeypatch, preset, then):
    """Defaults of gRPC apply only to variables that the environment does not set."""
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    if preset:
        monkeypatch.setenv("GRPC_EXPERIMENTS", preset)
    serve.configure_grpc_core()
    chosen = os.environ["GRPC_EXPERIMENTS"]
    monkeypatch.delenv("GRPC_EXPERIMENTS")
    assert chosen == then


def test_a_late_configuration_is_reported(monkeypatch):
    """A choice after gRPC was loaded says that it came too late."""
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    monkeypatch.setitem(sys.modules, "grpc", sys)
    assert not serve.configure_grpc_core()


def test_the_command_configures_grpc_before_import():
    """Nothing that `extproc serve` reads before it serves loads gRPC."""
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split()[0] == "True", ended


@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--grpc-port 7 --metrics-port 7",
            "--metrics-port: expected another port than that of --g",
        ),
        (
            "--xds --xds-port 9002",
            "--xds-port: expected another port than that of --grpc-port, got",
        ),
    ],
)
def test_listeners_that_share_a_port_are_refused(capsys, command, words, expected):
    """Both flags are named, and nothing listens."""
    assert main.main([command, "--endpoints", "10.0.0.1:1", *words.split()]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "serve"])
def test_authorities_that_cannot_be_read_are_refused(capsys, command):
    """Without them no engine would be scraped."""
    config = (
        "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"
        "scrape: {scheme: https, verify_tls: true, tls: {ca_file: /no/such/file}}"
    )
    words = [command, "--endpoints", "10.0.0.1:1", "--config-text", config]
    assert main.main(words) == 2
    assert "scrape.tls.ca_file: expected" in capsys.readouterr().err


def test_free_ports_and_listeners_that_are_off_share_none(capsys):
    """Each 0 is a port of its own."""
    words = "--grpc-port 0 --grpc-health-port 0 --metrics-port 7 --xds-port 7"
    assert main.main(["check", "--endpoints", "10.0.0.1:1", *words.split()]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_does_not_end_the_server():
    """A warning says so once; the server goes on until a signal ends it with status 0."""
    words = [sys.executable, "-m", "extproc", "serve", "--endpoints", "127.0.0.1:9"]
    words += ["--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]
    with (
        Path("/dev/full").open("w") as full,
        subprocess.Popen(words, stdout=full, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert any("standard output" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
            assert process.wait() == 0, rest
        finally:
            process.kill()
    assert "standard output" not in rest


def test_signals_of_the_start_are_handled(tmp_path):
    """SIGHUP is ignored while the configuration is read, and SIGTERM ends the process with status 0."""
    config = tmp_path / "config.yaml"
    os.mkfifo(config)
    words = [sys.executable, "-m", "extproc", "serve", "--config-file", str(config)]
    with subprocess.Popen(words) as process, config.open("w"):  # which waits for the reader
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
