"""`extproc doctor`: look at a running Envoy, extproc and engines, and say what is wrong.

It reads admin and metrics pages only: no request is sent to a model, and nothing is changed. The
engines are those that a running extproc lists (--server), or those of a configuration or of flags,
which are the flags of `serve`. Without any of these, it reads an extproc at 127.0.0.1:9090. Limits
are those of a file, or else of the running extproc; flags beat both.

    extproc doctor --envoy 127.0.0.1:9901 --server 127.0.0.1:9090
    extproc doctor --endpoints 10.0.0.1:8000,10.0.0.2:8000
    extproc doctor --envoy 127.0.0.1:9901 --config-file extproc.yaml --format json

Exit status: 0 no errors, 1 errors, 2 wrong flags or files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys

import msgspec

from extproc.cli import flags, main
from extproc.config import loader, pools
from extproc.errors import ConfigError

#: Ports where none is written: Envoy's in the shipped files, and --metrics-port.
_ENVOY_PORT = 9901
_PICKER_PORT = 9090

#: Host of the extproc that is read where nothing is named.
_LOOPBACK = "127.0.0.1"

_PAGE_S = 5.0
_MAX_PAGE_S = 30.0

_STYLES = {"error": "red", "warning": "yellow", "note": "bold"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add("--envoy", metavar="URL", help="admin port of an Envoy, such as 127.0.0.1:9901")
    add("--server", metavar="URL", help="metrics port of a running extproc, which lists engines")
    add("--token-file", metavar="FILE", help="with the token of --server (server.admin_token_file)")
    add(
        "--timeout",
        type=main.seconds_parser(0.01, _MAX_PAGE_S),
        default=_PAGE_S,
        metavar="SECONDS",
        help="time limit of one page (%(default)s); all together have a minute",
    )
    add(
        "--format",
        choices=("table", "json"),
        default="table",
        help="form of the report (%(default)s)",
    )
    flags.add(parser)


def run(args: argparse.Namespace) -> int:
    """Look and report; returns the exit status, see the head of this module.

    Raises:
        ConfigError: A file or flag is wrong.
    """
    from extproc.diagnostics import collector
    from extproc.server import admin_access

    resolved = flags.resolve(args)
    settings = resolved.settings
    for warning in resolved.warnings:
        print(f"extproc: warning: {warning}", file=sys.stderr)
    addresses = ((args.envoy, "--envoy", _ENVOY_PORT), (args.server, "--server", _PICKER_PORT))
    envoy, picker = (
        None if text is None else collector.parse_url(text, where=flag, port=port)
        for text, flag, port in addresses
    )
    plans = pools.pool_plans(settings)
    if not (envoy or picker or any(pools.has_source(plan.settings.pool) for plan in plans)):
        picker = collector.parse_url(_LOOPBACK, where="--server", port=_PICKER_PORT)
    token = admin_access.read_token(args.token_file or "", where="--token-file", once=True)
    reader = collector.Collector(settings, timeout_s=args.timeout)
    if picker and not (args.config_file or args.config_text):
        running = asyncio.run(reader.read_configuration(picker, token))
        document = msgspec.structs.replace(loader.EMPTY, tree={**loader.EMPTY.tree, **running})
        # Another version may have other fields and ranges.
        with contextlib.suppress(ConfigError):
            settings = flags.resolve(args, document).settings
            reader.reconfigure(settings)
    pages = asyncio.run(reader.collect(envoy=envoy, picker=picker, token=token))
    result = collector.diagnose(pages, settings)
    if args.format == "json":
        print(json.dumps(result.to_json(), indent=2))
    else:
        for line in result.to_lines():
            word = line.partition(" ")[0]
            print(main.paint(line, _STYLES[word], sys.stdout) if word in _STYLES else line)
    return result.status
