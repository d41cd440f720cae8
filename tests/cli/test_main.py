import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.cli import envoy_config, main
from extproc.scheduling import registry
from extproc.simulator import profiles


def test_help_names_every_command(capsys):
    """`extproc --help` lists all commands, whether or not they can be imported."""
    assert main.main(["--help"]) == 0
    output = capsys.readouterr().out
    for command in main.COMMANDS:
        assert f"\n    {command} " in output.replace(f"{command}\n", f"{command} ")


@pytest.mark.parametrize("command", ["serve", "check", "explain", "version", "engine"])
def test_every_command_has_help(command, capsys):
    """Each command explains itself."""
    assert main.main([command, "--help"]) == 0
    assert f"usage: extproc {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [[], ["sing"], ["--grpc-port", "1"], ["version", "--loud"], ["--x", "serve"]],
)
def test_usage_error_is_status_2(words, capsys):
    """A wrong command line ends with status 2 and says so on standard error."""
    assert main.main(words) == 2
    assert "extproc" in capsys.readouterr().err


def test_config_error_is_one_line_and_status_2(capsys):
    """A configuration error prints its message and no traceback."""
    assert main.main(["serve", "--endpoints", "10.0.0.1"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("extproc: --endpoints: endpoints[0]: expected ")
    assert output.err.count("\n") == 1
    assert not output.out


def test_serve_without_endpoints_is_refused(capsys):
    """A picker that could only refuse requests does not start."""
    assert main.main(["serve"]) == 2
    assert "expected endpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("demo --conversations x", "--conversations: expected a number from 1 to 1000000000, got"),
        ("demo --conversations 0", "--conversations: expected a number from 1 to 1000000000, got"),
        ("demo --seed x", "--seed: expected a whole number, got 'x'"),
        ("engine --port x", "--port: expected a whole number, got 'x'"),
        ("engine --speed x", "--speed: expected a number, got 'x'"),
        ("plan f --max-engines x", "--max-engines: expected a number from 1 to 10000, got 'x'"),
    ],
)
def test_a_flag_that_is_no_number_says_what_was_expected(words, expected, capsys):
    """The message has no name of a function of Python."""
    assert main.main(words.split()) == 2
    assert expected in capsys.readouterr().err


def test_version_is_printed(capsys):
    """The version and what it runs on are printed."""
    assert main.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("extproc ")


def test_version_imports_no_server():
    """A small command does not pay for the big ones."""
    code = (
        "import sys; from extproc.cli import main; main.main(['version']); "
        "print(sorted({'grpc', 'aiohttp', 'ssl', 'uvloop', 'yaml'} & set(sys.modules)))"
    )
    ran = subprocess.run(  # the interpreter itself, to see what it imports
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[]"


def test_version_flag_prints_the_same_version(capsys):
    """`--version` is what people try first."""
    assert main.main(["--version"]) == 0
    short = capsys.readouterr().out
    assert main.main(["version"]) == 0
    assert capsys.readouterr().out.startswith(short)


def test_a_misspelled_command_is_suggested(capsys):
    """The nearest command is named, and all of them."""
    assert main.main(["srve"]) == 2
    output = capsys.readouterr().err
    assert "did you mean serve?" in output
    assert "explain" in output


def test_help_shows_defaults_choices_and_examples(capsys, monkeypatch):
    """A flag says what it takes and what it is unless set; upstream's flags wait behind a flag."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main.main(["serve", "--help"]) == 0
    output = capsys.readouterr().out
    assert "ext_proc; 0 picks a free one (default: 9002)" in output
    assert "logged: debug, info, warning, error (default: info)" in output
    assert "scheduling strategy: " in output
    assert "(default: adaptive)" in output
    assert "--metrics-cert-dir" not in output
    assert main.main(["serve", "--help-all"]) == 0
    output = capsys.readouterr().out
    assert "--metrics-cert-dir" in output
    assert "Taken so that a Deployment need not be edited." in output
    assert main.main(["--help"]) == 0
    assert "examples:" in capsys.readouterr().out


def test_a_closed_pipe_gives_no_traceback():
    """`extproc check --plugins | head -1` ends quietly."""
    command = f"{sys.executable} -m extproc check --plugins | head -c 1"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("s", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["version", "--version", "--help", "explain --help"])
def test_output_that_cannot_be_written_is_status_1(words, unbuffered):
    """One line says so; a script must not take half a file for all of it."""
    command = f"PYTHONUNBUFFERED={unbuffered} {sys.executable} -m extproc {words} >/dev/full"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("extproc: expected an output that is open")
    assert ran.stderr.count("\n") == 1


def test_names_that_the_output_cannot_encode_are_escaped(tmp_path):
    """A terminal of ASCII shows a name in another script with escapes."""
    config = tmp_path / "m\u00e9.yaml"
    config.write_text(
        "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\npool: {endpoints: ['127.0.0.1:1']}\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [sys.executable, "-m", "extproc", "check", str(config)]
    ran = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    assert "m\\xe9.yaml" in ran.stdout


def test_a_caller_may_close_the_output():
    """A command goes on without it, as a server must."""
    command = f"{sys.executable} -m extproc version >&-"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert ran.stderr == ""


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_descriptors_that_the_caller_closed_are_not_taken(closed, tmp_path):
    """No socket gets a standard descriptor; an error of the configuration keeps its status."""
    code = (
        "import os, pathlib, sys; from extproc.cli import main; status = main.main(['srve']); "
        "free = os.open(os.devnull, os.O_RDONLY); "
        "pathlib.Path(sys.argv[1]).write_text(f'{status} {free > 2}')"
    )
    result = tmp_path / "result"
    command = f'{sys.executable} -c "{code}" {result} {closed}'
    subprocess.run(["sh", "-c", command], check=True)
    assert result.read_text() == "2 True"


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self):
        """It is one."""
        return True


def test_color_is_for_terminals(monkeypatch):
    """Pipes, NO_COLOR and dumb terminals get plain text."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main.paint("a", "red", Screen()) == "\x1b[31ma\x1b[0m"
    assert main.paint("a", "red", io.StringIO()) == "a"
    monkeypatch.setenv("TERM", "dumb")
    assert main.paint("a", "red", Screen()) == "a"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main.paint("a", "red", Screen()) == "a"


@pytest.mark.parametrize(
    ("name", "says"),
    [("binary", "expected UTF-8 text"), ("", "or a file, got ''"), ("nothing", "or a file")],
)
def test_only_a_readable_configuration_is_printed(tmp_path, name, says, capsys):
    """Another file than a shipped one may have anything in it."""
    (tmp_path / "binary").write_bytes(b"\xff")
    assert main.main(["envoy-config", name and str(tmp_path / name)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_flags(shell, capsys):
    """The script is made from the parsers."""
    pytest.importorskip("shtab", reason="the group dev of pyproject.toml has it")
    assert main.main(["completion", shell]) == 0
    output = capsys.readouterr().out
    assert "--fallback-endpoints" in output
    assert "envoy-config" in output


def test_completion_offers_files(capsys):
    """Values that the help calls FILE are completed from the folder."""
    pytest.importorskip("shtab", reason="the group dev of pyproject.toml has it")
    assert main.main(["completion", "bash"]) == 0
    output = capsys.readouterr().out
    assert "_shtab_extproc_serve___config_file_COMPGEN=_shtab_compgen_files" in output
    assert "_shtab_extproc_replay_pos_0_COMPGEN=_shtab_compgen_files" in output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("serve___transport", ["native", "grpcio"]),
        ("serve___log_level", ["debug", "info", "warning", "error"]),
        ("explain___strategy", list(registry.profiles())),
        ("replay___strategy", list(registry.profiles())),
        ("engine___profile", sorted(profiles.PROFILES)),
        ("envoy_config_pos_0", list(envoy_config.names())),
    ],
)
def test_completion_offers_the_words_of_a_closed_set(name, words, capsys):
    """They are those that the help and the errors list."""
    pytest.importorskip("shtab", reason="the group dev of pyproject.toml has it")
    assert main.main(["completion", "bash"]) == 0
    (quoted,) = re.findall(
        rf"^_shtab_extproc_{name}_choices=\((.*)\)$", capsys.readouterr().out, re.MULTILINE
    )
    assert shlex.split(quoted) == words


def test_completion_of_zsh_demands_no_optional_value(capsys):
    """A flag that may stand alone does so in the script."""
    pytest.importorskip("shtab", reason="the group dev of pyproject.toml has it")
    assert main.main(["completion", "zsh"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "--xds[" in line]
    assert lines
    assert not [line for line in lines if line.rstrip().endswith(':"')]


def test_completion_without_its_extra_names_the_extra(capsys, monkeypatch):
    """The hint is a command that works."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main.main(["completion", "bash"]) == 2
    assert "pip install 'extproc-epp[completion]'" in capsys.readouterr().err
