"""`extproc simulate`: compare strategies on simulated fleets in virtual time.

The scheduling code of the server runs over simulated engines. Every strategy meets the same
requests with the same seed; results are means over seeds with 95 % intervals.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TextIO

from extproc.errors import file_error
from extproc.simulator import simulation_runs
from extproc.simulator.fleet import report, scenario, tables
from extproc.simulator.ttft_comparison import verdict_lines

#: Simulations of each strategy at most (count).
MAX_SEEDS: Final = 10_000

#: Largest number that flags take.
_MAX_COUNT: Final = 1_000_000_000

_STDOUT: Final = Path("-")

_BAR = 30


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("scenario", metavar="SCENARIO", type=Path, help="YAML or JSON file")
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a strategy, a variant of the scenario, or {scenario.CLAIRVOYANT}; repeatable; "
        "default: those of the scenario",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a configuration to compare, named by its file; repeatable",
    )
    parser.add_argument(
        "--baseline", default="", metavar="NAME", help="show ratios to this strategy"
    )
    parser.add_argument(
        "--seeds",
        type=parse_seeds,
        default=(),
        metavar="N|A,B,...",
        help="how many seeds, from 1, or which; default: those of the scenario",
    )
    parser.add_argument(
        "--jobs",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes; default: one per core",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write everything as JSON; - is standard output, with the table on standard error",
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots as PNG and SVG")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with the result and its plots"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no table")


def run(args: argparse.Namespace) -> int:
    """Simulate; returns the exit status.

    Raises:
        ConfigError: The scenario, a configuration or a strategy is wrong.
    """
    require_outputs(args.json, args.html, folder=args.plots)
    todo = simulation_runs.plan(
        args.scenario, strategies=args.strategy, configs=args.config, seeds=args.seeds
    )
    if args.baseline:
        # Before the work, not after it.
        report.report(todo.scenario, (), baseline=args.baseline)
    if args.plots or args.html:
        from extproc.simulator import report_plots

        report_plots.require("--plots" if args.plots else "--html")
    for column in todo.columns:
        for warning in column.warnings:
            _say(f"warning: {column.name}: {warning}", quiet=args.quiet)
    progress = Progress(len(todo.tasks), None if args.quiet else sys.stderr)
    runs = _simulate(todo, jobs=args.jobs, progress=progress)
    result = report.report(todo.scenario, runs, baseline=args.baseline)
    text = _describe(result)
    if not args.quiet:
        print(text, file=text_output(args.json))
    if args.plots:  # first, as it makes the folder, where the JSON file may be
        for path in report_plots.draw(result, args.plots):
            _say(f"wrote {path}", quiet=args.quiet)
    if args.json:
        write_json(args.json, report.encoded(result))
    if args.html:
        write(args.html, report_plots.page(result, text).encode())
    return 0


def _simulate(
    todo: simulation_runs.SimulationPlan, *, jobs: int, progress: Progress
) -> list[report.Run]:
    runs = []
    try:
        for run in simulation_runs.runs(todo, jobs=jobs):
            runs.append(run)
            progress.step(f"{run.strategy}, seed {run.seed}")
    finally:
        progress.close()
    return runs


def _describe(result: report.Report) -> str:
    """The tables, and the verdicts where there is a baseline."""
    lines = [tables.text(result)]
    if result.baseline:
        lines += ["", *verdict_lines(result)]
    return "\n".join(lines)


class Progress:
    """A bar on a terminal, and one line in the end elsewhere. Mutable; one owner.

    Args:
        total: Runs there will be.
        out: Where it is shown; None for nowhere.
    """

    def __init__(self, total: int, out: TextIO | None) -> None:
        self._total = total
        self._out = out
        self._live = out is not None and out.isatty()
        self._done = 0
        self._began = time.monotonic()
        self._show("starting")

    def step(self, what: str) -> None:
        """A run is over."""
        self._done += 1
        self._show(what)

    def close(self) -> None:
        """All runs are over."""
        if self._out is None:
            return
        took = time.monotonic() - self._began
        head = "\r\x1b[K" if self._live else ""
        runs = "run" if self._done == 1 else "runs"
        print(f"{head}{self._done} {runs} in {took:.1f} s", file=self._out, flush=True)

    def _show(self, what: str) -> None:
        if self._out is None or not self._live:
            return
        filled = _BAR * self._done // self._total
        bar = "#" * filled + "." * (_BAR - filled)
        left = ""
        if self._done:
            seconds = (time.monotonic() - self._began) / self._done * (self._total - self._done)
            left = f", {seconds:.0f} s left"
        text = f"\r\x1b[K[{bar}] {self._done}/{self._total} {what}{left}"
        print(text, end="", file=self._out, flush=True)


def parse_seeds(text: str) -> Sequence[int]:
    """Seeds of a list with commas; a single number n stands for 1 to n."""
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = []
    if "," not in text:
        numbers = list(range(1, numbers[0] + 1)) if numbers and numbers[0] <= MAX_SEEDS else []
    is_apart = len(set(numbers)) == len(numbers)
    if not numbers or not is_apart or max(map(abs, numbers)) >= 1 << 63:
        raise argparse.ArgumentTypeError(
            f"expected how many, up to {MAX_SEEDS}, or different whole numbers of 63 bits, "
            f"got {text!r}; write 5 for five seeds, or 7, for seed 7"
        )
    return numbers


def count(text: str, *, most: int = _MAX_COUNT) -> int:
    """A number above 0, for a flag."""
    # Python converts no text of thousands of digits.
    is_short = len(text) <= len(str(most)) and text.isascii() and text.isdecimal()
    if not is_short or not 0 < int(text) <= most:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {most}, got {text!r}")
    return int(text)


def text_output(json: Path | None) -> TextIO:
    """The stream of text beside the JSON: standard error where `-` is standard output."""
    return sys.stderr if json == _STDOUT else sys.stdout


def write_json(path: Path, content: bytes) -> None:
    """Write JSON to a file, or to standard output where the path is `-`.

    Raises:
        ConfigError: It cannot be written.
    """
    if path == _STDOUT:
        print(content.decode().rstrip("\n"))
    else:
        write(path, content)


def write(path: Path, content: bytes) -> None:
    """Write a file of results; one that was there stays as it is where that fails.

    Raises:
        ConfigError: It cannot be written.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(content)  # a link, pipe or device keeps its place
            return
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise file_error(path, error, wanted="a file that can be written") from None


def require_outputs(*files: Path | None, folder: Path | None = None) -> None:
    """Refuse files of results, and a folder of plots, that cannot be written; before the work.

    Raises:
        ConfigError: One of them cannot be written.
    """
    for path in files:
        if path is not None and path != _STDOUT and not _is_made_with(path.parent, folder):
            _require(path, _check_file, wanted="a file that can be written")
    if folder is not None:
        _require(folder, _check_folder, wanted="a folder that can be written")


def _is_made_with(parent: Path, folder: Path | None) -> bool:
    """True if a folder is not there, and is made with a folder of plots."""
    if folder is None or parent.exists():
        return False
    return folder.absolute().is_relative_to(parent.absolute())


def _require(path: Path, check: Callable[[Path], None], *, wanted: str) -> None:
    try:
        check(path)
    except OSError as error:
        raise file_error(path, error, wanted=wanted) from None


def _check_file(path: Path) -> None:
    """Raise the OSError that `write` would meet; not for a link, pipe or device."""
    if path.is_dir():
        raise _os_error(errno.EISDIR)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return
    if not path.parent.exists():
        raise _os_error(errno.ENOENT)
    _check_folder(path.parent)


def _check_folder(path: Path) -> None:
    """Raise the OSError of a folder that cannot be made or written to."""
    folder = next(place for place in (path, *path.parents) if place.exists())
    if not folder.is_dir():
        raise _os_error(errno.ENOTDIR)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _os_error(errno.EACCES)


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _say(text: str, *, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr)
