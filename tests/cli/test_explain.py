import io
import json
import re

import pytest

from extproc.cli import explain, main
from tests.cli.explain_inputs import BODY, CONFIG, STATE, told_by

TABLES = """\
request: chat, model sql, about 426 prompt tokens
profile: strict

CANDIDATE HEALTH AGE s WAITING RUNNING KV IN FLIGHT REQUESTS CACHED QUEUED ADAPTERS
10.0.0.1:8000 ok 0.50 3 12 0.40 5 15 0 1500 sql
10.0.0.2:8000 ok 0.00 0 2 0.10 0 2 0 0 -
10.0.0.3:8000 ok ? 2 7 0.25 1 7 0 750 ?

FILTER LEFT DROPPED
max-waiting 2 10.0.0.1:8000

SCORE queue-scorer x2 in-flight x1 TOTAL ORDER
10.0.0.2:8000 1.000 = 2.000 1.000 = 1.000 3.000 1
10.0.0.3:8000 0.000 = 0.000 0.667 = 0.667 0.667 2

chosen by max-score-picker: 10.0.0.2:8000, then 10.0.0.3:8000; runner-up: 10.0.0.3:8000
"""


def test_tables_of_a_case(files, capsys):
    """Candidates with ages, filter survivors, raw and weighted scores and the pick are shown."""
    output = told_by(
        capsys, files["body"], "--state", files["state"], "--config-file", files["config"]
    )
    assert re.sub(" +", " ", output) == TABLES


def test_matched_tokens_reach_the_prefix_scorer(files, capsys):
    """Tokens that the state lists as cached count as matched, in full blocks."""
    output = json.loads(
        told_by(
            capsys, files["body"], "--state", files["state"], "--strategy", "balanced", "--json"
        )
    )
    matched = [candidate["matched_tokens"] for candidate in output["candidates"]]
    assert matched == [256, 0, 0]
    at = [scorer["name"] for scorer in output["scorers"]].index("prefix-cache-scorer")
    assert output["scored_candidates"][0]["raw"][at] == pytest.approx(
        256 / output["request"]["prompt_tokens"]
    )


def test_names_of_clients_do_not_steer_the_terminal(files, capsys, tmp_path):
    """A model whose name has control characters and line ends forges no line."""
    body = tmp_path / "other"
    body.write_text(json.dumps({"model": "a\x1b[31m\nchosen by x", "prompt": "x"}))
    words = [str(body), "--state", files["state"], "--path", "/v1/completions"]
    output = told_by(capsys, *words)
    assert "model a [31m chosen by x," in output
    assert "\x1b" not in output
    assert (
        json.loads(told_by(capsys, *words, "--json"))["request"]["model"]
        == "a\x1b[31m\nchosen by x"
    )


def test_strategy_decides(files, capsys):
    """Another strategy may be tried in the same situation."""
    output = told_by(capsys, files["body"], "--state", files["state"], "--strategy", "round-robin")
    assert "chosen by round-robin: 10.0.0." in output


def test_request_from_standard_input(files, capsys, monkeypatch):
    """Without a file the request comes from standard input."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BODY.encode())))
    assert "model sql" in told_by(capsys, "--state", files["state"])


def test_path_and_headers_select_the_surface(files, capsys, tmp_path):
    """The path chooses the surface."""
    body = tmp_path / "other"
    body.write_text('{"model": "m", "prompt": "x", "stream": true}')
    output = told_by(
        capsys, str(body), "--state", files["state"], "--path", "/v1/completions", "--header", "a=b"
    )
    assert "request: completions, model m" in output
    assert "streamed" in output


def test_an_unparsed_body_is_explained_by_headers_and_load(files, capsys, tmp_path):
    """A broken body is routed where bodies are not parsed."""
    body, config = tmp_path / "broken", tmp_path / "unparsed"
    body.write_text("{")
    config.write_text(CONFIG + "parse_bodies: false\n")
    output = told_by(capsys, str(body), "--state", files["state"], "--config-file", str(config))
    assert "request: opaque" in output
    assert "chosen by max-score-picker: 10.0.0.2:8000" in output


@pytest.mark.parametrize(
    ("body", "state", "expected"),
    [
        ("{", STATE, "refused with 400"),
        (BODY, "endpoints: []", "refused with 503"),
    ],
)
def test_rejection_is_explained(body, state, expected, tmp_path, capsys):
    """A request that would be refused is an answer like any other."""
    (tmp_path / "body").write_text(body)
    (tmp_path / "state").write_text(state)
    words = [str(tmp_path / "body"), "--state", str(tmp_path / "state")]
    assert expected in told_by(capsys, *words, status=3)


@pytest.mark.parametrize(
    ("state", "where", "fix"),
    [
        ("endpoints: [{adress: 'a:1'}]", "endpoints[0].adress", "did you mean address?"),
        ("endpoints: [{address: 'a:1', kv_usage: 2}]", "endpoints[0].kv_usage", "change"),
        ("endpoints: [{address: 'a:1', waiting: .inf}]", "endpoints[0].waiting", "change"),
        ("endpoints: [{address: 'a:1'}, {address: 'a:1'}]", "state", "remove one"),
        ("[", "state", "syntax"),
    ],
)
def test_broken_state_is_status_2(state, where, fix, files, tmp_path, capsys):
    """A state that cannot be is refused with its place."""
    path = tmp_path / "state"
    path.write_text(state)
    assert main.main(["explain", files["body"], "--state", str(path)]) == 2
    output = capsys.readouterr().err
    assert where in output
    assert fix in output


@pytest.mark.parametrize(
    "words",
    [
        ["nofile", "--state", "nostate"],
        ["--header", "a", "--state", "nostate"],
        ["--header", "a=b\r\nc: d", "--state", "nostate"],
        ["--header", ":authority=a", "--state", "nostate"],
        ["--state", ""],
        ["--path", "/v1/a\nb: c", "--server", "127.0.0.1:1"],
        ["--server", "127.0.0.1:1", "--strategy", "random"],
    ],
)
def test_wrong_flags_are_status_2(words, files, capsys):
    """A wrong flag or path is status 2."""
    arguments = words if words[0] == "nofile" else [files["body"], *words]
    assert main.main(["explain", *arguments]) == 2
    assert "expected" in capsys.readouterr().err


HEALTH = """
endpoints:
  - {address: "10.0.0.1:8000", health: ejected, cause: errors, out_s: 4}
  - {address: "10.0.0.2:8000"}
"""


def test_health_is_shown_with_cause_and_time(files, tmp_path, capsys):
    """An endpoint that is left out has a line, and a pool that fails as a whole is named."""
    state = tmp_path / "health"
    state.write_text(HEALTH)
    output = told_by(capsys, files["body"], "--state", str(state), "--legend")
    assert "10.0.0.1:8000 ejected for 4 s: errors" in re.sub(" +", " ", output)
    assert "ORDER      1 is the chosen endpoint" in output
    table, _, legend = output.rpartition("\n\n")
    (head,) = [line for line in table.splitlines() if line.startswith("COST ms")]
    meanings = {line.partition("  ")[0] for line in legend.splitlines()}
    assert {"queue", "waste", *head.split()[2:]} <= meanings
    assert "all endpoints" not in output
    state.write_text(HEALTH.replace('.2:8000"', '.2:8000", health: ejected, cause: hung'))
    output = told_by(capsys, files["body"], "--state", str(state))
    assert "10.0.0.2:8000 ejected: hung" in re.sub(" +", " ", output)
    assert "all endpoints are failing; the least bad is tried" in output


def test_a_state_of_many_failures_is_explained(files, tmp_path, capsys):
    """An engine that is away for weeks is down, as after some failures."""
    state = tmp_path / "state"
    state.write_text(
        HEALTH.replace("health: ejected, cause: errors, out_s: 4", "failures: 1000000000")
    )
    output = told_by(capsys, files["body"], "--state", str(state))
    assert "chosen by rendezvous: 10.0.0.2:8000" in output


def test_a_page_that_stands_still_counts_as_the_mean(files, tmp_path, capsys):
    """A server ignores it, so that an endpoint is not chosen for a load of the past."""
    state = tmp_path / "state"
    state.write_text(
        "endpoints: [{address: '10.0.0.1:8000', distrusted: frozen, waiting: 0, running: 1}, "
        "{address: '10.0.0.2:8000', waiting: 4, running: 6}]"
    )
    output = told_by(
        capsys, files["body"], "--state", str(state), "--strategy", "least-queue", "--json"
    )
    loads = [candidate["waiting"] for candidate in json.loads(output)["candidates"]]
    assert loads == [4.0, 4.0]


def test_an_endpoint_that_is_down_is_no_candidate(files, tmp_path, capsys):
    """A state written by hand needs no count of failures for it."""
    state = tmp_path / "state"
    state.write_text(HEALTH.replace("health: ejected, cause: errors, out_s: 4", "health: down"))
    output = told_by(capsys, files["body"], "--state", str(state), "--json")
    assert json.loads(output)["excluded_by_health"] == {"failing": ["10.0.0.1:8000"]}


def test_an_empty_request_is_status_2(files, tmp_path, capsys, monkeypatch):
    """No request is not a request without a model."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" ")))
    (tmp_path / "empty.json").write_bytes(b"\n")
    for words, where in (([], "standard input"), ([str(tmp_path / "empty.json")], "empty.json")):
        assert main.main(["explain", *words, "--state", files["state"]]) == 2
        wanted = f"{where}: expected the JSON body of a request, got nothing"
        assert wanted in capsys.readouterr().err


def test_a_closed_standard_input_is_status_2(files, capsys, monkeypatch):
    """As `<&-` leaves it."""
    monkeypatch.setattr("sys.stdin", None)
    assert main.main(["explain", "--state", files["state"]]) == 2
    assert "standard input" in capsys.readouterr().err


def test_an_empty_id_is_status_2(capsys):
    """A shell variable that is empty names no request."""
    assert main.main(["explain", "--id", ""]) == 2
    assert capsys.readouterr().err.startswith("extproc: --id: expected the id of a request")


def test_an_empty_state_is_status_2(files, capsys):
    """The error names the flag."""
    assert main.main(["explain", files["body"], "--state", ""]) == 2
    assert capsys.readouterr().err.startswith("extproc: --state: expected a file with endpoints")


def test_a_misspelled_strategy_names_its_flag(files, capsys):
    """The error names what the user wrote."""
    words = ["explain", files["body"], "--state", files["state"], "--strategy", "adaptve"]
    assert main.main(words) == 2
    output = capsys.readouterr().err
    assert output.startswith("extproc: --strategy: ")
    assert "did you mean adaptive?" in output


def test_watch_shows_until_it_is_interrupted(capsys):
    """A server that is away for a moment, or had no request yet, does not end it."""
    rounds = []
    errors = [explain.UnreachableError, explain.NotRecordedError]

    def show():
        rounds.append(1)
        if errors:
            raise errors.pop()(wanted="a", got="b", fix="c")
        return 0

    def wait(seconds):
        assert seconds == 3.0
        if len(rounds) == 3:
            raise KeyboardInterrupt

    assert explain.watch(show, every_s=3.0, wait=wait) == 0
    assert len(rounds) == 3
    assert "extproc: " in capsys.readouterr().err


def test_a_watch_that_is_interrupted_while_it_asks_ends_as_well():
    """Ctrl-C is its end, whatever it does at that moment."""

    def show():
        raise KeyboardInterrupt

    assert explain.watch(show, every_s=3.0, wait=print) == 0
