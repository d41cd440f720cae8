"""A report as text: a column for each strategy, rows as `vllm bench serve` names them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from extproc.simulator.fleet.report import Column, Interval, Report, interval
from extproc.simulator.fleet.run_metrics import PerEndpoint

_MS = 1e3

#: Heading, or label, figure and factor. Labels are those of `vllm bench serve` (vllm 0.11,
#: benchmarks/serve.py), which prints no p95; hit ratios and the spread over engines are ours.
_ROWS: Sequence[str | tuple[str, str, float]] = (
    ("Successful requests", "requests", 1),
    ("Failed requests", "failed", 1),
    ("Benchmark duration (s)", "duration_s", 1),
    ("Request throughput (req/s)", "requests_per_s", 1),
    ("Output token throughput (tok/s)", "output_tokens_per_s", 1),
    ("Total token throughput (tok/s)", "total_tokens_per_s", 1),
    ("Mean wait in the client (ms)", "held_mean_s", _MS),
    "Time to First Token",
    ("Mean TTFT (ms)", "ttft_mean_s", _MS),
    ("Median TTFT (ms)", "ttft_p50_s", _MS),
    ("P95 TTFT (ms)", "ttft_p95_s", _MS),
    ("P99 TTFT (ms)", "ttft_p99_s", _MS),
    "Time per Output Token (excl. 1st token)",
    ("Mean TPOT (ms)", "tpot_mean_s", _MS),
    ("Median TPOT (ms)", "tpot_p50_s", _MS),
    ("P95 TPOT (ms)", "tpot_p95_s", _MS),
    ("P99 TPOT (ms)", "tpot_p99_s", _MS),
    "Inter-token Latency",
    ("Mean ITL (ms)", "itl_mean_s", _MS),
    ("Median ITL (ms)", "itl_p50_s", _MS),
    ("P95 ITL (ms)", "itl_p95_s", _MS),
    ("P99 ITL (ms)", "itl_p99_s", _MS),
    "End-to-end Latency",
    ("Mean E2EL (ms)", "e2e_mean_s", _MS),
    ("Median E2EL (ms)", "e2e_p50_s", _MS),
    ("P95 E2EL (ms)", "e2e_p95_s", _MS),
    ("P99 E2EL (ms)", "e2e_p99_s", _MS),
    "Over all engines",
    ("Prefix hit ratio (%)", "hit_ratio", 100),
    ("Hits the picker foresaw (%)", "predicted_ratio", 100),
    ("Preemptions", "preemptions", 1),
    ("Requests, max over mean", "requests_max_over_mean", 1),
    ("Prompt tokens, max over mean", "tokens_max_over_mean", 1),
    ("Replicas asked for, mean", "mean_replicas", 1),
    ("Replicas that answer, mean", "mean_available", 1),
    ("Replica seconds", "replica_s", 1),
    ("Cold starts", "cold_starts", 1),
    ("Last answer to fewest replicas (s)", "to_least_s", 1),
)

#: Figures of fleets that an autoscaler changes; others have no rows for them.
_SCALED = frozenset({"mean_replicas", "mean_available", "replica_s", "cold_starts", "to_least_s"})

#: Figures that ratios are shown for.
_RATIOS = (
    ("Request throughput", "requests_per_s"),
    ("Mean TTFT", "ttft_mean_s"),
    ("P95 TTFT", "ttft_p95_s"),
    ("P99 TTFT", "ttft_p99_s"),
    ("Mean TPOT", "tpot_mean_s"),
    ("Mean E2EL", "e2e_mean_s"),
)

#: Engines that are listed one by one; of larger fleets the table names the extremes.
_LISTED = 32


def text(report: Report) -> str:
    """Text of a report, for a terminal."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    seeds = len(report.scenario.seeds)
    over = f"means over {seeds} seeds, ± half of the 95 % interval" if seeds > 1 else "one seed"
    title = report.scenario.title
    yield f"{title + ': ' if title else ''}{over}"
    yield ""
    yield from _figures(report.columns)
    yield from _failures(report)
    if report.baseline:
        yield ""
        yield from _ratios(report)
    yield ""
    yield from _endpoints(report.columns)


def _figures(columns: Sequence[Column]) -> Iterator[str]:
    table: list[str | list[str]] = [["", *(column.strategy for column in columns)]]
    waited = any(column.figures["held_mean_s"].mean > 0 for column in columns)
    for row in _ROWS:
        if isinstance(row, str):
            table.append(row)
            continue
        label, figure, factor = row
        if figure == "held_mean_s" and not waited:
            continue  # no limit, or never reached
        if figure in _SCALED and all(math.isnan(c.figures[figure].mean) for c in columns):
            continue
        table.append([label, *(shown(column.figures[figure], factor) for column in columns)])
    yield from _aligned(table)


def _failures(report: Report) -> Iterator[str]:
    """Failed requests by reason, if there are any."""
    reasons = sorted({reason for run in report.runs for reason in run.summary.failed})
    table: list[str | list[str]] = [
        ["Failed requests by reason", *(column.strategy for column in report.columns)]
    ]
    for reason in reasons:
        cells = []
        for column in report.columns:
            runs = (run for run in report.runs if run.strategy == column.strategy)
            counts = interval(float(run.summary.failed.get(reason, 0)) for run in runs)
            cells.append(shown(counts, 1))
        table.append([reason, *cells])
    if reasons:
        yield ""
        yield from _aligned(table)


def _ratios(report: Report) -> Iterator[str]:
    others = [column for column in report.columns if column.strategy != report.baseline]
    table: list[str | list[str]] = [
        [f"Ratio to {report.baseline}", *(column.strategy for column in others)]
    ]
    for label, figure in _RATIOS:
        ratios = (column.ratios[figure] for column in others)
        table.append([label, *(shown(ratio, 1, digits=3) for ratio in ratios)])
    yield from _aligned(table)


def _endpoints(columns: Sequence[Column]) -> Iterator[str]:
    """Every engine: requests, prompt tokens, hit ratio and preemptions."""
    table: list[str | list[str]] = [["Engine", *(column.strategy for column in columns)]]
    size = len(columns[0].endpoints) if columns else 0
    for n in range(min(size, _LISTED)):
        cells = (_cell(column.endpoints[n]) for column in columns)
        table.append([f"engine-{n}", *cells])
    yield "Requests, prompt tokens, hit ratio, preemptions of every engine"
    yield from _aligned(table)
    if size > _LISTED:
        yield f"and {size - _LISTED} engines more; --json has all of them"


def _cell(endpoint: PerEndpoint) -> str:
    tokens = f"{endpoint.prompt_tokens / 1e3:.0f}k"
    return f"{endpoint.requests:.0f} {tokens:>6} {endpoint.hit_ratio:>6.1%} {endpoint.preemptions:>3.0f}"


def _aligned(table: Sequence[str | list[str]]) -> Iterator[str]:
    rows = [row for row in table if isinstance(row, list)]
    widths = [max(len(cell) for cell in cells) for cells in zip(*rows, strict=True)]
    line_width = sum(widths) + 2 * (len(widths) - 1)
    for row in table:
        if isinstance(row, str):
            yield f" {row} ".center(line_width, "-")
            continue
        first, *rest = row
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *cells])


def shown(value: Interval, factor: float, *, digits: int | None = None) -> str:
    """A mean and its interval, in as many digits as four figures need."""
    mean, half = value.mean * factor, value.half * factor
    if math.isnan(mean):
        return "-"
    if digits is None:
        integral = mean.is_integer() and not half > 0
        digits = 0 if integral or abs(mean) >= 1000 else 1 if abs(mean) >= 100 else 2
    number = f"{mean:.{digits}f}"
    return number if math.isnan(half) else f"{number} ± {half:.{digits}f}"
