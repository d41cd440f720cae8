"""Debug pages of the metrics port: their queries, their index, and JSON that browsers show."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final

import msgspec
from aiohttp import web

from extproc.decision import Rejection
from extproc.protocol import messages

#: Path of the index.
INDEX: Final = "/debug"


class DebugPage(msgspec.Struct, frozen=True):
    """A debug page.

    Attributes:
        summary: What it shows, in a few words.
        query: Names that its query may have.
        method: HTTP method.
    """

    summary: str
    query: tuple[str, ...] = ()
    method: str = "GET"


#: Debug pages by their path.
PAGES: Final[Mapping[str, DebugPage]] = {
    INDEX: DebugPage("this index"),
    "/debug/pool": DebugPage("endpoints of a pool, with loads and reservations", ("pool",)),
    "/debug/pools": DebugPage("the same of all pools"),
    "/debug/decisions": DebugPage(
        "the last decisions and refused requests, newest first",
        ("limit", "pool", "result", "slower_than", "id", "model", "endpoint"),
    ),
    "/debug/decisions/{id}": DebugPage(
        "one of them by request id, with reasons", ("result", "sequence")
    ),
    "/debug/decision": DebugPage(
        "the same by a query, or by sequence number", ("id", "result", "sequence")
    ),
    "/debug/explain": DebugPage("decision that the request in the body would get", method="POST"),
    "/debug/shadow": DebugPage("what a shadow would have chosen"),
    "/debug/record": DebugPage("decisions from now on, as JSON lines", ("seconds",)),
    "/debug/overview": DebugPage("problems, pools and traffic, for the console", ("pool",)),
    "/debug/strategies": DebugPage("strategies side by side on the last requests"),
    "/debug/configuration": DebugPage("settings that differ from their defaults, and reloads"),
}


def format_index() -> str:
    """Format the index of all pages, a line each."""
    rows = []
    for path, page in PAGES.items():
        names = "&".join([f"{name}=" for name in page.query])
        rows.append((page.method, f"{path}{'?' if names else ''}{names}", page.summary))
    width = max(len(address) for _, address, _ in rows)
    return "".join(f"{method:<4}  {address:<{width}}  {text}\n" for method, address, text in rows)


def render(page: Mapping[str, object]) -> Iterator[bytes]:
    """Render a page as a JSON object, in pieces: those of its lists, of one element each."""
    separator = "{"
    for name, value in page.items():
        yield f"{separator}{json.dumps(name)}: ".encode()
        separator = ", "
        if not isinstance(value, list) or not value:
            yield json.dumps(value).encode()
            continue
        before = "["
        for element in value:
            yield f"{before}{json.dumps(element)}".encode()
            before = ", "
        yield b"]"
    yield b"}" if page else b"{}"


def refuse(rejection: Rejection) -> web.Response:
    """Answer to a query that is refused, in the form in which requests are."""
    return web.Response(
        status=rejection.status,
        body=messages.error_body(rejection),
        content_type="application/json",
    )


@web.middleware
async def serve(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse unknown names in queries of debug pages, and indent JSON for browsers."""
    resource = request.match_info.route.resource
    page = None if resource is None else PAGES.get(resource.canonical)
    if page is None:
        return await handler(request)
    unknown = [name for name in request.query if name not in page.query]
    if unknown:
        known = ", ".join([f"?{name}=" for name in page.query]) or "none"
        return refuse(Rejection(400, f"no query of this page is ?{unknown[0]}=; it takes: {known}"))
    response = await handler(request)
    if (
        "text/html" in request.headers.get("accept", "")
        and isinstance(response, web.Response)
        and response.content_type == "application/json"
        and isinstance(response.body, bytes)
    ):
        body = msgspec.json.format(response.body)
        return web.Response(status=response.status, headers=response.headers, body=body)
    return response
