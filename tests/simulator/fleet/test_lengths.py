import random
import statistics

import pytest

from extproc.simulator.fleet.workloads import Lengths


def drawn(count=20_000, **facts):
    rng = random.Random(7)
    lengths = Lengths(**facts)
    return [lengths.draw(rng) for _ in range(count)]


def test_no_deviation_always_gives_the_mean():
    """A length that does not vary leaves nothing to chance."""
    assert set(drawn(100, mean=42)) == {42}


@pytest.mark.parametrize("shape", ["normal", "lognormal"])
def test_mean_and_deviation_are_those_of_the_values(shape):
    """Mean and standard deviation describe what is drawn, in every shape."""
    values = drawn(mean=200, deviation=50, shape=shape)
    assert statistics.fmean(values) == pytest.approx(200, rel=0.02)
    assert statistics.stdev(values) == pytest.approx(50, rel=0.03)


def test_an_exponential_begins_at_its_lowest():
    """The mean of an exponential length is its mean, and none is below its lowest value."""
    values = drawn(mean=100, shape="exponential", lowest=20)
    assert statistics.fmean(values) == pytest.approx(100, rel=0.03)
    assert min(values) >= 20


def test_values_are_cut_to_their_bounds():
    """Draws outside become the bound."""
    values = drawn(1000, mean=100, deviation=100, lowest=50, highest=150)
    assert min(values) == 50
    assert max(values) == 150


def test_whole_lengths_are_at_least_one():
    """There are no empty prompts, whatever the bounds say."""
    assert Lengths(mean=0, lowest=0).integer(random.Random(1)) == 1
    assert Lengths(mean=2.6).integer(random.Random(1)) == 3
