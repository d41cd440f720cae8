"""Access to the metrics port: who may read debug pages and exchange with peers, and connections.

`/healthz` and `/readyz` are open, as probes expect, and so is `/metrics`, unless
`server.metrics_endpoint_auth` lets Kubernetes decide on it. Everything else wants the bearer token
of `server.admin_token_file`; without a token it is for this machine, and what pickers exchange is for
the addresses of `peer_sync.peers` and `autoscaling.peers` as well. Whatever reaches the port may
connect, and send nothing, so connections are bounded.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import os
import resource
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Middleware

from extproc.config import kubernetes_plan, pools
from extproc.config.settings import Settings
from extproc.discovery.static_discovery import FileStamp, file_stamp, open_regular
from extproc.errors import ConfigError, is_passing_error
from extproc.server.metrics_access import KubernetesReviewer, MetricsAccess

_log = logging.getLogger("extproc.server")

_METRICS = "/metrics"
_OPEN = frozenset({"/", _METRICS, "/healthz", "/readyz"})

#: Beginning of the paths by which pickers exchange what they count.
_INTERNAL = "/internal/"

#: Beginning of the paths of the console's files.
_CONSOLE = "/console"

#: Values of `Sec-Fetch-Site` for requests of pages of other origins, which cannot read the answers, but
#: could hold recordings open until no other client may record.
_OTHER_SITES = frozenset({"cross-site", "same-site"})


def read_token(path: str, *, where: str = "server.admin_token_file", once: bool = False) -> str:
    """Read the token or password of a file, without surrounding blanks; empty for no file.

    Args:
        path: Path of the file; empty for none.
        once: Whether it is never read again, and may be a pipe.

    Raises:
        ConfigError: The file cannot be read, or holds no token.
    """
    if not path:
        return ""
    cause: Exception | None = None
    try:
        with open(path, encoding="ascii", opener=None if once else open_regular) as file:
            token = file.read().strip()
    except (OSError, ValueError) as error:
        token, actual, cause = "", str(error), error
    else:
        actual = "a file without a token"
    if not token or not token.isprintable():
        raise ConfigError(
            where,
            wanted="a file with a token or password of printable ASCII",
            got=actual,
            fix="write one, such as the output of `openssl rand -hex 32`, or leave it out",
        ) from cause
    return token


def normalize_address(host: str) -> str:
    """An IP address in its shortest form, IPv4 within IPv6 as IPv4; other text as it is."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


class AdminToken:
    """The bearer token of `server.admin_token_file`, read again when the file changes.

    A file that cannot be read any more leaves the token in force: no mistake opens a page.

    Args:
        path: Path of the file; empty for none.

    Raises:
        ConfigError: The file cannot be read, or holds no token.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._error = ""
        self._stamp: FileStamp | None = file_stamp(path)
        self._token = read_token(path)

    def current(self) -> str:
        """The token in force, at the cost of one stat; empty for no file."""
        stamp = file_stamp(self.path)
        if stamp != self._stamp:
            # Taken before reading: what is written during the read makes another change.
            self._stamp = stamp
            try:
                self._token = read_token(self.path)
            except ConfigError as error:
                is_passing = is_passing_error(error)
                if is_passing:
                    self._stamp = None
                if not is_passing or str(error) != self._error:
                    _log.warning("the token in force stays: %s", error)
                self._error = str(error)
            else:
                self._error = ""
                _log.info("server.admin_token_file: reloaded")
        return self._token


class AdminAccess:
    """Authorizes requests to admin endpoints.

    Args:
        token: Returns the token in force; empty where none is configured.
        metrics: Access to `/metrics`; None where it is open.
    """

    def __init__(
        self,
        token: Callable[[], str],
        is_peer: Callable[[str], Awaitable[bool]],
        metrics: MetricsAccess | None = None,
    ) -> None:
        self._token = token
        self._is_peer = is_peer
        self._metrics = metrics

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """Prepare before an application listens, and end connections after it.

        Raises:
            ConfigError: The address or credentials of the API server are missing or broken.
        """
        if self._metrics is None:
            yield
            return
        await self._metrics.open()
        yield
        await self._metrics.close()

    async def refusal(
        self, path: str, *, remote: str, authorization: str, host: str = "", site: str = ""
    ) -> tuple[int, str] | None:
        """Status and reason for which a page is refused; None where it is not.

        Args:
            path: Decoded path of the page.
            authorization: Header `Authorization`; empty without one.
            host: Header `Host`; empty without one.
            site: Header `Sec-Fetch-Site` of a browser; empty without one.
        """
        if path in _OPEN:
            return await self._find_open_page_refusal(path, authorization)
        token = self._token()
        if token:
            if path.startswith(_CONSOLE):
                return None  # no data; the page sends the token when it reads some
            if _is_bearer(token, authorization):
                return None
            return 401, "expected the token of server.admin_token_file"
        address = normalize_address(remote)
        if _is_loopback(address):
            if not _is_literal(host):
                return 403, "without server.admin_token_file use 127.0.0.1 or localhost as the host"
            if site in _OTHER_SITES and not path.startswith(_CONSOLE):
                return 403, (
                    "without server.admin_token_file no page of another site may request this; "
                    "type its address"
                )
            return None
        if path.startswith(_INTERNAL) and await self._is_peer(address):
            return None
        return 403, (
            "without server.admin_token_file this page is for the machine of the picker"
            + (" and the peers of the configuration" if path.startswith(_INTERNAL) else "")
        )

    async def _find_open_page_refusal(
        self, path: str, authorization: str
    ) -> tuple[int, str] | None:
        if path != _METRICS or self._metrics is None:
            return None
        token = self._token()
        # The API server is not shown the token of extproc's own pages, which its audit may log.
        if token and _is_bearer(token, authorization):
            return None
        return await self._metrics.refusal(authorization)

    def middleware(self) -> Middleware:
        """Build the middleware that applies `refusal` to a web application."""

        @web.middleware
        async def check(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            refused = await self.refusal(
                request.path,
                remote=request.remote or "",
                authorization=request.headers.get("authorization", ""),
                host=request.headers.get("host", ""),
                site=request.headers.get("sec-fetch-site", ""),
            )
            if refused is None:
                return await handler(request)
            status, reason = refused
            headers = {"www-authenticate": "Bearer"} if status == 401 else None
            return web.Response(status=status, text=f"{reason}\n", headers=headers)

        return check


def build_access(
    settings: Settings, token: Callable[[], str], is_peer: Callable[[str], Awaitable[bool]]
) -> AdminAccess:
    """Build the access that settings describe; logs if /metrics is open where upstream guards it.

    Raises:
        ConfigError: Kubernetes is to review tokens, and there is none.
    """
    server = settings.server
    plan = kubernetes_plan.plan_metrics_auth(settings, environment=os.environ)
    if server.metrics_endpoint_auth is None and pools.follows_inference_pool(settings):
        _log.info(
            "/metrics on port %d is open to every client that reaches it, unlike that of llm-d: "
            "--metrics-endpoint-auth makes it require a token, and "
            "--metrics-endpoint-auth=false omits this line",
            server.metrics_port,
        )
    metrics = None if plan is None else MetricsAccess(KubernetesReviewer(plan))
    return AdminAccess(token, is_peer, metrics)


def _is_bearer(token: str, authorization: str) -> bool:
    """True if a header `Authorization` has this token; compared in constant time."""
    sent, wanted = authorization.encode(errors="replace"), f"Bearer {token}".encode()
    return hmac.compare_digest(sent, wanted)


def _is_literal(host: str) -> bool:
    """True for the Host header of an IP address or of localhost, and for none.

    A page of another site that a browser of this machine shows can let its own name resolve to this
    machine (DNS rebinding), but it cannot change the name that the browser then sends.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    if name.lower() in {"", "localhost"}:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


#: Connections at most (count), and the share of the open files of the process.
MAX_CONNECTIONS: Final = 1024
_FILE_SHARE: Final = 1 / 8

#: Connections from one address at most (count): so no other takes those of probes and Prometheus.
MAX_PER_ADDRESS: Final = 128

#: Seconds in which closed connections are logged once.
_REPEAT_S: Final = 60.0

#: Seconds within which the head of a first request must arrive, and a connection may be unused then.
FIRST_REQUEST_S: Final = 30.0
KEEPALIVE_S: Final = 120.0


class ConnectionLimiter:
    """Closes connections beyond the bounds. Mutable; on the event loop only.

    Args:
        server: The server of aiohttp, before it listens.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._addresses: Counter[str] = Counter()
        self._waiting: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._known: dict[web.RequestHandler, str] = {}
        self._logged_at = -math.inf
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_connections = min(MAX_CONNECTIONS, max(1, int(files * _FILE_SHARE)))
        self._on_opened, self._on_closed = server.connection_made, server.connection_lost
        self._build_request = server.request_factory
        # aiohttp has no public hook for connections.
        server.connection_made = self._open  # type: ignore[method-assign]
        server.connection_lost = self._close  # type: ignore[method-assign]
        server.request_factory = self._begin

    def _open(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        self._on_opened(handler, transport)
        peer = transport.get_extra_info("peername")
        address = str(peer[0]) if peer else ""
        count, loop = self._addresses[address], asyncio.get_running_loop()
        if len(self._known) >= self._max_connections or count >= MAX_PER_ADDRESS:
            if loop.time() - self._logged_at >= _REPEAT_S:
                self._logged_at = loop.time()
                _log.warning(
                    "the metrics port closes connections: %d are open, %d of them from %s",
                    len(self._known),
                    count,
                    address,
                )
            # Not at once: aiohttp is about to start the task of the connection.
            loop.call_soon(transport.abort)
            return
        self._known[handler] = address
        self._addresses[address] += 1
        self._waiting[handler] = loop.call_later(FIRST_REQUEST_S, transport.abort)

    def _begin(self, message: Any, payload: Any, protocol: Any, *more: Any) -> Any:
        timer = self._waiting.pop(protocol, None)
        if timer is not None:
            timer.cancel()
        return self._build_request(message, payload, protocol, *more)

    def _close(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self._on_closed(handler, exc)
        timer = self._waiting.pop(handler, None)
        if timer is not None:
            timer.cancel()
        address = self._known.pop(handler, None)
        if address is not None:
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]
