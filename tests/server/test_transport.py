"""The choice of the transport: what it loads, how it names itself, and ports that are taken."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import ssl
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.config.settings import LimitsSection, ServerSection
from extproc.demo import stack
from extproc.errors import ConfigError
from extproc.http2.limits import ReceiveBudget
from extproc.server import admin, native_server, transport
from extproc.server.stream_context import StreamSettings
from tests.support import http2_serving, serving
from tests.support.virtual_loop import in_virtual_time

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operations/transport.md"

FIRST = "127.0.0.11:9"

UNSCRAPED = "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}}"

#: `extproc` where grpcio cannot be imported, and a last line with the modules of it that were.
WITHOUT_GRPCIO = """
import sys

class Absence:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "grpc":
            raise ImportError("grpcio is imported")

sys.meta_path.insert(0, Absence())
from extproc.cli.main import main
status = main()
print("loaded:", [name for name in sys.modules if name.partition(".")[0] == "grpc"])
sys.exit(status)
"""


async def test_serve_does_not_load_grpcio():
    """Neither to start nor to answer: `extproc serve` with TLS and a certificate of its own."""
    lines = []
    async with stack.stack(log=lines.append) as children:
        child = await children.start(
            "extproc",
            [
                *(sys.executable, "-c", WITHOUT_GRPCIO, "serve"),
                *("--endpoints", FIRST, "--host", serving.LOCAL, "--drain-timeout", "0s"),
                *("--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"),
                *("--config-text", UNSCRAPED, "--strategy", "least-request"),
            ],
            ready="extproc is ready",
        )
        assert "transport" not in child.ready_line
        (port,) = re.findall(r"health on (\d+)", child.ready_line)
        async with grpc.aio.insecure_channel(f"{serving.LOCAL}:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            assert answer.status == answer.SERVING
            assert "readiness" in (await stub.List(health_pb2.HealthListRequest())).statuses
        child.process.send_signal(signal.SIGINT)
        assert await child.process.wait() == 0
    assert any(line.endswith("loaded: []") for line in lines), lines


@pytest.mark.parametrize("host", ["127.0.0.1", "[::]"])
async def test_native_names_a_taken_port(host):
    """With the flag that set it, as on grpcio."""
    server = native_server.build_server(
        {}, LimitsSection(), budget=ReceiveBudget(1), counts=Counter()
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--grpc-port: .*port {port} to be free"):
            native_server.bind(server, f"{host}:{port}", flag="--grpc-port")


#: Hosts that cannot be listened on: no address, none of this machine, no name.
WRONG_HOSTS = ["300.1.1.1", "192.0.2.1", "a" * 64 + ".x"]


@pytest.mark.parametrize("host", WRONG_HOSTS)
@pytest.mark.parametrize("kind", ["native", "grpcio"])
async def test_a_wrong_host_is_no_taken_port(host, kind, capfd):
    """The error names the option that is wrong, and gRPC adds no lines."""
    settings = serving.settings(FIRST, transport=kind, host=host)
    with pytest.raises(ConfigError, match=rf"--host: .*this machine.*, got '{host}'"):
        async with serving.running(settings):
            pass
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", WRONG_HOSTS)
async def test_a_wrong_host_of_the_metrics_is_no_taken_port(host):
    """As of the ext_proc port."""
    server = admin.AdminServer()
    with pytest.raises(ConfigError, match=rf"--host: .*this machine.*, got '{host}'"):
        await server.start(web.Application(), host=host, port=0)
    await server.close()


async def test_a_port_taken_by_health_releases_that_of_ext_proc():
    """A start that fails half-way listens on nothing."""
    port = stack.free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = serving.settings(
            FIRST, transport="native", grpc_port=port, grpc_health_port=taken.getsockname()[1]
        )
        with pytest.raises(ConfigError, match="--grpc-health-port"):
            async with serving.running(settings):
                pass
    assert not transport.is_taken(serving.LOCAL, port)


async def test_native_serves_a_client_of_tls_without_alpn():
    """HTTP/2 by prior knowledge; a client that offers another protocol only is not answered."""
    settings = serving.settings(FIRST, transport="native", secure_serving=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    async with serving.running(settings) as picker:
        reader, writer = await asyncio.open_connection(
            serving.LOCAL, picker.ports.grpc, ssl=context
        )
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        received = await reader.read()
        writer.close()
    assert received[3:4] == b"\x04"  # SETTINGS, then GOAWAY and the end
    assert received[-64:].endswith(b"no preface of HTTP/2")


async def test_native_keeps_connections_over_a_reload_of_the_certificate(tmp_path):
    """A connection that stands goes on with the certificate it began with."""
    from tests.protocol import test_points_a_serving  # noqa: PLC0415 - its helpers only

    first = test_points_a_serving.write_pair(tmp_path)
    settings = serving.settings(
        FIRST, transport="native", secure_serving=True, cert_path=str(tmp_path)
    )
    async with serving.running(settings) as picker:
        await picker.sync()
        async with test_points_a_serving.trusting(first, picker.ports.grpc) as channel:
            assert await test_points_a_serving.routed(channel) == FIRST
            second = test_points_a_serving.write_pair(tmp_path)
            assert (await test_points_a_serving.shown(picker.ports.grpc))[0] == second
            assert await test_points_a_serving.routed(channel) == FIRST


async def test_native_prints_nothing_about_a_server_name_that_is_not_ascii(tmp_path, monkeypatch):
    """Any peer may send one with its first message, as often as it likes."""
    from tests.protocol import test_points_a_serving  # noqa: PLC0415 - its helpers only

    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    test_points_a_serving.write_pair(tmp_path)
    settings = serving.settings(
        FIRST, transport="native", secure_serving=True, cert_path=str(tmp_path)
    )
    outgoing = ssl.MemoryBIO()
    client = http2_serving.client_context().wrap_bio(
        ssl.MemoryBIO(), outgoing, server_hostname="buecher"
    )
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    async with serving.running(settings) as picker:
        reader, writer = await asyncio.open_connection(serving.LOCAL, picker.ports.grpc)
        writer.write(outgoing.read().replace(b"buecher", "bücher".encode()))
        assert await reader.read(1)
        writer.close()
    assert not unraisable


def test_every_setting_is_listed_with_its_tests():
    """In the table of settings that mean the same on both transports; its files are there."""
    table = PAGE.read_text().partition("## Settings")[2].partition("\n## ")[0]
    listed = {
        name for row in table.splitlines() for name in re.findall(r"`([a-z]+\.[a-z_]+)`", row)
    }
    sections = {"server": ServerSection, "limits": LimitsSection}
    fields = {
        f"{name}.{field}"
        for name, section in sections.items()
        for field in section.__struct_fields__
    }
    assert listed == fields
    assert all((ROOT / path).is_file() for path in re.findall(r"`(tests/[a-z0-9_/]+\.py)`", table))


async def test_native_serves_the_cipher_suites_of_the_environment(monkeypatch):
    """The variable that grpcio reads: a client of another suite of TLS 1.2 is refused."""
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", "ECDHE-ECDSA-CHACHA20-POLY1305")
    settings = serving.settings(FIRST, transport="native", secure_serving=True)
    async with serving.running(settings) as picker:
        for suite, is_served in (("CHACHA20", True), ("AES128-GCM-SHA256", False)):
            context = http2_serving.client_context()
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers(f"ECDHE+{suite}" if is_served else f"ECDHE-ECDSA-{suite}")
            connecting = asyncio.open_connection(serving.LOCAL, picker.ports.grpc, ssl=context)
            if not is_served:
                with pytest.raises((ssl.SSLError, ConnectionError)):
                    await connecting
                continue
            _, writer = await connecting
            assert "CHACHA20" in writer.get_extra_info("cipher")[0]
            writer.close()


async def test_native_serves_the_least_version_of_tls(tmp_path):
    """A client of TLS 1.2 is refused, also with a certificate from files."""
    from tests.protocol import test_points_a_serving  # noqa: PLC0415 - its helpers only

    test_points_a_serving.write_pair(tmp_path)
    for folder in ("", str(tmp_path)):
        settings = serving.settings(
            FIRST,
            transport="native",
            secure_serving=True,
            tls_min_version="1.3",
            cert_path=folder,
        )
        async with serving.running(settings) as picker:
            context = http2_serving.client_context()
            _, writer = await asyncio.open_connection(serving.LOCAL, picker.ports.grpc, ssl=context)
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            writer.close()
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(serving.LOCAL, picker.ports.grpc, ssl=context)


class LookingServicer(transport.ExtProcServicer):
    """Notes when it looks at the bodies that arrive."""

    def __init__(self, body_idle_s):
        super().__init__(
            SimpleNamespace(settings=StreamSettings(max_streams=1, body_idle_s=body_idle_s))
        )
        self.looks = []

    async def refuse_stalled(self):
        """Note the time."""
        self.looks.append(asyncio.get_running_loop().time())

    async def drain_streams(self, within_s):
        """There are none."""


@in_virtual_time()
async def test_a_shorter_idle_time_of_bodies_counts_within_a_second():
    """A reload may shorten `body_idle_s` during the sleep that derives from the old one."""
    servicer = LookingServicer(600.0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3.5):
            await servicer.follow_uploads()
    assert servicer.looks == pytest.approx([1.0, 2.0, 3.0])
