"""The wheel: it holds all that the commands need, and runs without the checkout."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import tomllib
import zipfile

import pytest

from extproc import distribution
from extproc.cli import envoy_config
from tests.manifests import tools

PROJECT = tomllib.loads((tools.ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory):
    """The folder of an unpacked wheel, built from the checkout without a network."""
    pytest.importorskip("hatchling", reason="the group dev of pyproject.toml has it")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=tools.ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "target"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def environment(unpacked, **more):
    """Variables under which Python imports from the wheel; hatchling may be on the old path."""
    return {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1", **more}


def run(unpacked, folder, *words):
    """Output of a command of the wheel."""
    ran = subprocess.run(
        [sys.executable, "-m", "extproc", *words],
        cwd=folder,
        env=environment(unpacked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_name_is_that_of_the_project():
    """Hints name the distribution and extras that exist."""
    assert PROJECT["name"] == distribution.NAME
    named = set()
    for path in (tools.ROOT / "extproc").rglob("*.py"):
        text = path.read_text()
        named |= set(re.findall(r"install_command\(\s*['\"]([\w-]+)", text))
        assert "pip install" not in text or path.name == "distribution.py", path
    assert named <= set(PROJECT["optional-dependencies"])
    assert named


def test_the_wheel_has_a_version_and_the_command(unpacked, tmp_path):
    """The metadata are found under the name of the distribution."""
    assert run(unpacked, tmp_path, "version").startswith(f"extproc {PROJECT['version']}\n")
    (points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "extproc = extproc.cli.main:main" in points.read_text()


def test_the_wheel_holds_the_envoy_files(unpacked, tmp_path):
    """Each file of `envoy/` is listed and printed byte for byte."""
    listed = run(unpacked, tmp_path, "envoy-config")
    assert [line.split()[0] for line in listed.splitlines()] == envoy_config.names()
    for name in envoy_config.names():
        text = (tools.ROOT / "envoy" / f"{name}.yaml").read_text()
        assert run(unpacked, tmp_path, "envoy-config", name) == text
    assert {path.stem for path in (tools.ROOT / "envoy").iterdir()} == set(envoy_config.names())


@pytest.mark.slow
@pytest.mark.e2e
async def test_the_demo_runs_from_the_wheel(unpacked, tmp_path):
    """In any folder, the demo of the wheel serves its requests through Envoy."""
    demo = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "demo", "--conversations", "4"),
        cwd=tmp_path,
        env=environment(unpacked, PYTHONUNBUFFERED="1", TMPDIR=str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    text = ""
    while "20/20" not in text:
        line = await demo.stdout.readline()
        assert line, text
        text += line.decode()
    demo.send_signal(signal.SIGTERM)
    await demo.communicate()
    assert demo.returncode == 128 + signal.SIGTERM  # before the result


def test_the_upstream_plugin_types_are_in_the_wheel(unpacked, tmp_path):
    """A file of the upstream picker is read without the checkout."""
    (tmp_path / "epp.yaml").write_text(
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
        "plugins: [{type: queue-scorer}, {type: prefix-aware-scorer}]\n"
    )
    report = run(unpacked, tmp_path, "check", "epp.yaml")
    assert "prefix-aware-scorer is deprecated" in report
