from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from extproc import errors
from extproc.simulator import engine_command, profiles
from extproc.simulator.http import kv_publisher, server

START = """
import argparse, sys
from extproc.simulator import engine_command
parser = argparse.ArgumentParser()
engine_command.add_flags(parser)
sys.exit(engine_command.run(parser.parse_args(sys.argv[1:])))
"""


def parsed(*flags):
    """The flags of `extproc engine`."""
    parser = argparse.ArgumentParser()
    engine_command.add_flags(parser)
    return parser.parse_args(flags)


def state(address):
    """The engine's counters."""
    with urllib.request.urlopen(f"http://{address}/admin/state") as reply:
        return reply.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_says_where_it_listens_and_stops_at_once_on_a_signal(number):
    """Port 0 picks a free port; with a request hanging, a signal still ends it with status 0."""
    command = [sys.executable, "-c", START, "--port", "0", "--fault", "hang,count=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[-1]
            with urllib.request.urlopen(f"http://{address}/health") as reply:
                assert reply.status == 200
            host, port = address.split(":")
            assert host == "127.0.0.1"
            with socket.create_connection((host, int(port))) as hanging:
                hanging.sendall(
                    b"POST /v1/completions HTTP/1.1\r\nhost: e\r\ncontent-length: 0\r\n\r\n"
                )
                while b'"in_flight": 1' not in state(address):
                    pass
                process.send_signal(number)
                assert process.wait(timeout=300) == 0
        finally:
            process.kill()


def test_flags_change_the_profile():
    """Numbers without a flag stay those of the profile."""
    wanted = engine_command.settings(
        parsed("--profile", "l4-8b-fp8", "--kv-tokens", "32000", "--lora", "a", "--lora", "b")
    )
    assert wanted.profile.kv_tokens == 32000
    assert wanted.profile.token_budget == 16384
    assert wanted.loras == ("a", "b")
    host = engine_command.settings(parsed("--host-kv-tokens", "64000", "--reload-us", "15"))
    assert (host.profile.host_kv_tokens, host.profile.reload_s_per_token) == (64000, 15e-6)


@pytest.mark.parametrize(
    "flags",
    [
        ["--profile", "nope"],
        ["--speed", "0"],
        ["--speed", "nan"],
        ["--speed", "inf"],
        ["--fault", "nope"],
        ["--fault", "slow=nan"],
        ["--fault", "slow=inf"],
        ["--fault", "hang,for=nan"],
        ["--token-budget", "1"],
        ["--output-tokens", "0"],
        ["--output-tokens", "-3"],
        ["--cold-start-s", "nan"],
        ["--coalesce-ms", "-1"],
        ["--keepalive-s", "inf"],
        ["--port", "70000"],
        ["--port", "-1"],
        ["--kv-events-port", "70000"],
        ["--kv-events-port", "-1"],
        ["--kv-events-port", "65535", "--ranks", "2"],
        ["--kv-replay-port", "5557"],
        ["--kv-events-port", "5557", "--kv-replay-port", "65536"],
        ["--kv-events-port", "5557", "--kv-replay-port", "5557"],
        ["--kv-events-port", "5557", "--kv-replay-port", "5558", "--ranks", "2"],
        ["--block-tokens", "0"],
        ["--block-tokens", "-1"],
        ["--max-num-seqs", "0"],
        ["--reload-us", "inf"],
        ["--reload-us", "1e300"],
        ["--kv-tokens", "1000000001"],
    ],
)
def test_bad_flags_are_refused_with_status_2(flags, capsys):
    """One line on stderr that names the flag's trouble."""
    args = parsed(*flags)
    with pytest.raises(errors.ConfigError):
        engine_command.settings(args)
    assert engine_command.run(args) == 2
    assert "expected" in capsys.readouterr().err


def test_a_taken_port_of_kv_events_is_refused_with_status_2(capsys):
    """One line that names the flag, also of the second rank's port, and no traceback."""
    pytest.importorskip("zmq", reason="the extra kv-events is not installed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags in (
            ["--kv-events-port", str(port)],
            ["--kv-events-port", str(port - 1), "--ranks", "2"],
        ):
            assert engine_command.run(parsed("--port", "0", *flags)) == 2
            error = capsys.readouterr().err
            assert "--kv-events-port: expected port" in error
            assert error.count("\n") == 1


async def test_events_are_published_on_ipv6_as_well():
    """As the HTTP server listens there."""
    pytest.importorskip("zmq", reason="the extra kv-events is not installed")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on loopback")
    wanted = server.EngineServerSettings(
        profile=profiles.PROFILES["demo"], kv_events=kv_publisher.KvPublisherSettings()
    )
    async with server.serving(wanted, host="::1") as started:
        for port in (started.publisher.port, started.publisher.replay_port):
            socket.create_connection(("::1", port)).close()
