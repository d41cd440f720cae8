"""The README: its length, its figures, its plot and its example."""

import json
import re
from pathlib import Path

import pytest

from bench import bars, plots
from tests.docs import explain_example

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "bench/results"

#: Loads of the table of CPU beside llm-d's picker.
_LOADS = ("c32 2 kB", "c32 400 kB")


def _read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def _column(scenario, column, figure):
    return bars.result(scenario)["columns"][column][figure][0]


def _hits(strategy):
    return _read("real_vllm")["real"][strategy]["24 groups"]["hit_ratio"]


def _tenants(case):
    return _read("capacity")["tenants"][case]["small"]["ttft_p95_s"]


def _beside_llm_d(picker):
    """CPU of a request over that of llm-d's picker, for small and large prompts."""
    ratios = {cell["name"]: cell["ratios"] for cell in _read("peers")["cells"]}
    pair = f"{picker}/go-equal"
    return " | ".join(f"{ratios[load][pair]['cpu_us'][0]:.2f}" for load in _LOADS)


def _least_hits_of_four():
    rows = [row for rows in _read("replicas")["simulated"].values() for row in rows]
    four = [row for row in rows if row["pickers"] == 4 and row["told_after_s"] is not None]
    return min(row["ratio"]["hit_ratio"][0] for row in four)


#: What the README says, by the recorded result that it comes from.
FIGURES = {
    "hits, adaptive": lambda: f"hit ratio was {_hits('adaptive'):.2f}",
    "hits, round robin": lambda: f"round robin {_hits('round-robin'):.2f}",
    "hits, prefix hash": lambda: f"prefix hashing {_hits('prefix-hash'):.2f}",
    "ttft, adaptive": lambda: (
        f"after {_column('mooncake-70', 'adaptive', 'ttft_mean_s') * 1e3:.0f} ms on average"
    ),
    "ttft, weighted": lambda: (
        f"scorers after {_column('mooncake-70', 'weighted 2/2/3', 'ttft_mean_s') * 1e3:.0f} ms"
    ),
    "failed": lambda: f"dead, {_column('failing', 'adaptive', 'failed'):.0f} of about 4,700",
    "failed, off": lambda: f"ejection {_column('failing', 'adaptive, off', 'failed'):.0f} ",
    "tenant": lambda: f"is {_tenants('holding'):.2f} s, without",
    "tenant, off": lambda: f"flow control {_tenants('adaptive'):.2f} s",
    "replicas": lambda: f"{_least_hits_of_four() * 100:.0f} % of the prefix hits",
    "loss": lambda: (
        f"({_column('mooncake-70', 'adaptive', 'tpot_mean_s') * 1e3:.1f} against "
        f"{_column('mooncake-70', 'lmetric', 'tpot_mean_s') * 1e3:.1f} ms)"
    ),
    "cpu": lambda: f"{_read('overhead')['fds']['extproc_cpu_us'] / 1e3:.1f} ms of CPU",
    "peers, native": lambda: f"| `--transport native`, the default | {_beside_llm_d('native')} |",
    "peers, grpcio": lambda: f"| `--transport grpcio` | {_beside_llm_d('grpcio')} |",
    "peers, date": lambda: (
        f"[`make bench-peers`](docs/benchmarks/peers.md), {_read('peers')['date']}."
    ),
    "cpu ratio": lambda: f"{_read('overhead')['fds']['cpu_ratio_median']:.2f} times a gRPC server",
}


def test_the_readme_is_short():
    """At most 200 lines: everything else is in `docs/`."""
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_the_recorded_one(name):
    """Each figure of the README is in `bench/results`."""
    assert FIGURES[name]() in README


def test_the_plot_is_of_the_results():
    """The plot was drawn from the committed results, by the code that is there."""
    recorded = plots.digest(bars.result(plots.TRACE))
    assert recorded in plots.TRACE_PATH.read_text(), "run python -m bench.plots"


def test_the_page_of_failing_endpoints_has_the_recorded_figures():
    """The page and the README say the same of outlier detection."""
    without, failed = (_column("failing", f"adaptive{off}", "failed") for off in (", off", ""))
    page = (ROOT / "docs/concepts/failing-endpoints.md").read_text()
    assert f"drop from {without:,.0f} to {failed:.0f} with `adaptive`" in page


def test_the_header_of_a_decision_is_that_of_the_example():
    """The short form has the costs and tokens of the printed tables."""
    printed = explain_example.render()
    costs = re.findall(r"^(\S+:8000) .* (\d+\.\d)(?:  1)?$", printed, re.MULTILINE)[-3:]
    (tokens,) = re.findall(r"about (\d+) prompt tokens", printed)
    (first, cost), (second, other) = costs[:2]
    assert (
        f"adaptive; chose={first}; cost={cost}ms; cached=768/{tokens}; "
        f"next={second}; cost={other}ms"
    ) in (ROOT / "docs/guides/explain-a-decision.md").read_text()


@pytest.mark.parametrize("path", explain_example.PAGES, ids=lambda path: path.name)
def test_the_explain_example_is_what_is_printed(path):
    """The block shows the output of its command."""
    expected = explain_example.render()
    assert expected in path.read_text(), "run python -m tests.docs.explain_example --write"
