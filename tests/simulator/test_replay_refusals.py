"""Refusals of `extproc replay`, `tune` and `plan`, and where their results go."""

import json
import os

import pytest

from extproc.cli import main
from tests.docs import recording_example

EXAMPLE = str(recording_example.PATH)
COMMANDS = [["replay"], ["tune"], ["plan", "--slo", "ttft_p95=1s"]]


def refusal(capsys, *argv):
    """The error of a command that ends with status 2."""
    try:
        status = main.main(list(argv))
    except SystemExit as error:
        status = error.code
    assert status == 2
    return capsys.readouterr().err


def changed_example(tmp_path, change):
    """The recording of the documentation with every row changed."""
    path = tmp_path / "decisions.jsonl"
    rows = [json.loads(line) for line in recording_example.PATH.read_bytes().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("kv_tokens=inf", "expected NAME=NUMBER"),
        ("kv_tokens=327.5", "expected a whole number, got 327.5"),
        ("block_tokens=0", "expected block_tokens from 1 to"),
        ("block_tokens=32", "expected block_tokens of 16"),
        ("max_num_seqs=-1", "expected max_num_seqs from 1 to"),
    ],
)
def test_numbers_that_engines_cannot_have_are_refused(capsys, command, number, words):
    """The error names the number."""
    assert words in refusal(capsys, *command, EXAMPLE, "--engine", number)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recording_without_candidates_has_no_engines(tmp_path, capsys, command):
    """The error is not that requests are too long for them."""
    path = changed_example(tmp_path, lambda row: row.pop("candidates", None))
    assert "expected endpoints with scraped loads, got none" in refusal(capsys, *command, str(path))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recording_with_stages_is_not_simulated(tmp_path, capsys, command):
    """Simulated engines compute requests as a whole."""

    def split(row):
        if "settings" in row:
            profile = {"picker": {"kind": "random"}}
            decider = {"kind": "always-disagg-pd-decider"}
            prefill = {"profile": profile, "decider": decider}
            row["settings"]["scheduling"]["disaggregation"] = {"prefill": prefill}

    path = changed_example(tmp_path, split)
    assert "got prefill on other endpoints than decode" in refusal(capsys, *command, str(path))


@pytest.mark.parametrize("objective", ["tpot_mean=1s", "itl_p95=1s"])
def test_answers_of_one_token_have_no_time_between_tokens(tmp_path, capsys, objective):
    """No fleet would be enough for such an objective."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n')
    argv = ["plan", str(path), "--profile", "l4-8b-fp8", "--seeds", "1", "--jobs", "1"]
    words = f"got {objective}, and no answer has a second token"
    assert words in refusal(capsys, *argv, "--slo", objective, "--slo", "ttft_p95=9s")


@pytest.mark.parametrize("command", COMMANDS)
def test_seeds_have_a_most(capsys, command):
    """A list of them has room in the memory."""
    words = "expected a number from 1 to 10000"
    assert words in refusal(capsys, *command, EXAMPLE, "--seeds", str(10**22))


@pytest.mark.parametrize("command", [["replay"], ["plan", "--slo", "ttft_p95=1s"]])
def test_json_can_be_alone_on_standard_output(tmp_path, monkeypatch, capsys, command):
    """Text goes to standard error, and no file is named `-`."""
    monkeypatch.chdir(tmp_path)
    assert main.main([*command, EXAMPLE, "--seeds", "1", "--jobs", "1", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)
    assert "Estimates:" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_is_refused(tmp_path, capsys, command):
    """It would be empty when it is read again; nobody waits for its other end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "expected a regular file" in refusal(capsys, *command, str(pipe))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_gap_of_days_is_refused(tmp_path, capsys, command):
    """It would be simulated for minutes."""

    def delay(row):
        if row["kind"] == "decision" and row["n"] > 50:
            row["at"] += 3 * 86_400.0

    path = changed_example(tmp_path, delay)
    words = "expected requests at most 24 hours apart, got a gap of 72 hours"
    assert words in refusal(capsys, *command, str(path))


def test_a_first_token_may_come_at_once(tmp_path, capsys):
    """Nothing is divided by its time."""

    def show_at_once(row):
        if row["kind"] == "end":
            row["ttft_s"] = 0.0

    path = changed_example(tmp_path, show_at_once)
    assert main.main(["replay", str(path), "--seeds", "1", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "Fidelity: unknown" in out
    assert "original-dst-buffered" in out
