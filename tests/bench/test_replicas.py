"""Tests of the table of several pickers."""

from bench import replicas


def run(pickers, exchange, p99_s, ratios, *, date="2026-01-01"):
    return {
        "date": date,
        "pickers": pickers,
        "exchange": exchange,
        "rounds": 3,
        "requests": 666,
        "median": {"hit_ratio": 0.68, "ttft_p99_s": p99_s},
        "ttft_p99_of_all_s": p99_s,
        "ttft_p99_of_all_ratio": p99_s / 0.4,
        "ratios": {"hit_ratio": [1.0, 1.0, 1.0], "ttft_p99_s": ratios},
    }


def test_real_rows_say_how_far_rounds_are_apart():
    """Medians, with the smallest and the largest ratio of a round."""
    two = run(2, "direct", 0.5, [0.9, 1.3, 1.1])
    record = {"date": "2026-01-04", "real": [run(1, "none", 0.4, [1, 1, 1]), two]}
    hits, waits = "0.680 | 1.00 (1.00 to 1.00)", "0.50 | 1.10 (0.90 to 1.30) | 0.50, 1.25"
    assert f"| 2 | direct | {two['date']} | 3 | {hits} | {waits} |" in replicas.real_block(record)


def test_rows_are_of_the_days_they_were_measured_on():
    """And not of the day on which some row of the file was measured last."""
    rows = [run(n, "none", 0.4, [1], date=f"2026-01-0{n}") for n in (1, 2)]
    record = {"date": "2026-01-04", "real": rows}
    assert replicas.real_block(record).endswith("2026-01-01 to 2026-01-02.")
    assert replicas.real_block(record | {"real": rows[1:]}).endswith(", 2026-01-02.")


def test_rows_that_were_not_run_again_stay():
    """Those of pickers that exchange nothing stand before those that do."""
    before = {"real": [run(n, "none", 0.5, [1]) for n in (1, 2, 4)] + [run(2, "direct", 0.5, [1])]}
    rows = replicas.written(before, [run(1, "none", 0.4, [1]), run(2, "direct", 0.4, [1])])
    values = [(row["pickers"], row["exchange"], row["ttft_p99_of_all_s"]) for row in rows]
    assert values == [(1, "none", 0.4), (2, "none", 0.5), (4, "none", 0.5), (2, "direct", 0.4)]


def test_a_row_says_after_how_long_pickers_talk():
    """Ratios are shown with half of their interval; a single picker has no peer."""
    row = {
        "date": "2026-01-01",
        "pickers": 1,
        "told_after_s": None,
        "mean": {"hit_ratio": 0.5, "ttft_p99_s": 4.0},
        "ratio": {"hit_ratio": [1.0, 0.0], "ttft_p99_s": [1.0, 0.0]},
    }
    rows = [row, row | {"pickers": 4}, row | {"pickers": 4, "told_after_s": 0.002}]
    shown = replicas.block({"command": "c", "date": "d", "simulated": {"w": rows}}).splitlines()
    assert [line.split("|")[3].strip() for line in shown[2:5]] == ["", "no synchronization", "2 ms"]
