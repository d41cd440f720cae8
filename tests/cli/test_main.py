import subprocess
import sys

import pytest

from extproc.cli import main


def test_help_names_every_command(capsys):
    """`extproc --help` lists all commands, whether or not they can be imported."""
    assert main.main(["--help"]) == 0
    told = capsys.readouterr().out
    for command in main.COMMANDS:
        assert f"\n    {command} " in told.replace(f"{command}\n", f"{command} ")


@pytest.mark.parametrize("command", ["serve", "check", "explain", "version", "engine"])
def test_every_command_has_help(command, capsys):
    """Each command explains itself."""
    assert main.main([command, "--help"]) == 0
    assert f"usage: extproc {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [[], ["sing"], ["--grpc-port", "1"], ["version", "--loud"], ["explain"], ["--x", "serve"]],
)
def test_usage_error_is_status_2(words, capsys):
    """A wrong command line ends with status 2 and says so on standard error."""
    assert main.main(words) == 2
    assert "extproc" in capsys.readouterr().err


def test_config_error_is_one_line_and_status_2(capsys):
    """A configuration error prints its message and no traceback."""
    assert main.main(["serve", "--endpoints", "10.0.0.1"]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("extproc: --endpoints: endpoints[0]: wanted ")
    assert told.err.count("\n") == 1
    assert not told.out


def test_serve_without_endpoints_is_refused(capsys):
    """A picker that could only refuse requests does not start."""
    assert main.main(["serve"]) == 2
    assert "wanted endpoints" in capsys.readouterr().err


def test_version_is_printed(capsys):
    """The version and what it runs on are printed."""
    assert main.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("extproc ")


def test_version_imports_no_server():
    """A small command does not pay for the big ones."""
    code = (
        "import sys; from extproc.cli import main; main.main(['version']); "
        "print(sorted({'grpc', 'aiohttp', 'uvloop', 'yaml'} & set(sys.modules)))"
    )
    ran = subprocess.run(  # the interpreter itself, to see what it imports
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[]"
