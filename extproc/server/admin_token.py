"""The bearer token of debug pages and of what pickers exchange over HTTP.

Reads the file at start and guards the routes; `/metrics`, `/healthz` and `/readyz` stay open, as
Prometheus and probes expect.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from extproc.errors import ConfigError

#: Beginnings of the paths that need the token.
_GUARDED = ("/debug/", "/internal/")


def read(path: str) -> str:
    """The token of a file, without blanks around it; empty for no file.

    Raises:
        ConfigError: The file cannot be read, or holds no token.
    """
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        token, found = "", str(error)
    else:
        found = "a file without a token"
    if not token or not token.isprintable():
        raise ConfigError(
            "server.admin_token_file",
            wanted="a file with a token of printable ASCII",
            found=found,
            fix="write one, such as the output of `openssl rand -hex 32`, or leave it out",
        )
    return token


def guard(token: str) -> Middleware:
    """Answers 401 to whoever asks for a guarded page without the token; empty guards nothing."""
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if token and request.path.startswith(_GUARDED):
            sent = request.headers.get("authorization", "").encode(errors="replace")
            if not hmac.compare_digest(sent, wanted):
                return web.Response(
                    status=401,
                    text="wanted the token of server.admin_token_file\n",
                    headers={"www-authenticate": "Bearer"},
                )
        return await handler(request)

    return check
