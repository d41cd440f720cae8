"""State synchronization between replicas through a stream in Redis or Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from extproc import distribution
from extproc.config.settings import PeerSyncSection
from extproc.errors import ConfigError
from extproc.routing import peer_sync
from extproc.server import admin_access
from extproc.server.peer_channel import RESPONSE_TIMEOUT_S, PeerChannel, PeerStreamError, is_running
from extproc.server.pool_registry import PoolRegistry

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.credentials import CredentialProvider

#: Entries read at once (count).
_MAX_ENTRIES = 100

#: Milliseconds that a read waits for news.
_BLOCK_MS = 1000

_FIELD = b"m"

_CREDENTIALS_FIELD = "peer_sync.password_file"

#: Options of a URL that are taken. Protocol, decoding and times are ours; the client takes any name.
_OPTION = re.compile(
    r"db|username|password|client_name|health_check_interval|max_connections|retry_on_timeout"
    r"|socket_keepalive|ssl_\w+",
    re.ASCII,
)

#: Options with numbers; without a value they have no effect.
_NUMBERS = {"db": r"[0-9]*", "max_connections": r"[0-9]*", "health_check_interval": r"(-?[0-9]+)?"}


class RedisPeerChannel(PeerChannel):
    """Channel through a stream that all replicas write and read.

    Raises:
        ConfigError: The client is not installed, or the URL is none.
    """

    def __init__(
        self, settings: PeerSyncSection, registry: PoolRegistry, clock: Callable[[], float]
    ) -> None:
        super().__init__(settings, registry, clock)
        self._writing, self._reading = build_client(settings), build_client(settings)
        self.connection_errors = _connection_errors()
        #: Whether a peer lacks requests of this replica, and when they were last written again.
        self._is_rewrite_wanted, self._rewritten_at = False, -math.inf

    async def close(self) -> None:
        """Close both connections."""
        for connection in (self._writing, self._reading):
            with contextlib.suppress(*self.connection_errors):
                async with asyncio.timeout(RESPONSE_TIMEOUT_S):
                    await connection.aclose()

    async def flush(self) -> None:
        """Write all queued events in a round trip, and all open requests if a peer lacks some."""
        pipeline = self._writing.pipeline(transaction=False)
        messages = [*iter(lambda: self.event_log.take(peer_sync.MAX_FACTS), None)]
        now = self.clock()
        # Many peers lack them at once after an outage.
        rewrites = self._is_rewrite_wanted and now - self._rewritten_at >= self.settings.beat_s
        if rewrites:
            messages.extend(self.event_log.snapshot())
        for message in messages:
            pipeline.xadd(
                self.settings.stream,
                {_FIELD: peer_sync.encode(message)},
                maxlen=self.settings.max_entries,
                approximate=True,
            )
        async with self._close_after_failure(self._writing):
            await pipeline.execute()
        if rewrites:
            self._is_rewrite_wanted, self._rewritten_at = False, now

    def publish_open(self) -> None:
        """Record the list of open requests, and the peers whose requests are unknown in part."""
        self.event_log.publish_open(self.replica.incomplete)

    async def receive(self) -> None:
        """Read new entries of the stream until that fails; peers write again what is lost by it."""
        await self.wait_synced()
        async with self._close_after_failure(self._reading):
            await self._read_entries()

    async def _read_entries(self) -> None:
        stream, client = self.settings.stream, self._reading
        last = await self._newest_entry()
        while is_running():
            streams: Any = await client.xread({stream: last}, count=_MAX_ENTRIES, block=_BLOCK_MS)
            self.log_recovery("receive")
            for _, entries in streams or ():
                for entry, fields in entries:
                    message = peer_sync.decode(fields.get(_FIELD, b""))
                    if message is not None:
                        self._answer(message)
                        self.apply_message(message, instance="an entry of the stream")
                    last = entry
            if not streams and _entry_order(await self._newest_entry()) < _entry_order(last):
                # Not even an own heartbeat is read: the stream was lost, and its ids began anew, as
                # after a failover to a server whose clock is behind.
                last = b"0-0"

    @contextlib.asynccontextmanager
    async def _close_after_failure(self, client: Redis) -> AsyncIterator[None]:
        """Close the connection after a failure, so that the next attempt opens another one.

        A server that refuses may have become a replica, while new connections lead to the primary.
        """
        try:
            yield
        except self.connection_errors:
            with contextlib.suppress(*self.connection_errors):
                await client.aclose()
            # Connection objects keep what they read of the files of TLS; new ones read them again.
            pool: Any = client.connection_pool
            pool.reset()
            raise

    def _answer(self, message: peer_sync.PeerMessage) -> None:
        """Write all open requests again if a peer lacks some."""
        own = self.event_log.picker
        for fact in message.facts:
            if isinstance(fact, peer_sync.OpenRequests) and own in fact.incomplete:
                self._is_rewrite_wanted = True
                self.request_flush()

    async def _newest_entry(self) -> bytes:
        newest: Any = await self._reading.xrevrange(self.settings.stream, count=1)
        return newest[0][0] if newest else b"0-0"


def require(settings: PeerSyncSection) -> None:
    """Refuse settings that cannot work: no client package, an invalid URL, no readable password.

    Raises:
        ConfigError: What is missing or wrong.
    """
    if not settings.url:
        return
    pool: Any = build_client(settings).connection_pool
    errors: tuple[type[Exception], ...] = (*_connection_errors(), TypeError, ValueError)
    try:
        connection = pool.make_connection()  # which connects when it is used
        tls = getattr(connection, "ssl_context", None)
        if tls is not None:
            tls.get()
    except errors as error:
        if unknown := re.search(r"unexpected keyword argument '(ssl_\w+)'", str(error)):
            raise _option_error(unknown[1], "no option that is taken") from None
        raise ConfigError(
            "peer_sync.url",
            wanted="options that the client takes, and files of TLS that it can read",
            got=f"{type(error).__name__}: {getattr(error, 'strerror', None) or 'an invalid option'}",
            fix="look at the options behind ? in the URL",
        ) from None
    admin_access.read_token(settings.password_file, where=_CREDENTIALS_FIELD)


def _check_url(url: str) -> None:
    """Check what the client would pass over.

    Raises:
        ConfigError: An option is not taken, or is no number.
        ValueError: The URL has no server, no number as its database, or a fragment.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "unix":
        has_server = not parts.hostname and len(parts.path) > 1
    else:
        has_server = bool(parts.hostname) and bool(re.fullmatch(r"/?|/[0-9]+/?", parts.path))
    # The client drops a fragment, which is the rest of a password with a `#`, and takes its default port.
    if not has_server or parts.port == 0 or parts.fragment:
        raise ValueError
    for name, value in urllib.parse.parse_qsl(parts.query, keep_blank_values=True):
        if not _OPTION.fullmatch(name):
            raise _option_error(name, "no option that is taken")
        if name in _NUMBERS and not re.fullmatch(_NUMBERS[name], value):
            raise _option_error(name, "no number")


def _option_error(name: str, fault: str) -> ConfigError:
    """Error of an option; the name is shown where it is no part of a password with a `?`."""
    shown = name if re.fullmatch(r"[a-z][a-z_]*", name) else "an option"
    return ConfigError(
        "peer_sync.url",
        wanted="no options but db, health_check_interval and max_connections with numbers, username, "
        "password, client_name, retry_on_timeout, socket_keepalive and ssl_*",
        got=f"{shown}, {fault}",
        fix="look at the options behind ? in the URL",
    )


def _entry_order(entry: bytes) -> tuple[int, int]:
    """Order of an entry in its stream, by its id."""
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)


def build_client(settings: PeerSyncSection) -> Redis:
    """Build a client of the store, which connects when it is used.

    Raises:
        ConfigError: The extra is not installed, or a setting is wrong.
    """
    try:
        from redis import asyncio as client  # noqa: PLC0415 - an extra, not for everybody
        from redis.asyncio.retry import Retry  # noqa: PLC0415 - the same
        from redis.backoff import NoBackoff  # noqa: PLC0415 - the same
    except ImportError:
        raise ConfigError(
            "peer_sync.url",
            wanted="the Python package redis",
            got="none",
            fix=f"{distribution.install_command('redis')}, or leave peer_sync.url empty",
        ) from None
    try:
        url, provider = _credentials(settings)
        _check_url(url)
        # As `scrape.client.build_tls`.
        is_secure = urllib.parse.urlsplit(url).scheme == "rediss"
        tls: dict[str, Any] = (
            {"ssl_exclude_verify_flags": [ssl.VERIFY_X509_STRICT]} if is_secure else {}
        )
        return client.Redis.from_url(
            url,
            protocol=2,
            credential_provider=provider,
            retry=Retry(NoBackoff(), 0),  # ours has no end
            socket_connect_timeout=RESPONSE_TIMEOUT_S,
            socket_timeout=_BLOCK_MS / 1000.0 + RESPONSE_TIMEOUT_S,
            **tls,
        )
    except ValueError:
        raise ConfigError(
            "peer_sync.url",
            wanted="redis://, rediss:// or unix:// with a host and a number as database, or a path",
            got="another URL",  # it may carry a password
            fix="write it as redis://:password@host:6379/0, with %23 for a # in it and so on",
        ) from None


def _credentials(settings: PeerSyncSection) -> tuple[str, CredentialProvider | None]:
    """Return the URL to connect to, and the reader of the password; None without a password file.

    Raises:
        ConfigError: Both `url` and `password_file` hold a password.
        ValueError: The URL cannot be parsed.
    """
    if not settings.password_file:
        return settings.url, None
    from redis.credentials import CredentialProvider  # noqa: PLC0415 - see `_client`

    parts = urllib.parse.urlsplit(settings.url)
    options = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
    names = [value for name, value in options if name == "username"]
    if parts.password is not None or any(name == "password" for name, _ in options):
        raise ConfigError(
            _CREDENTIALS_FIELD,
            wanted="one source of the password",
            got="a password in peer_sync.url as well",
            fix="remove it from the URL",
        )
    username = urllib.parse.unquote(parts.username or "") or next(filter(None, names), "")

    class PasswordFile(CredentialProvider):
        """Reads the password at every connection; the client asks once for each."""

        async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
            try:
                password = admin_access.read_token(settings.password_file, where=_CREDENTIALS_FIELD)
            except ConfigError as error:
                # As a server that is away: logged once, tried again.
                reason = getattr(error.__cause__, "strerror", "no password of printable ASCII")
                raise PeerStreamError(f"{_CREDENTIALS_FIELD}: {reason}") from None
            return (username, password) if username else (password,)

    host = parts.netloc.rpartition("@")[2]
    query = urllib.parse.urlencode([option for option in options if option[0] != "username"])
    return urllib.parse.urlunsplit(parts._replace(netloc=host, query=query)), PasswordFile()


def _connection_errors() -> tuple[type[Exception], ...]:
    """Exceptions of calls to a server that is away, restarts or is full."""
    from redis.exceptions import RedisError  # noqa: PLC0415 - see `_client`

    return (RedisError, OSError, TimeoutError)
