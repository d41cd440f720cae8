from __future__ import annotations

from tests.protocol import table
from tests.protocol.points import POINTS, SECTIONS, Status


def test_every_claimed_point_has_a_test():
    """A point that claims a test has one named by its number."""
    assert table.missing() == []


def test_points_are_numbered_without_gaps():
    """The table holds the points 1 to 132 in order, each in a known section."""
    assert [point.number for point in POINTS] == list(range(1, 133))
    assert {point.section for point in POINTS} == set(SECTIONS)


def test_tests_name_known_points():
    """No test carries the number of a point that does not exist or claims no test."""
    claimed = {point.number for point in POINTS if point.status in (Status.TESTED, Status.E2E)}
    assert set(table.tests_by_point()) <= claimed


def test_the_table_prints_every_point():
    """The printed table has one row for each point."""
    rows = [line for line in table.lines() if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) == len(POINTS)
