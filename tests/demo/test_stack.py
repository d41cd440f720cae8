from __future__ import annotations

import asyncio
import os
import pathlib
import sys
from collections import deque

import pytest

from extproc.cli import envoy_config, main
from extproc.demo import stack
from extproc.errors import ConfigError


def test_a_port_that_another_process_was_given_is_not_given(monkeypatch):
    """Its server may not have bound it yet."""
    taken, other = stack.free_port(), stack.free_port()
    stack._claims.pop().close()
    monkeypatch.setattr(stack, "_recent_ports", deque())  # as in another process
    monkeypatch.setattr(stack, "_PORTS", [taken] * 1000 + [other])
    assert stack.free_port() == other


def test_matches_are_bounded():
    descriptors = pathlib.Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(stack.MAX_CLAIMS + 10):
        stack.free_port()
    assert len(list(descriptors.iterdir())) <= before + stack.MAX_CLAIMS


def test_a_variable_that_names_no_envoy_is_an_error(monkeypatch):
    """The error names the variable and the path."""
    monkeypatch.setenv("EXTPROC_ENVOY", "/nonexistent/envoy")
    with pytest.raises(ConfigError, match="EXTPROC_ENVOY: expected an Envoy binary, got /nonex"):
        stack.find_envoy()


def test_the_last_lines_of_a_child_stay_lines(capsys):
    """A traceback in a row could not be read; control characters steer no terminal."""
    argv = [sys.executable, "-c", r"print('Traceback:\n  port in \x1b[31muse')"]
    with pytest.raises(ConfigError) as raised:
        asyncio.run(stack.Child.start("engine", argv, ready="listening"))
    main.print_error(raised.value)
    assert capsys.readouterr().err == (
        "extproc: engine: expected a line with 'listening' before its end, got other lines; look at "
        "the last ones below\nTraceback:\n  port in  [31muse\n"
    )


def test_a_line_of_any_length_hides_none_after_it():
    """Errors of Envoy may quote a configuration in one line."""
    code = "print('x' * 1_000_000); print('listening')"

    async def run():
        child = await stack.Child.start("child", [sys.executable, "-c", code], ready="listening")
        await child.stop()
        return child.ready_line

    assert asyncio.run(run()) == "listening"


def test_a_child_whose_start_is_cancelled_ends(tmp_path):
    """Its stack has not heard of it, and could not stop it."""
    file = tmp_path / "pid"
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); print('on'); time.sleep(300)"
    lines = []

    async def run():
        async with stack.stack(log=lines.append) as children:
            starting = asyncio.ensure_future(
                children.start("child", [sys.executable, "-c", code], ready="never")
            )
            while not lines:
                await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting

    asyncio.run(run())
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_children_that_end_are_reported():
    """With exit code and last line, or with the signal that ended them."""
    reported = []

    async def run():
        async with stack.stack() as children:
            code = "print('ready'); print('port in use'); raise SystemExit(3)"
            await children.start("envoy", [sys.executable, "-c", code], ready="ready")
            code = "import time; print('ready'); time.sleep(300)"
            engine = await children.start("engine", [sys.executable, "-c", code], ready="ready")
            engine.address = "127.0.0.1:1"
            engine.process.kill()
            await children.watch(lambda child: reported.append(child.describe_end()))

    asyncio.run(run())
    assert sorted(reported) == [
        "engine 127.0.0.1:1 ended with SIGKILL: ready",
        "envoy ended with exit code 3: port in use",
    ]


#: An Envoy configuration with one listener and any clusters.
ENVOY = """
admin: {address: {socket_address: {port_value: 1}}}
static_resources:
  listeners: [{address: {socket_address: {port_value: 2}}%s}]
  clusters: %s
"""


@pytest.mark.parametrize(
    ("text", "difference"),
    [
        ("a: 1", "without an admin"),
        ("x: [", "is no YAML"),
        ("[]", "is no mapping"),
        (ENVOY % ("", "[]"), "a listener with filters"),
        (ENVOY % (", filter_chains: [{filters: [{name: x}]}]", "[]"), "a listener with filters"),
        (ENVOY % (", filter_chains: []", "[{type: EDS}]"), "named clusters"),
    ],
)
def test_an_envoy_file_unlike_the_shipped_ones_is_an_error(tmp_path, text, difference):
    """The error names the file and what it lacks."""
    file = tmp_path / "envoy.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=difference):
        stack.envoy_config(file, stack.EnvoyPorts(1, 2, 3))


@pytest.mark.parametrize("name", ["original-dst", "override-host-eds"])
def test_the_access_log_of_a_shipped_file_is_written_to_a_file(tmp_path, name):
    """With the lines that it has on stdout; without a file there is none."""
    template = envoy_config.find(name, where="test")
    ports = stack.EnvoyPorts(1, 2, 3)

    def find_loggers(**options):
        config = stack.envoy_config(template, ports, **options)
        (chain,) = config["static_resources"]["listeners"][0]["filter_chains"]
        return chain["filters"][0]["typed_config"].get("access_log")

    assert find_loggers() is None
    (shipped,) = find_loggers(has_access_log=True)
    (moved,) = find_loggers(access_log=tmp_path / "access.log")
    assert moved["typed_config"]["path"] == str(tmp_path / "access.log")
    assert moved["typed_config"]["@type"].endswith(".file.v3.FileAccessLog")
    assert moved["typed_config"]["log_format"] == shipped["typed_config"]["log_format"]


def test_dynamic_resources_of_another_form_ask_for_no_xds(tmp_path):
    """Envoy names what is wrong with them."""
    file = tmp_path / "envoy.yaml"
    file.write_text("dynamic_resources: [ads_config]")
    assert not stack.asks_for_xds(file)
