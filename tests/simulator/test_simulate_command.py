import contextlib
import io
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.cli import main
from extproc.errors import ConfigError
from extproc.simulator import simulate_command, simulation_runs
from extproc.simulator.fleet import report

EXAMPLE = Path(__file__).parents[2] / "bench/scenarios/example.yaml"

SMALL = """
title: small
fleet: [{count: 2, profile: demo}]
workload: {kind: independent, requests: 30, prompt: {mean: 100}, output: {mean: 10}}
client: {users: 4}
strategies:
  - round-robin
  - {name: mine, config: mine.yaml}
  - {name: fast, config: mine.yaml, settings: {scrape: {busy_interval_s: 0.1}}, strategy: adaptive}
  - clairvoyant
seeds: [1, 2]
"""

MINE = """
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scrape: {busy_interval_s: 0.5}
scheduling: {strategy: least-request}
"""

THEIRS = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins: [{type: queue-scorer}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]
"""

TRACE = """
workload: {kind: trace, format: azure, file: $MY_TRACES/azure.csv}
"""

ROWS = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.6805900,374,44
"""


@pytest.fixture
def small(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINE)
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


def planned(path, *, strategies=(), configs=(), seeds=()):
    return simulation_runs.plan(path, strategies=strategies, configs=configs, seeds=seeds)


def test_a_scenario_becomes_a_table(small, capsys):
    """One column for each strategy of the file; the progress is not in the output."""
    assert main.main(["simulate", str(small), "--jobs", "1", "--baseline", "round-robin"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "small: means over 2 seeds, ± half of the 95 % interval"
    assert lines[2].split() == ["round-robin", "mine", "fast", "clairvoyant"]
    assert any(line.startswith("Successful requests") for line in lines)
    assert "Ratio to round-robin" in out
    assert "by reason" not in out
    verdicts = [line for line in lines if line.startswith("Verdict: ")]
    assert [verdict.split()[1] for verdict in verdicts] == ["mine", "fast", "clairvoyant"]
    assert all(verdict.endswith("over 2 seeds") for verdict in verdicts)
    assert err.startswith("8 runs in ")


def test_one_seed_has_no_verdict(small, capsys):
    """Nothing shows what is noise."""
    argv = ["simulate", str(small), "--jobs", "1", "--seeds", "1", "--baseline", "round-robin"]
    assert main.main(argv) == 0
    assert "Verdict: none, as one seed" in capsys.readouterr().out


def test_failures_have_reasons(small, capsys):
    """A count for each reason, and a strategy that fails more is no better."""
    small.write_text(SMALL.replace("client: {users: 4}", "client: {users: 4, timeout_s: 0.05}"))
    argv = ["simulate", str(small), "--jobs", "1", "--strategy", "random"]
    assert main.main(argv) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("Failed requests by reason"))
    assert lines[place + 1].split()[0] == "timeout"


def test_a_page_has_the_text_and_the_plots(small, tmp_path):
    """It needs no other file."""
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    argv = ["simulate", str(small), "--jobs", "1", "--baseline", "round-robin", "--quiet"]
    assert main.main([*argv, "--html", str(page)]) == 0
    text = page.read_text()
    assert "Verdict: " in text
    assert text.count("<svg") >= 4
    assert "src=" not in text


def test_processes_give_the_numbers_one_process_gives(small, tmp_path):
    """The number of processes does not change the results."""
    written = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        argv = ["simulate", str(small), "--jobs", jobs, "--json", str(path), "--quiet"]
        assert main.main([*argv, "--strategy", "mine", "--strategy", "random"]) == 0
        written.append(path.read_bytes())
    assert written[0] == written[1]
    tree = json.loads(written[0])
    assert [(run["strategy"], run["seed"]) for run in tree["runs"]] == [
        ("mine", 1),
        ("mine", 2),
        ("random", 1),
        ("random", 2),
    ]


def test_quiet_says_nothing(small, capsys):
    """For scripts that read the JSON."""
    assert main.main(["simulate", str(small), "--seeds", "1", "--jobs", "1", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_variants_are_configurations_with_something_put_over(small):
    """The file first, then the sections of the scenario, then the word."""
    mine, fast = planned(small, strategies=["mine", "fast"]).columns
    assert mine.settings.scheduling.strategy == "least-request"
    assert mine.settings.scrape.busy_interval_s == 0.5
    assert fast.settings.scheduling.strategy == "adaptive"
    assert fast.settings.scrape.busy_interval_s == 0.1


def test_encode_on_other_endpoints_is_refused(small):
    """Simulated engines transfer KV caches, and no embeddings."""
    split = small.parent / "split.yaml"
    text = (
        "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"
        "scheduling: {disaggregation: {STAGE: {profile: {cost: {kind: estimated-time}}}}}\n"
    )
    split.write_text(text.replace("STAGE", "encode"))
    with pytest.raises(ConfigError, match="got encode on other endpoints than decode; remove"):
        planned(small, strategies=["round-robin"], configs=[split])
    split.write_text(text.replace("STAGE", "prefill"))
    assert planned(small, strategies=["round-robin"], configs=[split])


def test_plugins_that_simulations_have_nothing_for_are_a_warning(small):
    """Simulated requests have no headers."""
    sticky = small.parent / "sticky.yaml"
    sticky.write_text(
        "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"
        "scheduling: {profile: {scorers: [{kind: session-affinity-scorer}, {kind: in-flight}]}}\n"
    )
    columns = planned(small, strategies=["round-robin"], configs=[sticky]).columns
    assert [column.warnings for column in columns] == [
        (),
        ("plugins that read headers have no effect: simulations have none of that",),
    ]


@pytest.mark.parametrize(
    ("labels", "warnings"),
    [
        ("tier: a", ()),
        ("", ("plugins that read labels have no effect: simulations have none of that",)),
    ],
)
def test_labels_are_simulated_where_the_fleet_has_them(small, labels, warnings):
    """A filter by label chooses among engines of a scenario that have labels."""
    small.write_text(SMALL.replace("profile: demo", f"profile: demo, labels: {{{labels}}}"))
    by_label = small.parent / "by_label.yaml"
    by_label.write_text(
        "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\nscheduling: {profile: {filters: "
        "[{kind: label-selector-filter, params: {matchLabels: {tier: a}}}], "
        "scorers: [{kind: queue-scorer}]}}\n"
    )
    (column,) = planned(small, configs=[by_label]).columns
    assert column.warnings == warnings


def test_warnings_of_a_configuration_are_told(small, capsys):
    """Settings of an upstream file that have no effect are listed as warnings."""
    theirs = small.parent / "theirs.yaml"
    theirs.write_text(THEIRS)
    argv = ["simulate", str(small), "--jobs", "1", "--seeds", "1", "--config", str(theirs)]
    assert main.main(argv) == 0
    assert "warning: theirs: " in capsys.readouterr().err


def test_the_clairvoyant_has_no_configuration(small):
    """Nothing would read it."""
    (column,) = planned(small, strategies=["clairvoyant"]).columns
    assert column.settings is None


def test_flags_replace_the_strategies_of_the_scenario(small):
    """Names first, then configurations by the names of their files."""
    other = small.parent / "other.yaml"
    other.write_text(MINE)
    columns = planned(small, strategies=["random"], configs=[other]).columns
    assert [column.name for column in columns] == ["random", "other"]


def test_seeds_change_last(small):
    """Every strategy is seen early."""
    tasks = planned(small, strategies=["random", "mine"], seeds=[7, 8]).tasks
    assert [(column.name, seed) for column, seed in tasks] == [
        ("random", 7),
        ("mine", 7),
        ("random", 8),
        ("mine", 8),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SMALL.replace("independent", "indepedent"), "small.yaml: workload.kind: .*independent?"),
        (SMALL.replace("round-robin", "round-robbin"), "strategy round-robbin.* round-robin?"),
        (SMALL.replace("mine.yaml}", "yours.yaml}"), "yours.yaml: expected a readable file"),
        (SMALL.replace("{scrape:", "{scarpe:"), "scarpe: .* did you mean scrape?"),
        (
            SMALL.replace("- clairvoyant", "- {name: c, strategy: clairvoyant, config: mine.yaml}"),
            "expected no configuration beside the strategy clairvoyant",
        ),
        (SMALL.replace("seeds:", "seeds: [1]\nseeds:"), "seeds twice"),
        ("[", "small.yaml.*expected YAML or JSON"),
        (SMALL.replace("mean: 100", "mean: .inf"), r"prompt\.mean: expected a finite number"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(small, text, expected):
    """Files, names and sections are checked first."""
    small.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        planned(small)


def test_a_wrong_strategy_of_the_command_line_is_not_looked_for_in_the_scenario(small, capsys):
    """The error says where the name comes from."""
    assert main.main(["simulate", str(small), "--strategy", "nope"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("extproc: the command line: strategy nope: ")
    assert "got nope" in message


def test_a_misspelt_clairvoyant_is_suggested(small, capsys):
    """It is a strategy of simulations only, which configurations do not know."""
    assert main.main(["simulate", str(small), "--strategy", "clairvoyan"]) == 2
    message = capsys.readouterr().err
    assert "prefix-hash, clairvoyant, got clairvoyan" in message
    assert "did you mean clairvoyant?" in message


def test_a_wrong_scenario_ends_with_two(small, capsys):
    """As every command does with a wrong file."""
    small.write_text("workload: {}")
    assert main.main(["simulate", str(small)]) == 2
    assert "expected the key kind" in capsys.readouterr().err


def test_an_unknown_baseline_is_said_before_anything_runs(small, capsys):
    """Not after minutes of work."""
    assert main.main(["simulate", str(small), "--baseline", "nobody"]) == 2
    assert "baseline: expected one of round-robin" in capsys.readouterr().err


def test_a_trace_is_found_through_the_environment(tmp_path, monkeypatch):
    """The name in the path is filled in, and the rows are run."""
    path = tmp_path / "trace.yaml"
    path.write_text(TRACE)
    monkeypatch.delenv("MY_TRACES", raising=False)
    with pytest.raises(ConfigError, match=r"workload.file: .* name in \$MY_TRACES/azure.csv"):
        planned(path)
    monkeypatch.setenv("MY_TRACES", str(tmp_path))
    with pytest.raises(ConfigError, match=r"workload.file: expected a trace, got no file"):
        planned(path)
    (tmp_path / "azure.csv").write_text(ROWS)
    todo = planned(path, strategies=["random"], seeds=[1])
    (run,) = simulation_runs.runs(todo, jobs=1)
    assert run.summary.requests == 2


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_bad_row_of_a_trace_is_named(tmp_path, capsys, jobs):
    """Also when another process finds it."""
    (tmp_path / "azure.csv").write_text(ROWS + "yesterday,1,2\n")
    path = tmp_path / "trace.yaml"
    path.write_text("workload: {kind: trace, format: azure, file: azure.csv}")
    argv = ["simulate", str(path), "--jobs", jobs, "--strategy", "random", "--seeds", "2"]
    assert main.main(argv) == 2
    assert "extproc: azure.csv: line 4: expected TIMESTAMP" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "seeds"), [("3", [1, 2, 3]), ("7,", [7]), ("4,2", [4, 2])])
def test_seeds_are_a_number_or_a_list(text, seeds):
    """A number counts from one."""
    assert list(simulate_command.parse_seeds(text)) == seeds


@pytest.mark.parametrize(
    "flag",
    [
        "--seeds=x",
        "--seeds=0",
        "--seeds=1,1",
        "--jobs=0",
        "--jobs=-1",
        f"--seeds={10**22}",
        f"--seeds={10**22},",
        f"--jobs={'9' * 5000}",
    ],
)
def test_flags_that_make_no_sense_are_refused(small, flag, capsys):
    """With what was wanted."""
    assert main.main(["simulate", str(small), flag]) == 2
    assert "expected" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_a_bar():
    """It fills with the runs that are over."""
    out = Terminal()
    progress = simulate_command.Progress(4, out)
    progress.step("random, seed 1")
    assert "[#######" in out.getvalue()
    assert "1/4 random, seed 1" in out.getvalue()
    progress.close()
    assert "1 run in " in out.getvalue()


def test_a_file_sees_one_line():
    """A log is not filled with bars."""
    out = io.StringIO()
    progress = simulate_command.Progress(2, out)
    progress.step("a")
    progress.step("b")
    progress.close()
    assert out.getvalue().count("\n") == 1


def test_ctrl_c_ends_it_at_once(small):
    """Workers that start or run do not hear of it and are ended; nothing but silence is printed."""
    small.write_text(SMALL.replace("requests: 30", "requests: 100000000"))
    argv = [sys.executable, "-m", "extproc", "simulate", str(small), "--jobs", "2"]
    process = subprocess.Popen(
        argv, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        for worker in _workers(process, 2, ticks=5):
            os.kill(worker, signal.SIGINT)
        _workers(process, 2, ticks=60)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err


def test_sigterm_ends_it_in_silence(small):
    """Workers are ended, and no semaphore is left that Python would warn of."""
    small.write_text(SMALL.replace("requests: 30", "requests: 100000000"))
    argv = [sys.executable, "-m", "extproc", "simulate", str(small), "--jobs", "2"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            _workers(process, 2, ticks=60)
            process.terminate()
            _, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 143
    assert "warn" not in err.lower()
    assert "Traceback" not in err


def test_workers_end_with_their_parent(small):
    """Nothing goes on computing after the command was killed."""
    small.write_text(SMALL.replace("requests: 30", "requests: 100000000"))
    argv = [sys.executable, "-m", "extproc", "simulate", str(small), "--jobs", "2"]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            workers = [os.pidfd_open(worker) for worker in _workers(process, 2, ticks=60)]
        finally:
            process.kill()
    ended = [select.select([worker], [], [], 300)[0] for worker in workers]
    assert all(ended)
    for worker in workers:
        os.close(worker)


def _workers(process, count, *, ticks):
    """Wait until so many workers have used so much CPU: at 5 ticks they import, at 60 they run."""
    while True:
        assert process.poll() is None
        tasks = Path(f"/proc/{process.pid}/task/{process.pid}")
        children = (tasks / "children").read_text().split()
        busy = []
        for child in children:
            try:
                words = Path(f"/proc/{child}/cmdline").read_text()
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if "spawn_main" in words and int(fields[11]) >= ticks:
                busy.append(int(child))
        if len(busy) >= count:
            return busy
        # Looking without a pause would take half of the CPU that the workers need.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)


def test_plots_are_drawn_and_the_same_again(small, tmp_path):
    """PNG and SVG of each, with nothing in them that changes from run to run."""
    pytest.importorskip("matplotlib")
    from extproc.simulator import report_plots  # noqa: PLC0415 - an extra

    first, second = tmp_path / "one", tmp_path / "two"
    argv = ["simulate", str(small), "--jobs", "1", "--quiet", "--plots", str(first)]
    assert main.main([*argv, "--seeds", "2", "--strategy", "random"]) == 0
    names = ("throughput", "ttft_mean", "ttft_p99", "ttft_cdf", "endpoint_load")
    assert {path.name for path in first.iterdir()} == {
        f"{name}.{form}" for name in names for form in ("png", "svg")
    } | {"index.html"}
    page = (first / "index.html").read_text()
    assert [page.index(f'src="{name}.svg"') > 0 for name in names] == [True] * len(names)
    todo = planned(small, strategies=["random"], seeds=[1, 2])
    result = report.report(todo.scenario, list(simulation_runs.runs(todo, jobs=1)))
    for path in itertools.islice(report_plots.draw(result, second), 2):
        assert path.read_bytes() == (first / path.name).read_bytes()


def test_without_matplotlib_the_extra_is_named(small, monkeypatch, capsys):
    """Before anything runs."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main.main(["simulate", str(small), "--plots", "nowhere"]) == 2
    assert "pip install 'extproc-epp[plots]'" in capsys.readouterr().err


def test_the_example_is_in_order():
    """The scenario that the guide shows can be run."""
    assert len(planned(EXAMPLE).columns) == 5


def test_json_on_standard_output_is_alone_there(small, tmp_path, monkeypatch, capsys):
    """The table goes to standard error, and no file is named `-`."""
    monkeypatch.chdir(tmp_path)
    argv = ["simulate", str(small), "--jobs", "1", "--strategy", "random", "--json", "-"]
    assert main.main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["runs"]
    assert "Successful requests" in err
    assert not (tmp_path / "-").exists()
