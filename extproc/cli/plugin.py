"""`extproc plugin`: a template to start from, and the contract to test against.

    extproc plugin template scorer > my_scorer.py
    extproc plugin test my_scorer.py

`test` runs every plugin of a file through the checks that built-in plugins pass, and says how long
one call takes. Exit status: 0 all in order, 1 a plugin breaks the contract, 2 the file is no
plugin file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

#: What a class with a method is, and the name of its template.
_ROLES = {"filter": "filter", "score": "scorer", "cost": "cost", "pick": "picker"}

#: Endpoints and calls from which the time of one call is taken.
_ENDPOINTS = 100
_CALLS = 51


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, and those of the subcommands."""
    acts = parser.add_subparsers(metavar="ACTION", required=True)
    template = acts.add_parser("template", help="print a file to start from")
    template.add_argument("role", choices=sorted(_ROLES.values()))
    template.set_defaults(act=_template)
    test = acts.add_parser("test", help="hold the plugins of files to the contract")
    test.add_argument("files", nargs="+", metavar="FILE", type=Path)
    test.set_defaults(act=_test)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand; returns the exit status.

    Raises:
        ConfigError: A file cannot be read or imported, or brings no plugin.
    """
    action: Callable[[argparse.Namespace], int] = args.act
    return action(args)


def _template(args: argparse.Namespace) -> int:
    folder = resources.files("extproc.testing.templates")
    print(folder.joinpath(f"{args.role}.py").read_text(encoding="utf-8"), end="")
    return 0


def _test(args: argparse.Namespace) -> int:
    from extproc.config import plugin_loader
    from extproc.testing import contract

    external_plugins = [
        plugin_loader.from_file(path, where=str(path), relative_to="the working directory")
        for path in args.files
    ]
    plugin_loader.combine(external_plugins)  # kinds that clash
    broken = 0
    for plugin_file in external_plugins:
        for cls in plugin_file.classes:
            for method in plugin_loader.roles(cls):
                name = f"{plugin_file.origin}: {_ROLES[method]} {cls.kind}"  # type: ignore[attr-defined]  # from_file saw it
                try:
                    contract.CHECKS[method](cls)
                    timing = _time_method(cls, method)
                except AssertionError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    broken += 1
                else:
                    print(f"{name} is in order; {timing}")
    return 1 if broken else 0


def _time_method(cls: type[Any], method: str) -> str:
    """Measured time of one call, compared with the budget.

    Raises:
        AssertionError: A call raised.
    """
    from extproc.scheduling import plugin_guard
    from extproc.testing import builders, probes

    plugin = probes.build_plugin(cls)
    metrics = probes.read_extra_metrics(plugin)
    candidates = builders.loaded_candidates(_ENDPOINTS, extra_metrics=metrics)
    context = probes.probe_context()
    extra: tuple[Any, ...] = ([0.0] * _ENDPOINTS,) if method == "pick" else ()
    named = {"count": 1} if method == "pick" else {}
    durations_s = []
    with probes.report_errors(f"{plugin.kind} with {_ENDPOINTS} endpoints", f"{_CALLS} answers"):
        for _ in range(_CALLS):
            started = time.perf_counter()
            answer = getattr(plugin, method)(context, candidates, *extra, **named)
            if method == "filter":
                list(answer)  # The guard reads it too, and a generator works only then.
            durations_s.append(time.perf_counter() - started)
    median_s, budget_s = statistics.median(durations_s), plugin_guard.GuardLimits().budget_s
    timing = f"{median_s * 1e6:.0f} us for {_ENDPOINTS} endpoints"
    return (
        timing if median_s <= budget_s else f"{timing}, above the budget of {budget_s * 1e3:g} ms"
    )
