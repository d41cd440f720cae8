"""`extproc replay`: compare strategies on recorded requests.

    extproc replay decisions.jsonl --strategy adaptive --strategy least-load

Two things are shown for the strategy of the recording and for each other one: how many of the recorded
decisions it would take alike on the same states, and how fast the requests would have been answered,
simulated with the step times that the picker learned of its engines. The latter are estimates.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from extproc.errors import ConfigError
from extproc.simulator import replay, replay_traces
from extproc.simulator.fleet import report, scenario, tables
from extproc.simulator.replay_agreement import AgreementSummary
from extproc.simulator.simulate_command import (
    MAX_SEEDS,
    Progress,
    count,
    require_outputs,
    text_output,
    write,
    write_json,
)
from extproc.simulator.traffic import MAX_REQUESTS
from extproc.simulator.ttft_comparison import TtftComparison, count_of, verdict_line

#: Largest fleet that is simulated (count).
MAX_ENGINES = 10_000


class ReplayReport(report.Report, frozen=True, kw_only=True):
    """Results of a replay.

    Attributes:
        agreements: As in `replay.Replay`.
        fidelity: None for a trace, and at another rate than the recorded one.
        comparisons: Comparison of each strategy with the baseline.
        verdicts: The comparisons in words.
    """

    agreements: Sequence[AgreementSummary]
    fidelity: replay.Fidelity | None
    comparisons: Sequence[TtftComparison]
    verdicts: Sequence[str]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_source(parser)
    add = parser.add_argument
    add(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME",
        help="a strategy to compare with that of the recording; repeatable",
    )
    add(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a configuration to compare, named by its file; repeatable",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="write everything as JSON; - is standard output, with the text on standard error",
    )
    add("--plots", type=Path, metavar="FOLDER", help="write plots as PNG and SVG")
    add("--html", type=Path, metavar="FILE", help="write a page with the result and its plots")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is read, and how it is simulated."""
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        type=Path,
        help="a recording, a trace of Mooncake or Azure, a ShareGPT file, or a dataset of vllm bench",
    )
    add("--pool", metavar="NAME", help="pool to replay, where the recording has several")
    add(
        "--requests",
        type=count,
        default=MAX_REQUESTS,
        metavar="N",
        help="only the first N requests (%(default)s)",
    )
    add(
        "--rate-scale",
        type=_rate,
        default=1.0,
        metavar="X",
        help="divide times of arrival, and pauses of users, by this, where the file has times (%(default)s)",
    )
    add(
        "--engine",
        action="append",
        default=[],
        type=_number,
        metavar="NAME=NUMBER",
        help="a number of the engines in place of what was learned, such as max_num_seqs=64; "
        "repeatable",
    )
    traces = parser.add_argument_group("flags for traces and datasets, which have no engines")
    traces.add_argument(
        "--engines",
        type=functools.partial(count, most=MAX_ENGINES),
        metavar="N",
        help="engines of the fleet",
    )
    traces.add_argument("--profile", metavar="NAME", help="machine of the engines, as in scenarios")
    traces.add_argument(
        "--rate",
        type=_rate,
        metavar="R",
        help="conversations that begin per second, for formats without times",
    )
    add(
        "--seeds",
        type=functools.partial(count, most=MAX_SEEDS),
        default=3,
        metavar="N",
        help="simulations of each (%(default)s)",
    )
    add(
        "--jobs",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; default: one per core",
    )


def load(
    args: argparse.Namespace,
    *,
    strategies: Sequence[str],
    configs: Sequence[Path],
    num_engines: int | None = None,
) -> replay.Replay:
    """Read what the flags of `add_source` name.

    Args:
        num_engines: Engines of a trace where `--engines` is missing; None demands the flag.

    Raises:
        ConfigError: The file, a flag, a strategy or a configuration is wrong.
    """
    format_ = replay_traces.find_format(args.file)
    if args.rate_scale == 1.0:
        return _load(args, format_, strategies, configs, num_engines)
    if not replay_traces.has_times(format_):
        raise ConfigError(
            "--rate-scale",
            wanted=f"no factor, as {args.file} has no times",
            got=f"{args.rate_scale:g}",
            fix="remove it; --rate R is the rate",
        )
    return _load(args, format_, strategies, configs, num_engines).scaled(args.rate_scale)


def _load(
    args: argparse.Namespace,
    format_: replay_traces.Format,
    strategies: Sequence[str],
    configs: Sequence[Path],
    num_engines: int | None,
) -> replay.Replay:
    """Read a file of a format, see `load`."""
    limits = dict(args.engine)
    if format_ == "recording":
        _refuse(
            {"--engines": args.engines, "--profile": args.profile, "--rate": args.rate},
            wanted="this flag with a trace or dataset only",
            got=f"a recording, {args.file}",
            fix="remove it: a recording has its engines and times",
        )
        return replay.load(
            args.file,
            strategies=strategies,
            configs=configs,
            pool=args.pool,
            max_requests=args.requests,
            limits=limits,
        )
    _refuse(
        {"--pool": args.pool},
        wanted="this flag with a recording only",
        got=f"a trace or dataset, {args.file}",
        fix="remove it: a trace has no pools",
    )
    num_engines = args.engines or num_engines
    if num_engines is None or args.profile is None:
        raise ConfigError(
            "--engines, --profile" if num_engines is None else "--profile",
            wanted=f"a fleet, as {args.file} has none",
            got="no --profile" if args.profile is None else "no --engines",
            fix="write --engines 4 --profile h100-8b-bf16"
            if num_engines is None
            else "write --profile h100-8b-bf16",
        )
    return replay.load_trace(
        args.file,
        format_,
        strategies=strategies,
        configs=configs,
        fleet=scenario.EngineGroup(count=num_engines, profile=args.profile, set=limits),
        rate_per_s=args.rate,
        max_requests=args.requests,
    )


def _refuse(values: Mapping[str, object], *, wanted: str, got: str, fix: str) -> None:
    """Refuse flags that have a value."""
    for flag, value in values.items():
        if value is not None:
            raise ConfigError(flag, wanted=wanted, got=got, fix=fix)


def run(args: argparse.Namespace) -> int:
    """Replay; returns the exit status.

    Raises:
        ConfigError: The recording, a strategy or a configuration is wrong.
    """
    require_outputs(args.json, args.html, folder=args.plots)
    if args.plots or args.html:
        from extproc.simulator import report_plots

        report_plots.require("--plots" if args.plots else "--html")
    loaded = load(args, strategies=args.strategy, configs=args.config)
    for column in loaded.columns:
        for warning in column.warnings:
            print(f"warning: {column.name}: {warning}", file=sys.stderr)
    definition = replay.scenario_of(loaded, range(1, args.seeds + 1))
    progress = Progress(len(definition.seeds) * len(loaded.columns), sys.stderr)
    try:
        results = replay.simulate_all(
            definition,
            loaded.columns,
            recorded=replay.with_recorded_start(loaded, definition) if loaded.agreements else None,
            places=loaded.traffic.places,
            jobs=args.jobs,
            on_run=progress.step,
        )
    finally:
        progress.close()
    baseline = loaded.columns[0].name
    fidelity = None
    if loaded.agreements and loaded.rate_scale == 1.0:  # nothing was measured at another rate
        as_recorded = replay.simulate_as_recorded(loaded, definition)
        fidelity = replay.measure_fidelity(loaded, as_recorded, results[baseline].values())
    result = replay.to_report(definition, results, baseline)
    comparisons = [replay.compare(results, column.name, baseline) for column in loaded.columns[1:]]
    lines = list(describe(loaded, result, comparisons, fidelity))
    print("\n".join(lines), file=text_output(args.json))
    if args.plots:  # first, as it makes the folder, where the other files may be
        for path in report_plots.draw(result, args.plots):
            print(f"wrote {path}", file=sys.stderr)
    if args.json:
        complete = ReplayReport(
            *msgspec.structs.astuple(result),
            agreements=loaded.agreements,
            fidelity=fidelity,
            comparisons=comparisons,
            verdicts=[*map(verdict_line, comparisons)],
        )
        write_json(args.json, report.encoded(complete))
    if args.html:
        write(args.html, report_plots.page(result, "\n".join(lines)).encode())
    return 0


def describe(
    loaded: replay.Replay,
    result: report.Report,
    comparisons: Sequence[TtftComparison],
    fidelity: replay.Fidelity | None,
) -> Iterator[str]:
    """Lines of the result, for a terminal.

    Args:
        fidelity: None for a trace, and at another rate than the recorded one.
    """
    yield source_line(loaded)
    yield from _notes(loaded)
    yield ""
    if loaded.agreements:
        yield "Agreement: recorded decisions made again on the same states"
        for agreement in loaded.agreements:
            yield f"  {_agreement_line(agreement)}"
        yield ""
        yield "Estimates: simulated with the step times that were learned of these endpoints"
    else:
        yield "Estimates: simulated"
    yield tables.text(result)
    yield ""
    if fidelity is not None:
        yield fidelity_line(fidelity)
    for comparison in comparisons:
        yield verdict_line(comparison)


def source_line(loaded: replay.Replay, *, has_fleet: bool = True) -> str:
    """Description of what was read.

    Args:
        has_fleet: False where the size of the fleet means nothing.
    """
    traffic = loaded.traffic
    line = f"{loaded.title}: {len(traffic.requests)} requests in {traffic.duration_s:.0f} s"
    engines = sum(group.count for group in loaded.fleet)
    return f"{line}, {count_of(engines, 'endpoint')}" if has_fleet else line


def require_fitting(loaded: replay.Replay) -> None:
    """Check that engines take every request: one that is too long fails on any fleet.

    Raises:
        ConfigError: Some are too long.
    """
    num_long, longest, limit = _count_too_long(loaded)
    if num_long:
        raise ConfigError(
            loaded.where,
            wanted=f"requests of at most {limit} tokens, as the engines take",
            got=f"{num_long} longer ones, up to {longest} tokens",
            fix=_fix_too_long(longest),
        )


def _count_too_long(loaded: replay.Replay) -> tuple[int, int, int]:
    """Requests that no engine takes (count), tokens of the longest, and tokens that engines take."""
    limit = max((group.resolved().longest for group in loaded.fleet), default=0)
    specs = (request.spec for request in loaded.traffic.requests)
    tokens = [spec.prompt_tokens + spec.output_tokens for spec in specs]
    return sum(length > limit for length in tokens), max(tokens, default=0), limit


def _fix_too_long(longest: int) -> str:
    return (
        f"write --engine max_model_len={longest}, and --engine kv_tokens=N if the cache is smaller"
    )


def _notes(loaded: replay.Replay) -> Iterator[str]:
    traffic = loaded.traffic
    num_long, longest, limit = _count_too_long(loaded)
    if num_long:
        yield (
            f"too long: {count_of(num_long, 'request')}, which engines of {limit} tokens refuse; "
            f"{_fix_too_long(longest)}"
        )
    if traffic.num_failed:
        yield f"left out: {traffic.num_failed} requests without a response below 400"
    if loaded.lost:
        yield f"lost: {loaded.lost} rows that the recorder had no room for"
    if num_unshown := traffic.num_estimated - traffic.num_open:
        yield (
            f"estimated: the length of {count_of(num_unshown, 'answer')}, whose usage was not shown "
            "(responses.stream_sample_ratio shows it)"
        )
    if traffic.num_open:
        yield f"estimated: the length of {count_of(traffic.num_open, 'answer')} without a recorded end"
    if loaded.is_reconfigured:
        yield "reconfigured: settings changed meanwhile; estimates are of the last ones"
    if loaded.since_s:
        yield f"warm-up: the first {loaded.since_s:.3g} s are not counted"


def _agreement_line(agreement: AgreementSummary) -> str:
    if agreement.unknown:
        return f"{agreement.strategy}: unknown, it reads {agreement.unknown}"
    line = (
        f"{agreement.strategy}: {agreement.agreed} of {agreement.decisions} ({agreement.ratio:.1%})"
    )
    if agreement.by_chance:
        line += f", {agreement.by_chance} of them by another draw of chance"
    return line


def fidelity_line(fidelity: replay.Fidelity) -> str:
    """Estimates of the recorded decisions, and of the recorded strategy, beside what was measured."""
    measured_s = fidelity.measured_s
    if not measured_s > 0.0:
        return (
            "Fidelity: unknown, no time to a first token was recorded (responses.stream_sample_ratio shows "
            "streams to extproc, behind Envoys that buffer requests: original-dst-buffered, override-host)"
        )
    estimated_s, new_s = fidelity.estimated_s, fidelity.new_s
    if math.isnan(estimated_s):
        return (
            "Fidelity: unknown, no request with a recorded time to a first token was answered both with "
            "the recorded decisions and with new ones"
        )
    return (
        f"Fidelity: mean TTFT {1e3 * measured_s:.1f} ms measured, {1e3 * estimated_s:.1f} ms estimated "
        f"with the recorded decisions ({estimated_s / measured_s:.3f}), {1e3 * new_s:.1f} ms with new "
        f"ones ({new_s / measured_s:.3f})"
    )


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"expected a rate above 0, got {text!r}")
    return rate


def _number(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not equals or not math.isfinite(number):
        raise argparse.ArgumentTypeError(
            f"expected NAME=NUMBER, such as max_num_seqs=64, got {text!r}"
        )
    return name, number
