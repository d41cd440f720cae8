"""`extproc serve`: run the endpoint picker."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from extproc.cli import flags, main
from extproc.config import pools
from extproc.config.settings import Settings
from extproc.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flags.add(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        ConfigError: Flags or files are wrong.
    """
    from extproc.config import lint

    resolved = flags.resolve(args)
    settings = resolved.settings
    if not (pools.has_source(settings.pool) or settings.pools or pools.from_kubernetes(settings)):
        raise ConfigError(
            resolved.where,
            wanted="endpoints",
            got="none",
            fix="add --endpoints ip:port,..., --endpoints-file, --pool-name or a pool section",
        )
    for warning in (*resolved.warnings, *lint.find_warnings(resolved.settings)):
        print(f"extproc: warning: {warning}", file=sys.stderr)
    from extproc.server import preflight

    problems = preflight.find_problems(settings)
    for problem in problems:
        main.print_error(problem)
    if problems:
        return 2

    configure_grpc_core()
    from extproc.server import lifecycle, reload

    def files(settings: Settings) -> Sequence[str]:
        """The configuration file, and the plugin files it names."""
        own = [args.config_file] if args.config_file else []
        return [*own, *settings.scheduling.plugin_files]

    source = reload.ConfigSource(files, lambda: flags.resolve(args).settings)
    return lifecycle.run(resolved.settings, source)


#: Without the listener of the event engine, the thread that waits for events reads the sockets
#: itself. With it, another thread does and wakes the first one: a hop more for every message.
#: Measured by `python -m bench.overhead`.
EXPERIMENTS = "-event_engine_listener"

_VARIABLE = "GRPC_EXPERIMENTS"


def configure_grpc_core() -> bool:
    """Set gRPC experiments, unless the environment does.

    Returns:
        False if gRPC was loaded already, so that the setting has no effect.
    """
    os.environ.setdefault(_VARIABLE, EXPERIMENTS)
    return "grpc" not in sys.modules
