"""`extproc explain`: say which endpoint a request would get, or got, and why.

The request is a JSON body from a file or standard input. What is known of the endpoints comes from
a running server (--server), or from a file (--state) in the form in which /debug/pool shows it.
With --id a server tells of a request it routed lately.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extproc.errors import ConfigError, ExtprocError

#: What a server takes to answer; a dry run takes under a millisecond.
_TIMEOUT_S = 10.0


class UnreachableError(ExtprocError):
    """The server that was asked does not answer."""


def add_parser(subparsers: Any) -> None:
    """Add the command and its flags to the `extproc` parser."""
    parser = subparsers.add_parser(
        "explain",
        help="say which endpoint a request would get, and why",
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("request", nargs="?", default="-", metavar="FILE", help="JSON body; - is standard input")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--state", metavar="FILE", help="YAML or JSON file with endpoints")
    source.add_argument("--server", metavar="URL", help="pages of a server, http://127.0.0.1:9090")
    add("--id", metavar="ID", help="x-request-id of a request that --server routed lately")
    add("--path", default="/v1/chat/completions", help="HTTP path (%(default)s)")
    add(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a header of the request; repeatable",
    )
    add("--token-file", metavar="FILE", help="with the token of --server (server.admin_token_file)")
    add("--config-file", metavar="FILE", help="configuration to decide with, for --state")
    add("--strategy", metavar="NAME", help="strategy to decide with, for --state")
    add("--allow-unsupported", action="store_true", help="as in serve, for --config-file")
    add("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain; returns the exit status: 0 also when the answer is a refusal.

    Raises:
        ConfigError: A file or flag is wrong.
        UnreachableError: The server does not answer.
    """
    from extproc.telemetry import explanation, table

    if args.id:
        told = _recall(args)
        _print(told, told_as=table.render_past(told), as_json=args.json)
        return 0
    body = sys.stdin.buffer.read() if args.request == "-" else _bytes_of(args.request)
    headers = _headers(args.header)
    if args.server:
        if args.config_file or args.strategy:
            raise ConfigError(
                "--server",
                wanted="--config-file and --strategy with --state only",
                found="both",
                fix="remove them; a server decides with its own configuration",
            )
        told = _ask(args.server, args.path, headers, body, token=_token(args))
    else:
        told = explanation.explain(_imagine(args, headers, body))
    _print(told, told_as=table.render_table(told), as_json=args.json)
    return 0


def _print(told: Mapping[str, Any], *, told_as: str, as_json: bool) -> None:
    print(json.dumps(told, indent=2) + "\n" if as_json else told_as, end="")


def _recall(args: argparse.Namespace) -> dict[str, Any]:
    if not args.server or args.request != "-":
        raise ConfigError(
            "--id",
            wanted="--server and no request",
            found="a request" if args.server else "no --server",
            fix="a server keeps the requests it routed; say extproc explain --server URL --id ID",
        )
    url = f"{_base(args.server)}/debug/decisions/{urllib.parse.quote(args.id, safe='')}"
    told = _fetch(urllib.request.Request(url), token=_token(args))  # noqa: S310 - _base made it http or https
    if told["outcome"] == "rejection" and told["status"] == 404:
        raise ConfigError(
            "--id", wanted="a request routed lately", found=told["message"], fix="check the id"
        )
    return told


def _imagine(args: argparse.Namespace, headers: Mapping[str, str], body: bytes) -> Any:
    from extproc.cli import imagined
    from extproc.config import load, strict
    from extproc.request import RawRequest
    from extproc.telemetry.state import PoolState

    document = load.read(Path(args.config_file)) if args.config_file else load.EMPTY
    overrides: list[load.Override] = []
    if args.strategy:
        overrides = [
            load.Override(("scheduling", "strategy"), args.strategy, "--strategy"),
            load.Override(("scheduling", "profile"), None, "--strategy"),
            load.Override(("scheduling", "plugins"), [], "--strategy"),
        ]
    if args.allow_unsupported:
        path = ("scheduling", "allow_unsupported")
        overrides.append(load.Override(path, value=True, flag="--allow-unsupported"))
    tree = load.tree_of(load.text_of(Path(args.state)), where=args.state)
    pool = strict.convert(tree, PoolState, where=args.state)
    raw = RawRequest({":method": "POST", ":path": args.path, **headers}, body)
    return imagined.decide(load.settings(document, overrides), pool, raw, where=args.state)


def _bytes_of(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(
            name, wanted="a readable file", found=error.strerror or "", fix="check the path"
        ) from None


def _headers(words: list[str]) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                "--header", wanted="name=value", found=repr(word), fix="put = between them"
            )
        headers[name.strip().lower()] = value
    return headers


def _token(args: argparse.Namespace) -> str:
    """The token of --token-file; empty where the flag is not used."""
    from extproc.server import admin_access

    return admin_access.read_token(args.token_file or "", where="--token-file")


def _ask(
    server: str,
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    token: str,
) -> dict[str, Any]:
    """Ask a running server for a dry run."""
    url = f"{_base(server)}/debug/explain"
    sent = {"x-explain-path": path, "content-type": "application/octet-stream"}
    sent |= {f"x-explain-header-{name}": value for name, value in headers.items()}
    # The scheme was made http or https above.
    request = urllib.request.Request(url, data=body, headers=sent, method="POST")  # noqa: S310
    return _fetch(request, token=token)


def _base(server: str) -> str:
    """The address of the pages, with a scheme."""
    if not server.startswith(("http://", "https://")):
        server = f"http://{server}"
    return server.rstrip("/")


def _fetch(request: urllib.request.Request, *, token: str) -> dict[str, Any]:
    url = request.full_url
    if token:
        # Not for the server of a redirect, which may be any.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            told: dict[str, Any] = json.load(answer)
            return told
    except urllib.error.HTTPError as refused:
        with refused:
            return _refusal(url, refused)
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise UnreachableError(
            wanted=f"a decision from {url}",
            found=str(getattr(error, "reason", error)),
            fix="give the host and the --metrics-port of a running `extproc serve`",
        ) from None


def _refusal(url: str, refused: urllib.error.HTTPError) -> dict[str, Any]:
    """A refusal comes with the status and body the client would get."""
    if refused.code in (401, 403):
        raise UnreachableError(
            wanted=f"a decision from {url}",
            found=f"status {refused.code}: its pages are not open to this machine",
            fix="name the file of its server.admin_token_file with --token-file, or go to it "
            "through `kubectl port-forward` if it has no token",
        )
    try:
        message = json.load(refused)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        raise UnreachableError(
            wanted=f"a decision from {url}",
            found=f"status {refused.code} without an explanation",
            fix="check that an extproc of this version listens there",
        ) from None
    return {
        "outcome": "rejection",
        "status": refused.code,
        "message": message,
        "reason": "",
        "retry_after_s": None,
    }
