import math

import pytest

from extproc.simulator import plot_style


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (90, 1100, 4, [100, 200, 500, 1000]),
        (323, 1197, 3, [500, 700, 1000]),
        (1, 1e6, 3, [1, 1000, 1e6]),
        (300, 420, 6, [300, 400]),
        (84.8, 143, 3, [100, 120, 140]),
        (101, 196, 3, [120, 150, 180]),
        (1.01, 1.09, 3, [1.02, 1.05, 1.08]),
    ],
)
def test_log_ticks_are_round_and_apart(low, high, most, expected):
    """There are at most so many ticks, and none stands too near another."""
    assert plot_style.log_ticks(low, high, most=most) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (0.1234, "0.123"), (14.0, "14.0"), (99.96, "100."), (1234.5, "1,234")],
)
def test_numbers_have_three_digits(value, expected):
    """Numbers show three digits, and all digits before the point."""
    assert plot_style.as_number(value).rstrip(".") == expected.rstrip(".")


def test_the_default_strategy_comes_first_and_the_reference_last():
    """Rows begin with the default strategy and end with the reference."""
    names = ["random", "clairvoyant", "adaptive", "lmetric"]
    assert plot_style.ordered(names) == ["adaptive", "random", "lmetric", "clairvoyant"]
    assert plot_style.ordered(["lmetric"]) == ["lmetric"]


def test_a_dollar_in_a_name_begins_no_formula():
    """Names are drawn as they are."""
    pytest.importorskip("matplotlib")
    with plot_style.new_figure(2.0, 1.0) as figure:
        figure.suptitle("a$^$b.jsonl")
        assert plot_style.encode(figure, "svg").startswith(b"<?xml")


def test_only_the_default_strategy_has_the_color():
    """The default strategy is in color, the reference dashed, and others differ in grey."""
    names = ["random", "adaptive", "lmetric", "clairvoyant"]
    styles = {name: plot_style.line_style(name, names) for name in names}
    assert [name for name in names if styles[name]["color"] == plot_style.COLOR] == ["adaptive"]
    assert styles["clairvoyant"]["linestyle"] == "--"
    assert styles["random"]["marker"] != styles["lmetric"]["marker"]
    assert plot_style.line_style("random", ["random", "lmetric"])["color"] == plot_style.COLOR


def test_a_missing_value_draws_nothing():
    """A row without a value keeps its name and its place."""
    pytest.importorskip("matplotlib")
    rows = [
        plot_style.ValueRow(strategy="adaptive", mean=2.0, half=0.5, percentile=5.0),
        plot_style.ValueRow(strategy="random", mean=math.nan),
    ]
    with plot_style.new_figure(4, 2) as figure:
        axes = figure.add_subplot()
        plot_style.draw_values(axes, rows, label="time (ms)", is_log=True)
        names = [label.get_text() for label in axes.get_yticklabels()]
        numbers = [text.get_text() for text in axes.texts]
        first, second = (plot_style.encode(figure, "svg") for _ in range(2))
    assert names == ["adaptive", "random"]
    assert numbers == ["2.00", "5.00"]
    assert first == second
