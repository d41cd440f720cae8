"""Pickers that tell each other through a real Redis."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import shutil
import socket
import subprocess
import tempfile
import time

import pytest
from redis import asyncio as redis
from redis.exceptions import RedisError, ResponseError

from extproc.config.settings import PeerSyncSection
from extproc.errors import ConfigError
from extproc.routing import peer_sync
from extproc.server import redis_peer_channel
from tests.routing.test_peer_sync import fact
from tests.server.peer_replica import Replica, sites, talking
from tests.support import programs
from tests.support.canary import CANARY
from tests.support.waiting import until

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """A Redis on a socket of its own, without persistence."""

    def __init__(self) -> None:
        # Not tmp_path: names of sockets are short.
        self.place = tempfile.mkdtemp(prefix="extproc")
        self.url = f"unix://{self.place}/s"
        self._process = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                PROGRAM,
                "--port",
                "0",
                "--unixsocket",
                f"{self.place}/s",
                "--save",
                "",
                "--dir",
                self.place,
            ],
            stdout=subprocess.DEVNULL,
        )

    def is_listening(self) -> bool:
        """True once a client can connect: the file of the socket is there a moment earlier."""
        with socket.socket(socket.AF_UNIX) as client_socket:
            return client_socket.connect_ex(f"{self.place}/s") == 0

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def server():
    if PROGRAM is None:
        raise programs.missing(
            "neither redis-server nor valkey-server is on the PATH", "EXTPROC_REQUIRE_REDIS"
        )
    redis_server = RedisServer()
    redis_server.start()
    yield redis_server
    redis_server.stop()
    shutil.rmtree(redis_server.place)


def redis_replica(url: str, **more: float | str) -> Replica:
    settings = PeerSyncSection(url=url, beat_s=0.1, silent_s=1.0, **more)
    return Replica(
        lambda registry: redis_peer_channel.RedisPeerChannel(settings, registry, time.monotonic)
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("WRONGTYPE Operation against a key", "ResponseError WRONGTYPE"),
        (
            "Command # 1 (XADD extproc ...) of pipeline caused error: ('WRONGTYPE Operation',)",
            "ResponseError WRONGTYPE",
        ),
        ("Error 111 connecting to redis://u:password@h", "ResponseError"),
        (
            "unknown command 'AUTH', with args beginning with: 'pw'",
            "ResponseError: unknown command",
        ),
        ("DB index is out of range", "ResponseError: DB index is out of range"),
        (
            "SELECT is not allowed in cluster mode",
            "ResponseError: SELECT is not allowed in cluster mode",
        ),
        (
            "AUTH <password> called without any password configured for the default user.",
            "ResponseError: without any password configured",
        ),
    ],
)
async def test_the_reason_of_a_failure_has_the_code_of_redis(text, reason, caplog):
    """The text itself may quote a password."""
    wanted = iter([True, False])

    async def fail():
        raise ResponseError(text)

    line = redis_replica("redis://127.0.0.1:1/0").line
    await line.repeat("publish", fail, is_wanted=lambda: next(wanted))
    assert caplog.messages == [f"peer sync: cannot publish: {reason}"]


async def test_two_replicas_exchange_requests_in_flight(server):
    """Both accounts show both pickers' requests, per pool, and none once all ended."""
    first, second = redis_replica(server.url), redis_replica(server.url)
    async with talking(first, second):
        await until(lambda: first.heard == second.heard == 1)
        reservations = [first.send(), first.send(), first.send("b"), second.send()]
        await until(
            lambda: (
                first.in_flight() == second.in_flight() and sum(second.in_flight().values()) == 3
            )
        )
        await until(lambda: second.in_flight("b") == {"127.0.0.13:9": 1})
        gauges = {name: read() for name, read in second.line.gauges().items()}
        assert gauges == {
            "extproc_peer_sync_peers": 1.0,
            "extproc_peer_sync_inflight_requests": 3.0,
        }
        owners = [(first, "a"), (first, "a"), (first, "b"), (second, "a")]
        for reservation, (owner, pool) in zip(reservations, owners, strict=True):
            owner.director(pool).release(reservation, time.monotonic())
        await until(lambda: not any([*first.in_flight().values(), *second.in_flight().values()]))
        await until(lambda: not any(second.in_flight("b").values()))


async def test_a_replica_that_stops_is_removed_at_once(server):
    """Its open requests leave the accounts of the others at once."""
    first, second = redis_replica(server.url), redis_replica(server.url)
    async with talking(first, second) as tasks:
        await until(lambda: first.heard == second.heard == 1)
        first.send()
        await until(lambda: sum(second.in_flight().values()) == 1)
        tasks[0].cancel()
        await asyncio.wait([tasks[0]])
        await until(lambda: second.heard == 0)
        assert sum(second.in_flight().values()) == 0


async def test_an_unreachable_redis_does_not_stop_routing(server):
    """Requests are decided and charged meanwhile; what others had open is forgotten, then known again.

    The clock of the first server is ahead by years: entries of the second one have lower ids.
    """
    async with redis.Redis.from_url(server.url) as writer:
        await until(server.is_listening)
        await writer.xadd(PeerSyncSection().stream, {b"m": b""}, id="9999999999999-0")
    first, second = redis_replica(server.url), redis_replica(server.url)
    async with talking(first, second) as tasks:
        await until(lambda: first.heard == second.heard == 1)
        first.send()
        await until(lambda: sum(second.in_flight().values()) == 1)
        server.stop()
        await until(lambda: second.heard == 0)
        assert sum(second.in_flight().values()) == 0
        second.send()
        assert sum(second.in_flight().values()) == 1
        server.start()
        await until(lambda: first.heard == second.heard == 1)
        await until(lambda: [sum(r.in_flight().values()) for r in (first, second)] == [2, 2])
        assert not any(task.done() for task in tasks)


async def test_entries_below_those_of_a_lost_stream_are_read(server, monkeypatch):
    """A stream is flushed, its clock was ahead, and no connection breaks."""
    monkeypatch.setattr(redis_peer_channel, "_BLOCK_MS", 300)
    first, second = redis_replica(server.url), redis_replica(server.url)
    async with redis.Redis.from_url(server.url) as client, asyncio.timeout(300):
        await until(server.is_listening)
        await client.xadd(PeerSyncSection().stream, {b"m": b""}, id="9999999999999-0")
        async with talking(first, second) as tasks:
            await until(lambda: first.heard == second.heard == 1)
            await client.delete(PeerSyncSection().stream)
            first.send()
            await until(lambda: sum(second.in_flight().values()) == 1)
            assert not any(task.done() for task in tasks)


class Deaf:
    """A client that swallows the first cancellation, as redis-py may while it connects."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()

    async def xrevrange(self, *_, **__):
        return []

    async def xread(self, *_, **__):
        self.reads.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def aclose(self):
        pass


async def test_a_cancellation_swallowed_by_the_client_still_ends_the_task(tmp_path):
    """A cancellation that is lost inside the client is looked for."""
    first = redis_replica(f"unix://{tmp_path}/none")
    first.line._reading = deaf = Deaf()
    async with asyncio.timeout(300), talking(first):
        await deaf.reads.wait()


async def test_events_are_written_at_once_and_batched_under_load(server):
    """However long facts are gathered, the first one after a pause does not wait."""
    first = redis_replica(server.url, flush_s=3600.0)
    await until(server.is_listening)
    async with redis.Redis.from_url(server.url) as reader, talking(first), asyncio.timeout(300):
        while not await reader.xlen("extproc"):
            await asyncio.sleep(0.005)
        first.send()
        first.line.event_log.publish_open()
        waiting = first.line.event_log.take()
        assert len(waiting.facts) >= 2
        assert await reader.xlen("extproc") == 1


async def test_foreign_entries_are_ignored(server):
    """Others may write to the stream; a reader goes on."""
    first = redis_replica(server.url)
    async with talking(first), redis.Redis.from_url(server.url) as strange:
        await until(server.is_listening)
        message = peer_sync.encode(
            peer_sync.PeerMessage("other", [fact(address="127.0.0.13:9", pool="b")])
        )
        # The line reads from the end that it finds: say it until it listens.
        async with asyncio.timeout(300):
            while not first.heard:
                await strange.xadd("extproc", {"x": b"y"})
                await strange.xadd("extproc", {"m": b"\x00"})
                await strange.xadd("extproc", {"m": message})
                await asyncio.sleep(0.02)
        assert sum(first.in_flight("b").values()) == 1


async def test_a_url_of_another_kind_is_refused():
    """The error does not repeat the URL, which may carry a password."""
    with pytest.raises(ConfigError, match=r"redis://") as raised:
        redis_peer_channel.RedisPeerChannel(
            PeerSyncSection(url=f"http://:{CANARY}@x"), sites(), time.monotonic
        )
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:6379/abc",
        "redis://h:6379/0/1",
        "redis://h:6379/-1",
        "redis://h:6379?db=-1",
        "redis://h:99999/0",
        "redis://h:0/0",
        "redis:///0",
        "redis://",
        "unix://",
        "unix://relative/path",
        "redis://h/0?protocol=3",
        "redis://h/0?decode_responses=true",
        "redis://h/0?foo=bar",
        f"redis://h/0?password={CANARY}&foo=bar",
        "redis://h/0//",
        "redis://h/0?max_connections=-1",
        f"redis://user:pa?{CANARY}@h/0",
        f"redis://user:12?{CANARY}@h/0",
        f"redis://user:12#{CANARY}@h/0",
        "unix:///run/redis#1.sock",
        "rediss://h/0?ssl_foo=1",
        "rediss://h/0?ssl_cert_reqs=bogus",
        "rediss://h/0?ssl_ca_certs=/nonexistent",
        "rediss://h/0?ssl_ciphers=bogus",
        "rediss://h/0?ssl_min_version=1",
        "redis://h/0?ssl_cert_reqs=none",
    ],
)
def test_a_url_that_cannot_work_is_refused(url):
    """The client passes over what it does not know, or fails when it is used."""
    with pytest.raises(ConfigError, match=r"peer_sync\.url") as raised:
        redis_peer_channel.require(PeerSyncSection(url=url))
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h:6379/",
        "redis://user:pass%2Fword@[::1]:6379/12",
        "redis://h:6379/0/",
        "redis://h:6379/0?db=",
        "redis://h?username=user&password=word",
        "redis://h?max_connections=10&retry_on_timeout=true",
        "unix://user@/run/redis.sock?db=2",
        "unix:///run/redis.sock?db=0&password=word",
        "rediss://h/0?ssl_cert_reqs=none&ssl_min_version=771&health_check_interval=5",
    ],
)
def test_a_url_that_can_work_is_taken(url):
    """With the options that mean something here."""
    redis_peer_channel.require(PeerSyncSection(url=url))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (f"foo={CANARY}", "foo"),
        (f"password=word&socket_timeout={CANARY}", "socket_timeout"),
        (f"db={CANARY}", "db"),
        (f"health_check_interval={CANARY}", "health_check_interval"),
        (f"max_connections={CANARY}", "max_connections"),
        (f"ssl_ca_certs={CANARY}", "ssl_ca_certs"),
    ],
)
def test_a_refused_option_is_named(options, name):
    """The error has its name; the value may be a secret."""
    with pytest.raises(ConfigError, match=r"peer_sync\.url") as raised:
        redis_peer_channel.require(PeerSyncSection(url=f"redis://h/0?{options}"))
    assert raised.value.got.startswith(f"{name},")
    assert CANARY not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "peer_sync.password_file: No such file or directory"),
        ("\n", "peer_sync.password_file: no password of printable ASCII"),
        (f"{CANARY}\u00e9", "peer_sync.password_file: no password of printable ASCII"),
    ],
)
async def test_the_password_file_is_named_once_it_cannot_be_read(content, reason, tmp_path, caplog):
    """Without its content: the file changed since the start, which refuses such a file."""
    password = tmp_path / "password"
    password.write_text("word")
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
    replica = redis_replica(url, password_file=str(password))
    password.unlink()
    if content is not None:
        password.write_text(content)
    async with listener, talking(replica):
        await until(lambda: sum("peer sync" in text for text in caplog.messages) == 2)
    logged = [text for text in caplog.messages if "peer sync" in text]
    assert all(reason in text and CANARY not in text for text in logged)


async def test_a_user_name_among_the_options_goes_with_the_password_file(tmp_path):
    """The client takes no user name beside a reader of the password."""
    password = tmp_path / "password"
    password.write_text("word\n")
    settings = PeerSyncSection(
        url="unix:///run/redis.sock?username=a%40b&db=2", password_file=str(password)
    )
    redis_peer_channel.require(settings)
    connection = redis_peer_channel.build_client(settings).connection_pool.make_connection()
    assert await connection.credential_provider.get_credentials_async() == ("a@b", "word")
    assert (connection.path, connection.db) == ("/run/redis.sock", 2)


def test_a_password_among_the_options_beside_a_password_file_is_refused(tmp_path):
    """As that of the user part of a URL."""
    settings = PeerSyncSection(
        url=f"redis://h?password={CANARY}", password_file=str(tmp_path / "password")
    )
    with pytest.raises(ConfigError, match=r"peer_sync\.password_file") as raised:
        redis_peer_channel.require(settings)
    assert CANARY not in str(raised.value)


async def test_peer_channel_reads_the_password_file_at_each_connection(server, tmp_path):
    """A password that changes on the server and in the file needs no restart."""
    password = tmp_path / "password"
    password.write_text(f"{CANARY}-1\n")
    settings = PeerSyncSection(url=server.url, password_file=str(password))
    admin = redis_peer_channel.build_client(PeerSyncSection(url=server.url))
    await connected(admin)
    await admin.config_set("requirepass", f"{CANARY}-1")
    client = redis_peer_channel.build_client(settings)
    assert await client.ping()
    await client.config_set("requirepass", f"{CANARY}-2")
    password.write_text(f"{CANARY}-2\n")
    await client.connection_pool.disconnect()
    assert await client.ping()
    password.unlink()
    await client.connection_pool.disconnect()
    with pytest.raises(RedisError, match="password_file"):
        await client.ping()
    await client.aclose()
    await admin.aclose()


async def connected(client) -> None:
    """Wait until the server answers."""
    async with asyncio.timeout(300):
        while True:
            with contextlib.suppress(ConnectionError, RedisError):
                await client.ping()
                return
            await asyncio.sleep(0.005)


async def test_two_passwords_are_refused(tmp_path):
    """A password in the URL beside a file is refused without being shown."""
    password = tmp_path / "password"
    password.write_text("x")
    with pytest.raises(ConfigError, match="password_file") as raised:
        redis_peer_channel.require(
            PeerSyncSection(url=f"redis://:{CANARY}@x", password_file=str(password))
        )
    assert CANARY not in str(raised.value)


async def test_a_missing_password_file_is_refused(tmp_path):
    """Start and `extproc check` name the field."""
    with pytest.raises(ConfigError, match=r"peer_sync\.password_file"):
        redis_peer_channel.require(
            PeerSyncSection(url="redis://x", password_file=str(tmp_path / "none"))
        )


async def test_a_missing_redis_package_is_named(monkeypatch):
    """Without the extra, the configuration is refused with what to install."""
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == "redis":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'extproc-epp\[redis\]'"):
        redis_peer_channel.RedisPeerChannel(
            PeerSyncSection(url="redis://x"), sites(), time.monotonic
        )
