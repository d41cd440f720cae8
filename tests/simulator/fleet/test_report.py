import json
import math

import msgspec
import pytest

from extproc.errors import ConfigError
from extproc.simulator.fleet import report, run_metrics, tables
from tests.simulator.fleet.builders import a_scenario

NONE = run_metrics.spread([])


def a_summary(rate=10.0, ttft=0.1, **facts):
    """A run of one engine."""
    values = {
        "duration_s": 10.0,
        "requests": 100,
        "failed": {},
        "requests_per_s": rate,
        "output_tokens_per_s": 50.0,
        "total_tokens_per_s": 500.0,
        "ttft_s": run_metrics.spread([ttft]),
        "tpot_s": NONE,
        "itl_s": NONE,
        "e2e_s": run_metrics.spread([1.0]),
        "token_s": NONE,
        "hit_ratio": 0.5,
        "predicted_ratio": 0.4,
        "requests_max_over_mean": 1.0,
        "tokens_max_over_mean": 1.0,
        "endpoints": [run_metrics.PerEndpoint(100, 2000, 0.5, 3)],
        "ttft_quantiles_s": [ttft] * 101,
    }
    return run_metrics.RunSummary(**(values | facts))


def runs(**rates):
    """Runs by strategy: one rate for each seed."""
    return [
        report.Run(name, seed, a_summary(rate, 1 / rate))
        for name, values in rates.items()
        for seed, rate in enumerate(values, 1)
    ]


def reported(baseline="", **rates):
    seeds = list(range(1, 1 + len(next(iter(rates.values())))))
    definition = a_scenario(strategies=list(rates), seeds=seeds, title="a title")
    return report.report(definition, runs(**rates), baseline=baseline)


def test_an_interval_is_students():
    """Of 1 to 5: mean 3, deviation 1.581, t of 4 degrees 2.776: half 1.963."""
    interval = report.interval([1, 2, 3, 4, 5])
    assert interval.mean == 3
    assert interval.half == pytest.approx(1.963, abs=0.001)


def test_many_values_take_the_normal_distribution():
    """Beyond the table the quantile is 1.96."""
    values = [float(n % 2) for n in range(100)]
    deviation = (0.25 * 100 / 99) ** 0.5
    assert report.interval(values).half == pytest.approx(1.96 * deviation / 10)


def test_one_value_has_no_interval():
    """Nothing is known of what other seeds would give."""
    interval = report.interval([2.0])
    assert interval.mean == 2.0
    assert math.isnan(interval.half)


def test_what_is_not_a_number_is_left_out():
    """A run without answers does not spoil the mean of the others."""
    assert report.interval([1.0, math.nan, 3.0]).mean == 2.0
    assert math.isnan(report.interval([math.nan]).mean)


def test_columns_stand_in_the_order_of_the_scenario():
    """Runs may come in any order."""
    definition = a_scenario(strategies=["b", "a"], seeds=[1, 2])
    result = report.report(definition, list(reversed(runs(a=[1, 2], b=[3, 4]))))
    assert [column.strategy for column in result.columns] == ["b", "a"]
    assert [(run.strategy, run.seed) for run in result.runs] == [
        ("b", 1),
        ("b", 2),
        ("a", 1),
        ("a", 2),
    ]
    assert result.columns[0].figures["requests_per_s"].mean == 3.5


def test_ratios_are_taken_seed_by_seed():
    """Seeds differ by much and strategies by exactly two: the ratio is certain."""
    result = reported("a", a=[10, 30, 50], b=[20, 60, 100])
    ratio = result.columns[1].ratios["requests_per_s"]
    assert ratio == report.Interval(2.0, 0.0)
    assert result.columns[1].figures["requests_per_s"].half > 50


def test_a_seed_that_answers_nothing_has_no_quantiles():
    """Quantiles are means over the others; there are none if no seed has any."""
    definition = a_scenario(strategies=["a", "b"])
    silent = a_summary(ttft_quantiles_s=[], ttft_s=NONE, requests=0)
    summaries = {
        ("a", 1): a_summary(ttft=0.2),
        ("a", 2): silent,
        ("b", 1): silent,
        ("b", 2): silent,
    }
    result = report.report(definition, [report.Run(*key, s) for key, s in summaries.items()])
    assert [column.ttft_quantiles_s for column in result.columns] == [[0.2] * 101, []]
    assert result.columns[0].figures["ttft_mean_s"].mean == pytest.approx(0.2)


def test_an_unknown_baseline_is_refused():
    """It is named with those there are."""
    with pytest.raises(ConfigError, match="expected one of a, b, got c"):
        reported("c", a=[1], b=[2])


def test_endpoints_are_means_weighed_by_tokens():
    """Hit ratios of runs count by their prompts."""
    definition = a_scenario(strategies=["a"], seeds=[1, 2])
    pair = [
        a_summary(endpoints=[run_metrics.PerEndpoint(10, 100, 1.0, 0)]),
        a_summary(endpoints=[run_metrics.PerEndpoint(30, 300, 0.0, 2)]),
    ]
    result = report.report(
        definition, [report.Run("a", n, run_summary) for n, run_summary in enumerate(pair, 1)]
    )
    assert result.columns[0].endpoints == [run_metrics.PerEndpoint(20.0, 200.0, 0.25, 1.0)]


def test_json_has_scenario_runs_and_columns():
    """Everything is there, NaN is null, and what is written can be read back."""
    encoded = report.encoded(reported("a", a=[1, 2], b=[2, 4]))
    tree = json.loads(encoded)
    assert tree["baseline"] == "a"
    assert tree["scenario"]["workload"]["kind"] == "independent"
    assert [run["seed"] for run in tree["runs"]] == [1, 2, 1, 2]
    assert tree["runs"][0]["summary"]["itl_s"]["mean"] is None
    assert tree["columns"][1]["ratios"]["requests_per_s"] == {"mean": 2.0, "half": 0.0}
    assert msgspec.json.decode(encoded)["scenario"]["title"] == "a title"


def test_the_table_has_a_column_for_each_strategy():
    """Rows are named as `vllm bench serve` names them, times are milliseconds."""
    lines = tables.text(reported("a", a=[10, 20], b=[20, 40])).splitlines()
    assert lines[0] == "a title: means over 2 seeds, ± half of the 95 % interval"
    assert lines[2].split() == ["a", "b"]
    rows = {line.split("  ")[0]: line.split("  ", 1)[-1].split() for line in lines}
    assert rows["Successful requests"] == ["100", "±", "0"] * 2
    assert rows["Request throughput (req/s)"][0] == "15.00"
    assert rows["Mean TTFT (ms)"][0] == "75.00"
    assert rows["Mean ITL (ms)"] == ["-", "-"]
    assert rows["Request throughput"] == ["2.000", "±", "0.000"]
    assert rows["engine-0"] == ["100", "2k", "50.0%", "3"] * 2


def test_the_table_of_one_seed_has_no_intervals():
    """There is nothing to say."""
    text = tables.text(reported(a=[10]))
    assert "±" not in text
    assert "one seed" in text


def test_a_client_that_holds_requests_back_is_shown():
    """Its limit distorts what is measured; without one there is no such row."""
    definition = a_scenario(strategies=["a"], seeds=[1])
    held = report.report(definition, [report.Run("a", 1, a_summary(held_s=0.25))])
    (row,) = (line for line in tables.text(held).splitlines() if line.startswith("Mean wait"))
    assert row.split()[-1] == "250"
    free = report.report(definition, [report.Run("a", 1, a_summary(held_s=0.0))])
    assert "Mean wait" not in tables.text(free)


def test_large_fleets_are_not_listed_to_the_end():
    """The terminal shows 32 engines and says how many there are besides."""
    definition = a_scenario(strategies=["a"], seeds=[1])
    crowd = a_summary(endpoints=[run_metrics.PerEndpoint(1, 1, 0.0, 0)] * 40)
    text = tables.text(report.report(definition, [report.Run("a", 1, crowd)]))
    assert "engine-31" in text
    assert "engine-32" not in text
    assert "and 8 engines more" in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (report.Interval(8000.0, 0.0), "8000 ± 0"),
        (report.Interval(12345.6, 12.3), "12346 ± 12"),
        (report.Interval(123.45, 1.0), "123.5 ± 1.0"),
        (report.Interval(12.345, 0.5), "12.35 ± 0.50"),
        (report.Interval(0.0, math.nan), "0"),
        (report.Interval(math.nan, math.nan), "-"),
    ],
)
def test_figures_have_as_many_digits_as_they_need(value, expected):
    """Four figures, and an interval in the same digits."""
    assert tables.shown(value, 1) == expected
