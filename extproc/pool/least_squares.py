"""Least squares that forgets, near a prior where rows do not tell unknowns apart."""

from __future__ import annotations

from collections.abc import Sequence


class RecursiveLeastSquares:
    """Unknowns x of rows `total = x . row`, near a prior while the rows do not tell them apart.

    Its normal equations are a handful of numbers, whatever the number of rows.

    Args:
        bounds: Lowest and highest value of each unknown, in its unit.
    """

    __slots__ = ("_bounds", "_matrix", "_size", "_vector")

    def __init__(self, bounds: Sequence[tuple[float, float]]) -> None:
        self._bounds = bounds
        self._size = len(bounds)
        self._matrix = [[0.0] * self._size for _ in bounds]
        self._vector = [0.0] * self._size

    def add(self, row: Sequence[float], total: float, *, keep: float, weight: float) -> None:
        """Add a row.

        Args:
            row: Factor of each unknown.
            total: Sum of the row, in any unit, above 0; its size does not change the weight of the
                row.
            keep: Share of the past that it leaves, 0..1.
        """
        vector = self._vector
        shares = [factor / total for factor in row]
        for i, (share, line) in enumerate(zip(shares, self._matrix, strict=True)):
            weighed = weight * share
            vector[i] = vector[i] * keep + weighed
            for j, other in enumerate(shares):
                line[j] = line[j] * keep + weighed * other

    def solve(self, prior: Sequence[float], weight: float) -> list[float]:
        """The unknowns, each within its bounds.

        The prior is one more row for each unknown, in units of the prior: there all unknowns are
        near 1, so that one weight suits them all. An unknown that comes out of bounds is set to its
        bound and the others are solved again; one that no row has is its prior.

        Args:
            prior: Values before any row, above 0, in the units of the unknowns.
            weight: Weight of the prior against rows, above 0.
        """
        estimate = list(prior)
        free = [at for at in range(self._size) if self._matrix[at][at]]
        fixed = [at for at in range(self._size) if not self._matrix[at][at]]
        while free:
            for at, value in zip(free, self._solved(free, fixed, estimate, weight), strict=True):
                estimate[at] = value * prior[at]
            outside = [
                at for at in free if not self._bounds[at][0] <= estimate[at] <= self._bounds[at][1]
            ]
            for at in outside:
                low, high = self._bounds[at]
                estimate[at] = min(high, max(low, estimate[at]))
            if not outside:
                break
            fixed = [*fixed, *outside]
            free = [at for at in free if at not in outside]
            for at in free:
                estimate[at] = prior[at]
        return estimate

    def _solved(
        self, free: Sequence[int], fixed: Sequence[int], estimate: Sequence[float], weight: float
    ) -> list[float]:
        """Solve for the free unknowns by Gaussian elimination.

        Args:
            free: Positions of the unknowns to solve for.
            fixed: Positions of the unknowns that keep their value.
            estimate: By position: the value of a fixed unknown, the unit of a free one.

        Returns:
            Values of the free unknowns in their units, aligned with `free`.
        """
        unit, rows = estimate, []
        for i in free:
            line = self._matrix[i]
            known = sum(line[j] * estimate[j] for j in fixed)
            rows.append(
                [
                    *[unit[i] * line[j] * unit[j] + (weight if i == j else 0.0) for j in free],
                    unit[i] * (self._vector[i] - known) + weight,
                ]
            )
        size = len(rows)
        for i in range(size):
            pivot = rows[i]
            # At least the weight but for rounding, which takes all of it from rows of nonsense.
            pivot[i] = max(pivot[i], 0.5 * weight)
            for k in range(i + 1, size):
                factor = rows[k][i] / pivot[i]
                if factor:
                    rows[k] = [x - factor * y for x, y in zip(rows[k], pivot, strict=True)]
        values = [0.0] * size
        for i in reversed(range(size)):
            later = sum(rows[i][j] * values[j] for j in range(i + 1, size))
            values[i] = (rows[i][size] - later) / rows[i][i]
        return values
