"""`extproc explain`: print the endpoint of a request, planned or recorded, with reasons.

The request is a JSON body from a file or standard input. What is known of the endpoints comes from
a running server (--server), or from a file (--state) in the form in which /debug/pool shows it.
With --id, --sequence, --last, --slowest or --failed a server explains a request that it routed lately.

    extproc explain request.json
    extproc explain --id chatcmpl-6a1e9e9c
    extproc explain --last --legend

Exit status: 0 an endpoint is chosen, 1 the server does not answer or routed no such request,
2 wrong flags or files, 3 the request would be refused, or would have to wait.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import re
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from extproc.cli import main
from extproc.errors import ConfigError, ExtprocError, file_error

#: What a server takes to answer; a dry run takes under a millisecond.
_TIMEOUT_S = 10.0

#: Where a server is, unless a flag says otherwise.
SERVER = "http://127.0.0.1:9090"

#: Seconds between two looks of --watch.
_WATCH_S = 2.0

#: As many past decisions as there may be.
_MAX_DECISIONS = 999_999_999

#: Longest id as a part of an address (bytes): aiohttp takes 8190 in a line.
_MAX_ID_BYTES = 8000

#: Name of a header (RFC 9110, 5.1).
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

#: What reading JSON of another shape raises.
_WRONG_SHAPE = (LookupError, TypeError, AttributeError, ValueError, RecursionError)

#: Exit status of a request that would be refused, or would have to wait.
_REFUSED = 3


class UnreachableError(ExtprocError):
    """The server does not answer."""


class NotRecordedError(ExtprocError):
    """The server does not know the request."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add = parser.add_argument
    add("request", nargs="?", default="-", metavar="FILE", help="JSON body; - is standard input")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--state", metavar="FILE", help="YAML or JSON file with endpoints")
    source.add_argument(
        "--server", metavar="URL", help=f"metrics port of a server (default: {SERVER})"
    )
    past = parser.add_mutually_exclusive_group()
    past.add_argument(
        "--id",
        metavar="ID",
        help="explain a request of the past: its x-request-id, an id of the answer (in its body where "
        "extproc sees that, or its x-request-id), or that of its trace",
    )
    past.add_argument(
        "--sequence",
        type=main.read_number,
        metavar="N",
        help="the same for a number of /debug/decisions, as an id may have several requests",
    )
    past.add_argument("--last", action="store_true", help="the same for the newest request")
    past.add_argument("--slowest", action="store_true", help="the same for the slowest request")
    past.add_argument(
        "--failed", action="store_true", help="the same for the newest without a status below 400"
    )
    add(
        "--watch",
        nargs="?",
        type=main.seconds_parser(0.01, 86_400.0),
        const=_WATCH_S,
        metavar="SECONDS",
        help=f"explain again and again, until Ctrl-C; every {_WATCH_S:g} s unless set",
    )
    add("--legend", action="store_true", help="also print what the columns mean")
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


def run(args: argparse.Namespace) -> int:
    """Explain; returns the exit status, see the head of this module.

    Raises:
        ConfigError: A file or flag is wrong.
        UnreachableError: The server does not answer.
    """
    if args.state == "":
        raise ConfigError(
            "--state",
            wanted="a file with endpoints",
            got="nothing",
            fix="write --state FILE, or leave it out to ask a server",
        )
    named = SERVER if args.server is None else args.server
    server = base_url(named) if args.state is None else ""
    find_token = _token_reader(args) if server else str
    explain: Callable[[str], dict[str, Any]]
    is_named = args.id is not None or args.sequence is not None
    if is_named or args.last or args.slowest or args.failed:
        _check_recorded(args)
        explain = functools.partial(_explain_recorded, args, server)
    else:
        if server and (args.config_file or args.strategy):
            raise ConfigError(
                "--server",
                wanted="--config-file and --strategy with --state only",
                got="both",
                fix="remove them; a server decides with its own configuration",
            )
        body, headers = _read_request(args.request), _parse_headers(args.header, path=args.path)
        explain = functools.partial(_explain_dry_run, args, server, headers, body)

    def show() -> int:
        token = find_token()
        with _shape_checked(server):
            explanation = explain(token)
            lines = list(_lines(args, explanation))
            is_decision = explanation["outcome"] == "decision"
        print("\n".join(lines))
        return 0 if is_decision else _REFUSED

    if args.watch is None:
        return show()
    return watch(show, every_s=args.watch, wait=threading.Event().wait)


def watch(show: Callable[[], int], *, every_s: float, wait: Callable[[float], object]) -> int:
    """Show again and again, on a terminal always at its top, until Ctrl-C."""
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            print(clear, end="")
            try:
                show()
            except (UnreachableError, NotRecordedError) as error:  # it may come back, one may come
                main.print_error(error)
            sys.stdout.flush()
            wait(every_s)
    return 0


@contextlib.contextmanager
def _shape_checked(server: str) -> Iterator[None]:
    """Report what a server says otherwise than extproc, where there is one."""
    try:
        yield
    except _WRONG_SHAPE:
        if not server:
            raise
        raise not_extproc_error(server, "JSON of another shape") from None


def _lines(args: argparse.Namespace, explanation: dict[str, Any]) -> Iterator[str]:
    """An explanation in the form that the flags name."""
    from extproc.telemetry import explanation_text

    if args.json:
        yield json.dumps(explanation, indent=2)
    else:
        explanation = _remove_controls(explanation)
        text = (
            explanation_text.render_past(explanation)
            if "id" in explanation
            else explanation_text.render_table(explanation)
        )
        for line in text.splitlines():
            is_result = line.startswith(
                ("chosen by ", "refused with ", "waits for ", "all endpoints are failing")
            )
            yield main.paint(line, "bold", sys.stdout) if is_result else line
        if args.legend:
            yield f"\n{explanation_text.render_legend(explanation)}".removesuffix("\n")


def _remove_controls(value: Any) -> Any:
    """JSON with blanks for control characters and line ends: clients choose names in it."""
    if isinstance(value, str):
        return main.to_printable(value)
    if isinstance(value, dict):
        return {name: _remove_controls(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_remove_controls, value)]
    return value


def _explain_dry_run(
    args: argparse.Namespace, server: str, headers: Mapping[str, str], body: bytes, token: str
) -> dict[str, Any]:
    """Explanation of a dry run."""
    if server:
        return _request_dry_run(server, headers, body, token=token)
    return _explain_offline(args, headers, body)


def _check_recorded(args: argparse.Namespace) -> None:
    """Refuse an empty or long id, and a request or a state beside a request of the past."""
    if args.id == "":
        raise ConfigError(
            "--id",
            wanted="the id of a request",
            got="nothing",
            fix="write --id ID, or --last for the newest request",
        )
    if len(_quote(args.id or "")) > _MAX_ID_BYTES:
        raise ConfigError(
            "--id",
            wanted=f"the id of a request, of at most {_MAX_ID_BYTES} bytes in an address",
            got=f"{len(args.id)} characters",
            fix="write the x-request-id of the request",
        )
    if args.state is not None or args.request != "-":
        raise ConfigError(
            "--id, --sequence, --last, --slowest, --failed",
            wanted="--server and no request",
            got="a request" if args.state is None else "--state",
            fix="a server keeps the requests it routed; write extproc explain --server URL --id ID",
        )


def _explain_recorded(args: argparse.Namespace, server: str, token: str) -> dict[str, Any]:
    """Explanation of a recorded request."""
    if args.id is not None:
        page, name = f"decisions/{_quote(args.id)}", args.id
    else:
        sequence = args.sequence
        if sequence is None:
            sequence = _select_recorded(args, server, token)
        page, name = f"decision?sequence={sequence}", f"number {sequence}"
    explanation = _get(f"{server}/debug/{page}", token)
    if "id" not in explanation:
        raise NotRecordedError(
            wanted=f"a request that was routed or refused lately as {name}",
            got=explanation["message"],
            fix="`extproc explain --last` shows the newest",
        )
    return explanation


def _quote(request_id: str) -> str:
    """An id as a part of an address; bytes that are no UTF-8 as they came from the shell."""
    return urllib.parse.quote(request_id, safe="", errors="surrogateescape")


def _select_recorded(args: argparse.Namespace, server: str, token: str) -> int:
    """Sequence number of the last, the slowest or the last failed request."""
    decisions = _get(f"{server}/debug/decisions?limit={_MAX_DECISIONS}", token)["decisions"]
    if args.failed:
        decisions = [row for row in decisions if row["result"] in ("failed", "refused")]
    if args.slowest:
        decisions = sorted(decisions, key=lambda decision: -(decision["seconds"] or 0.0))
    if not decisions:
        raise NotRecordedError(
            wanted="a failed request" if args.failed else "a request that was routed",
            got="none among those that are kept",
            fix="send one, or raise decisions.decisions if it was long ago",
        )
    return int(decisions[0]["sequence"])


def _get(url: str, token: str) -> dict[str, Any]:
    return _fetch(urllib.request.Request(url), token=token)  # noqa: S310 - base_url made it http or https


def _read_request(name: str) -> bytes:
    """The body of a request, of a file or of standard input."""
    if name != "-":
        try:
            body = Path(name).read_bytes()
        except OSError as error:
            raise file_error(name, error) from None
    else:
        is_open = sys.stdin is not None  # not after `<&-`
        if is_open and sys.stdin.isatty():
            print("Reading the request from the terminal; Ctrl-D ends it.", file=sys.stderr)
        body = sys.stdin.buffer.read() if is_open else b""
    if not body.strip():
        raise ConfigError(
            "standard input" if name == "-" else name,
            wanted="the JSON body of a request",
            got="nothing",
            fix="name a file with one, or write: echo '{\"model\": ...}' | extproc explain",
        )
    return body


def _explain_offline(
    args: argparse.Namespace, headers: Mapping[str, str], body: bytes
) -> dict[str, Any]:
    from extproc.cli import offline_explain
    from extproc.config import loader, profile_builder, validation, yaml_documents
    from extproc.request import HttpRequest
    from extproc.telemetry import explanation, pool_state

    document = loader.read(Path(args.config_file)) if args.config_file else loader.EMPTY
    overrides: list[loader.FlagOverride] = []
    if args.strategy:
        overrides = [
            loader.FlagOverride(("scheduling", "strategy"), args.strategy, "--strategy"),
            loader.FlagOverride(("scheduling", "profile"), None, "--strategy"),
        ]
    if args.allow_unsupported:
        path = ("scheduling", "allow_unsupported")
        overrides.append(loader.FlagOverride(path, value=True, flag="--allow-unsupported"))
    tree = yaml_documents.parse_tree(loader.read_text(Path(args.state)), where=args.state)
    pool = validation.to_struct(tree, pool_state.PoolState, where=args.state)
    raw = HttpRequest({":method": "POST", **headers}, body)
    settings = loader.settings(document, overrides)
    profile_builder.build_profile(settings, where="--strategy" if args.strategy else document.where)
    outcome = offline_explain.route_offline(settings, pool, raw, where=args.state)
    return explanation.explain(outcome, health=explanation.health(pool))


def _parse_headers(pairs: list[str], *, path: str) -> dict[str, str]:
    """Headers with the path, as a picker has them: bytes of UTF-8 as Latin-1."""
    if not path.isprintable():
        raise ConfigError(
            "--path",
            wanted="a path as it may stand in a request",
            got=repr(path),
            fix="write /v1/chat/completions",
        )
    headers = {":path": path, "content-type": "application/json"}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _HEADER.fullmatch(name.strip()) or not value.isprintable():
            raise ConfigError(
                "--header",
                wanted="name=value, both as they may stand in a header",
                got=repr(pair),
                fix="put = between them; in place of :authority write host",
            )
        headers[name.strip().lower()] = value
    return {name: value.encode().decode("latin-1") for name, value in headers.items()}


def read_token(args: argparse.Namespace) -> str:
    """The token of --token-file; empty where the flag is not used."""
    from extproc.server import admin_access

    return admin_access.read_token(args.token_file or "", where="--token-file", once=True)


def _token_reader(args: argparse.Namespace) -> Callable[[], str]:
    """The function that returns the token for the requests of one explanation.

    A file is read again for each, as its token may change during --watch; a pipe is read once.
    """
    if not args.token_file or Path(args.token_file).is_file():
        return functools.partial(read_token, args)
    token = read_token(args)
    return lambda: token


def _request_dry_run(
    server: str, headers: Mapping[str, str], body: bytes, *, token: str
) -> dict[str, Any]:
    """Request a dry run from a server."""
    url = f"{server}/debug/explain"
    request_headers = {
        "x-explain-path" if name == ":path" else f"x-explain-header-{name}": value
        for name, value in headers.items()
    }
    request_headers["content-type"] = "application/octet-stream"
    request = urllib.request.Request(url, data=body, headers=request_headers, method="POST")  # noqa: S310 - base_url made it http or https
    return _fetch(request, token=token)


def base_url(server: str) -> str:
    """The address of the pages, with a scheme.

    Raises:
        ConfigError: It is no address of a server.
    """
    url = server if server.startswith(("http://", "https://")) else f"http://{server}"
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.hostname if parts.port != 0 else ""
        (host or "").encode("idna")
    except ValueError:  # an unclosed bracket, a port that is no number, an empty label
        host = ""
    if "://" in url.removeprefix("http://").removeprefix("https://"):
        host = ""
    if not host or parts.query or parts.fragment or "@" in url or " " in url:
        raise ConfigError(
            "--server",
            wanted="host:port, or a URL without user and query",
            got="a user" if "@" in url else repr(server),  # no password in the error
            fix=f"write {SERVER}",
        )
    return url.rstrip("/")


def open_page(request: urllib.request.Request, *, timeout_s: float) -> http.client.HTTPResponse:
    """Open a page of a server; raises as `urllib.request.urlopen`."""
    # A proxy of the environment reaches no metrics port of this machine, and has no use for a token.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return cast("http.client.HTTPResponse", opener.open(request, timeout=timeout_s))


def not_extproc_error(url: str, got: str) -> UnreachableError:
    """The error of a server that answers otherwise than extproc would."""
    return UnreachableError(
        wanted=f"the metrics port of an extproc at {url}",
        got=got,
        fix="that is another server or version; give the host and the --metrics-port of a running "
        "`extproc serve` with --server",
    )


def _fetch(request: urllib.request.Request, *, token: str) -> dict[str, Any]:
    server = f"{request.type}://{request.host}"
    if token:
        # Not for the server of a redirect, which may be any.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with open_page(request, timeout_s=_TIMEOUT_S) as response:
            body = response.read()
    except urllib.error.HTTPError as http_error:
        with http_error:
            return _to_rejection(server, http_error, has_token=bool(token))
    except http.client.HTTPException:
        raise not_extproc_error(server, "an answer that is not HTTP, or cut off") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(
            wanted=f"an extproc that answers at {server}",
            got=str(getattr(reason, "strerror", None) or reason),
            fix="start `extproc serve`, or give the host and the --metrics-port of a running one with "
            "--server",
        ) from None
    try:
        explanation = json.loads(body)
    except (ValueError, RecursionError):
        raise not_extproc_error(server, "an answer that is not JSON") from None
    if not isinstance(explanation, dict):
        raise not_extproc_error(server, "JSON of another shape")
    return explanation


def _to_rejection(url: str, error: urllib.error.HTTPError, *, has_token: bool) -> dict[str, Any]:
    """A refusal comes with the status and body the client would get."""
    if error.code in (401, 403):
        raise UnreachableError(
            wanted=f"a decision from {url}",
            got=f"status {error.code}: its pages are not open to this machine",
            fix="the token of --token-file is another one than that of its server.admin_token_file"
            if has_token
            else "name the file of its server.admin_token_file with --token-file, or go to it "
            "through `kubectl port-forward` if it has no token",
        )
    try:
        message = json.load(error)["error"]["message"]
    except (*_WRONG_SHAPE, OSError, http.client.HTTPException):
        raise not_extproc_error(url, f"status {error.code} without an explanation") from None
    return {
        "outcome": "rejection",
        "status": error.code,
        "message": message,
        "reason": "",
        "retry_after_s": None,
    }
