from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.pool.least_squares import RecursiveLeastSquares


def test_exact_rows_give_the_solution():
    """Rows of 2 x + 3 y, the prior being far: both come out."""
    squares, rng = RecursiveLeastSquares([(0.0, 10.0)] * 2), random.Random(1)
    for _ in range(200):
        x, y = rng.random(), rng.random()
        squares.add((x, y), 2 * x + 3 * y, keep=1.0, weight=1.0)
    assert squares.solve((1.0, 1.0), 1e-6) == pytest.approx([2.0, 3.0], rel=1e-3)


def test_undetermined_unknowns_follow_the_prior():
    """Always x + y = 6, prior 1 and 2: as 1 + 0.6 and 2 (1 + 1.2); what no row has is the prior."""
    squares = RecursiveLeastSquares([(0.0, 10.0)] * 3)
    for _ in range(100):
        squares.add((1.0, 1.0, 0.0), 6.0, keep=1.0, weight=1.0)
    assert squares.solve((1.0, 2.0, 7.0), 1e-6) == pytest.approx([1.6, 4.4, 7.0], rel=1e-3)


def test_an_unknown_is_clamped_to_its_bounds():
    """The first would be negative; at its bound of 0.5 the rest is the other's."""
    squares = RecursiveLeastSquares([(0.5, 10.0), (0.0, 10.0)])
    for x, y in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0)) * 50:
        squares.add((x, y), 3 * y - 0.5 * x, keep=1.0, weight=1.0)
    x, y = squares.solve((1.0, 1.0), 1e-6)
    assert x == 0.5
    assert 0.5 < y < 3.0


ROWS = st.lists(
    st.tuples(*[st.floats(0, 1e6)] * 3, st.floats(1e-3, 100), st.floats(0, 1)), max_size=30
)


@given(ROWS, st.floats(1e-3, 5))
def test_any_rows_keep_the_bounds(rows, weight):
    """Degenerate rows give numbers within bounds, never an error."""
    bounds = [(1e-4, 2.0), (1e-7, 1e-2), (1e-9, 1e-4)]
    squares = RecursiveLeastSquares(bounds)
    for *row, total, share in rows:
        squares.add(row, total, keep=0.98, weight=share)
    solution = squares.solve((0.015, 1e-4, 1e-6), weight)
    assert all(low <= value <= high for value, (low, high) in zip(solution, bounds, strict=True))
