"""Tables of simulated results in `docs/benchmarks`, generated from `bench/results/proof`.

    python -m bench.pages           # rewrites the blocks

A test holds every block against the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from bench import bars, frontier, published, rig

PAGES = rig.ROOT / "docs" / "benchmarks"

Row = dict[str, list[float | None]]

#: Heading, figure, factor and digits of the columns of a table of results.
WAITS = (
    ("req/s", "requests_per_s", 1, 1),
    ("TTFT mean, ms", "ttft_mean_s", 1e3, 0),
    ("p95", "ttft_p95_s", 1e3, 0),
    ("p99", "ttft_p99_s", 1e3, 0),
    ("TPOT, ms", "tpot_mean_s", 1e3, 1),
    ("answer mean, s", "e2e_mean_s", 1, 2),
    ("p95", "e2e_p95_s", 1, 2),
    ("hit ratio", "hit_ratio", 1, 3),
    ("max/mean requests", "requests_max_over_mean", 1, 2),
    ("failed", "failed", 1, 1),
)


def results(*scenarios: str) -> str:
    """Every column of some scenarios; means over the seeds with half of the 95 % interval."""
    parts = []
    for scenario in scenarios:
        recorded = bars.result(scenario)
        if recorded is None:
            continue
        parts += [f"**{recorded['title']}** ({scenario}, seeds {_list(recorded['seeds'])})", ""]
        parts += ["| strategy | " + " | ".join(head for head, *_ in WAITS) + " |"]
        parts += ["|---" * (len(WAITS) + 1) + "|"]
        for name, row in recorded["columns"].items():
            cells = [_cell(row[key], factor, digits) for _, key, factor, digits in WAITS]
            parts.append(f"| {name} | " + " | ".join(cells) + " |")
        parts += [
            "",
            f"`{recorded['command']}`, {recorded['date']}, commit {recorded['commit']}.",
            "",
        ]
    return "\n".join(parts).rstrip()


def _cell(value: list[float | None], factor: float, digits: int) -> str:
    mean, half = value
    if mean is None:
        return ""
    text = f"{mean * factor:.{digits}f}"
    if half is None or not half:
        return text
    return f"{text} ± {half * factor:.{digits}f}"


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def verdicts(*scenarios: str) -> str:
    """The bars of some scenarios, all where none is named."""
    rows = [
        "| scenario | figure | against | wanted | adaptive | clairvoyant | |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in bars.outcomes():
        bar = outcome.bar
        if scenarios and bar.scenario not in scenarios:
            continue
        sign = ">=" if bar.at_least else "<="
        known = (
            "" if outcome.clairvoyant is None else f"{outcome.clairvoyant / outcome.other:.2f} x"
        )
        rows.append(
            f"| {bar.scenario} | {bar.figure} | {outcome.against} | {sign} {bar.wanted:.2f} x "
            f"| {outcome.ratio:.3f} x | {known} | {'met' if outcome.met else '**missed**'} |"
        )
    return "\n".join(rows)


def _short(value: float) -> str:
    """Four digits, or all in front of the point; without an exponent."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"


def l4() -> str:
    """KubeAI's twelve runs, published and simulated."""
    rows = [
        "| most open | strategy | req/s | TTFT mean, ms | TPOT mean, ms | ITL median | ITL p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (most, strategy), measured in published.L4.items():
        row = _column(f"l4-published-{most}", strategy)
        if row is None:
            continue
        simulated = [
            row["requests_per_s"][0],
            *(
                row[key][0] * 1e3
                for key in ("ttft_mean_s", "tpot_mean_s", "itl_p50_s", "itl_p99_s")
            ),
        ]
        cells = [f"{_short(a)} → {_short(b)}" for a, b in zip(measured, simulated, strict=True)]
        rows.append(f"| {most} | {strategy} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def k6() -> str:
    """KubeAI's k6 runs, published and simulated."""
    rows = [
        "| scenario | strategy | req/s | mean, s | median | p90 | p95 |",
        "|---|---|---|---|---|---|---|",
    ]
    keys = ("requests_per_s", "e2e_mean_s", "e2e_p50_s", "e2e_p90_s", "e2e_p95_s")
    for (scenario, strategy), measured in published.K6.items():
        row = _column(scenario, strategy)
        if row is None:
            continue
        cells = [
            f"{_short(a)} → {_short(row[key][0])}" for a, key in zip(measured, keys, strict=True)
        ]
        rows.append(f"| {scenario} | {strategy} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def lora() -> str:
    """The LoRA experiment, as ratios to its baseline; cells of another direction are marked."""
    keys = ("requests_per_s", "ttft_mean_s", "ttft_p95_s", "token_mean_s")
    rows = [
        "| workload | column | requests/min | TTFT mean | TTFT p95 | s per token | agrees |",
        "|---|---|---|---|---|---|---|",
    ]
    for scenario, columns in published.LORA.items():
        base = _column(scenario, "baseline")
        if base is None:
            continue
        for name, measured in columns.items():
            row = _column(scenario, name)
            if name == "baseline" or row is None:
                continue
            cells, agree = [], 0
            for place, key in enumerate(keys):
                published_change = measured[place] / columns["baseline"][place] - 1
                change = row[key][0] / base[key][0] - 1
                same = _direction(published_change) == _direction(change)
                agree += same
                cells.append(f"{published_change:+.0%} → {change:+.0%}{'' if same else ' !'}")
            rows.append(f"| {scenario} | {name} | " + " | ".join(cells) + f" | {agree} of 4 |")
    return "\n".join(rows)


def _direction(change: float) -> int:
    """Up, down, or neither: repeats of one published column differ by 5 %."""
    return 0 if abs(change) < 0.05 else 1 if change > 0 else -1


def _column(scenario: str, strategy: str) -> Row | None:
    recorded = bars.result(scenario)
    return None if recorded is None else recorded["columns"].get(strategy)


#: Blocks by name: what stands between `<!-- NAME -->` and `<!-- /NAME -->`.
BLOCKS: dict[str, Callable[[], str]] = {
    "bars": verdicts,
    "l4 published": l4,
    "l4 results": lambda: results("l4-800", "l4-1600", "l4-3200", "l4-8000"),
    "l4 bars": lambda: verdicts("l4-800", "l4-1600", "l4-3200", "l4-8000"),
    "lora published": lora,
    "lora results": lambda: results("lora-base", "lora-10", "lora-4"),
    "lora bars": lambda: verdicts("lora-base", "lora-10", "lora-4"),
    "k6 published": k6,
    "k6 results": lambda: results("k6-s1", "k6-s2"),
    "k6 bars": lambda: verdicts("k6-s1", "k6-s2"),
    "mooncake results": lambda: results("mooncake-70", "mooncake-95"),
    "mooncake bars": lambda: verdicts("mooncake-70", "mooncake-95"),
    "trouble results": lambda: results(
        "heterogeneous", "failures", "cold-start", "hot-prefix", "unique"
    ),
    "l4 frontier": lambda: frontier.table("l4-800", "l4-1600", "l4-3200", "l4-8000"),
    "lora frontier": lambda: frontier.table("lora-base", "lora-10", "lora-4"),
    "mooncake frontier": lambda: frontier.table("mooncake-70", "mooncake-95"),
    "failing results": lambda: results("failing"),
    "trouble bars": lambda: verdicts(
        "heterogeneous", "failures", "cold-start", "hot-prefix", "unique"
    ),
}


def filled(text: str) -> str:
    """A page with every block made anew."""
    for name, build in BLOCKS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, marker, rest = text.partition(begin)
        if marker:
            _, closed, after = rest.partition(end)
            assert closed, f"expected {end} after {begin.strip()}, got none; close the block"
            text = before + begin + build() + "\n" + end + after
    return text


def paths() -> list[Path]:
    """Every page of benchmarks."""
    return sorted(PAGES.glob("*.md"))


def main() -> None:
    for path in paths():
        text = path.read_text()
        if (new := filled(text)) != text:
            path.write_text(new)
            print(f"rewrote {path.name}")


if __name__ == "__main__":
    main()
