"""The four charts of replicas that come and go."""

import json

import pytest

from extproc.cli import main
from tests.docs import recording_example

SCENARIO = """
title: "From zero"
fleet: [{count: 2, profile: demo}]
workload: {kind: independent, requests: 5, prompt: {mean: 100}, output: {mean: 10}}
client: {rate_per_s: 1, evenly: true}
autoscaling: {cold_start_s: 20, params: {idle_s: 90}}
strategies:
  - {name: ours, strategy: least-request}
  - {name: kubeai, strategy: least-request, autoscaling: {policy: kubeai, cold_start_s: 20}}
seeds: [1, 2]
"""


@pytest.mark.slow
def test_replicas_are_drawn_and_written(tmp_path):
    """A plot more than for fleets that stay, and rows of every chart in the JSON."""
    pytest.importorskip("matplotlib")
    path, plots, rows = tmp_path / "s.yaml", tmp_path / "plots", tmp_path / "all.json"
    path.write_text(SCENARIO, encoding="utf-8")
    argv = ["simulate", str(path), "--jobs", "1", "--quiet", "--seeds", "1"]
    assert main.main([*argv, "--plots", str(plots), "--json", str(rows)]) == 0
    assert {"replicas.png", "replicas.svg"} < {plot.name for plot in plots.iterdir()}
    result = json.loads(rows.read_text(encoding="utf-8"))
    ours, kubeai = (run["summary"]["scaling"] for run in result["runs"])
    assert ours["to_least_s"] == pytest.approx(90, abs=5)
    assert kubeai["to_least_s"] > 600
    assert len(ours["at_s"]) == len(ours["depth_mean"]) == len(ours["queries_per_s"])


def test_names_that_begin_with_an_underscore_are_in_legends(tmp_path):
    """A configuration may have any name; the SVG has each text as a comment in front of its glyphs."""
    pytest.importorskip("matplotlib")
    config, plots = tmp_path / "_mine.yaml", tmp_path / "plots"
    config.write_text("apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n", encoding="utf-8")
    argv = ["replay", str(recording_example.PATH), "--config", str(config), "--seeds", "1"]
    # The other files may be in the folder of the plots, which is not there yet.
    argv += ["--html", str(plots / "all.html"), "--json", str(plots / "all.json")]
    assert main.main([*argv, "--jobs", "1", "--plots", str(plots)]) == 0
    assert {"all.html", "all.json"} < {path.name for path in plots.iterdir()}
    for name in ("ttft_cdf", "endpoint_load"):
        assert "_mine" in (plots / f"{name}.svg").read_text(encoding="utf-8")
