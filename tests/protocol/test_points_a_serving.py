from __future__ import annotations

import argparse
import asyncio
import datetime as dt
import ssl
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.cli import flags
from extproc.config.decisions import DecisionsSection
from extproc.config.settings import LimitsSection, ServerSection, Settings
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import Endpoint
from extproc.server import health
from tests.support import ext_proc_script, serving
from tests.support.serving import LOCAL, Running, Stream

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"
NAMES = ["readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor", ""]


async def routed(channel: grpc.aio.Channel) -> str:
    """The endpoint of a request."""
    stream = Stream(channel)
    await stream.say(ext_proc_script.request_headers(ends=True))
    (reply,) = await stream.hear()
    assert await stream.end() is grpc.StatusCode.OK
    return reply.headers["x-gateway-destination-endpoint"]


async def shown(port: int) -> tuple[bytes, str | None]:
    """The certificate a server shows to a client that does not verify, and the protocol agreed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    _, writer = await asyncio.open_connection(LOCAL, port, ssl=context)
    tls = writer.get_extra_info("ssl_object")
    certificate, protocol = tls.getpeercert(binary_form=True), tls.selected_alpn_protocol()
    writer.close()
    return certificate, protocol


def trusting(certificate: bytes, port: int) -> grpc.aio.Channel:
    """A channel that trusts this certificate."""
    return grpc.aio.secure_channel(
        f"{LOCAL}:{port}",
        grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(certificate).encode()),
        options=[("grpc.ssl_target_name_override", "localhost")],
    )


def write_pair(folder: Path) -> bytes:
    """A fresh tls.crt and tls.key; the certificate as DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    (folder / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return certificate.public_bytes(serialization.Encoding.DER)


async def test_001_the_method_is_served_under_envoys_name():
    """The ext_proc method answers, on 9002 by default."""
    async with serving.running(serving.settings(FIRST)) as picker:
        await picker.sync()
        async with picker.channel() as channel:
            assert await routed(channel) == FIRST
    assert (ServerSection().grpc_port, ServerSection().grpc_health_port) == (9002, 9003)


async def test_002_tls_is_the_default():
    """By default a client that does not verify gets TLS with a certificate made at start, and h2."""
    assert Settings().server.secure_serving is True
    async with serving.running(serving.settings(FIRST, secure_serving=True)) as picker:
        await picker.sync()
        certificate, protocol = await shown(picker.ports.grpc)
        assert protocol == "h2"
        async with trusting(certificate, picker.ports.grpc) as channel:
            assert await routed(channel) == FIRST


async def test_003_plaintext_by_flag():
    """With secure serving off, h2c works and TLS does not."""
    async with serving.running(serving.settings(FIRST, secure_serving=False)) as picker:
        await picker.sync()
        async with picker.channel() as channel:
            assert await routed(channel) == FIRST
        with pytest.raises(ssl.SSLError):
            await shown(picker.ports.grpc)


async def test_004_certificate_files_with_reload(tmp_path: Path):
    """tls.crt and tls.key are served; a new pair is picked up, a broken one is not."""
    first = write_pair(tmp_path)
    configuration = serving.settings(
        FIRST, secure_serving=True, cert_path=str(tmp_path), enable_cert_reload=True
    )
    async with serving.running(configuration) as picker:
        await picker.sync()
        assert (await shown(picker.ports.grpc))[0] == first
        second = write_pair(tmp_path)
        assert (await shown(picker.ports.grpc))[0] == second
        (tmp_path / "tls.crt").write_text("not a certificate")
        assert (await shown(picker.ports.grpc))[0] == second
        async with trusting(second, picker.ports.grpc) as channel:
            assert await routed(channel) == FIRST


def follows_sync(name: str) -> None:
    """A health name is NOT_SERVING before the first sync and SERVING after it."""

    async def test() -> None:
        async with serving.running(serving.settings(FIRST)) as picker:
            assert await picker.health(name) == "NOT_SERVING"
            await picker.sync()
            assert await picker.health(name) == "SERVING"

    serving.run(test())


def test_005_inference_extension_follows_the_first_sync():
    """The name the conformance probes use is served in plaintext on the health port."""
    follows_sync("inference-extension")


def test_006_readiness_only_when_synced():
    """`readiness` is SERVING once discovery has spoken."""
    follows_sync("readiness")


async def test_007_liveness_whenever_the_process_answers():
    """`liveness` is SERVING before the first sync and while draining."""
    async with serving.running(serving.settings(FIRST)) as picker:
        assert await picker.health("liveness") == "SERVING"
        picker.picker.readiness.start_draining()
        assert await picker.health("liveness") == "SERVING"


def test_008_the_service_name_answers_like_readiness():
    """The ext_proc service name follows the first sync."""
    follows_sync("envoy.service.ext_proc.v3.ExternalProcessor")


def test_009_the_empty_name_answers_like_readiness():
    """The empty name follows the first sync."""
    follows_sync("")


async def test_010_health_on_the_ext_proc_port():
    """Every name is answered on the ext_proc port too."""
    async with serving.running(serving.settings(FIRST)) as picker:
        await picker.sync()
        for name in NAMES:
            assert await picker.health(name, port=picker.ports.grpc) == "SERVING"


async def drained(picker: Running) -> None:
    await picker.sync()
    skip_drain = asyncio.Event()
    async with picker.channel() as channel:
        before = Stream(channel)
        await before.say(ext_proc_script.request_headers(ends=True))
        await before.hear()
        drain = asyncio.ensure_future(picker.picker.drain(skip_drain))
        while not picker.picker.readiness.draining:
            await asyncio.sleep(0)
        for name in NAMES:
            assert await picker.health(name) == "NOT_SERVING"
        await before.say(ext_proc_script.response_headers())
        assert await before.hear() == [ext_proc_script.answer_headers()]
        assert await routed(channel) == FIRST
        assert not drain.done()
        skip_drain.set()
        await drain
        # Let go with OK, so that Envoy goes on with the answer without us.
        assert await before.rest() == []
        assert await before.call.code() is grpc.StatusCode.OK


async def test_011_draining_serves_on():
    """Draining: not ready at once, old and new streams are served, at its end they close OK."""
    async with serving.running(serving.settings(FIRST, drain_timeout_s=300.0)) as picker:
        await drained(picker)


async def test_012_an_unknown_protocol():
    """HTTP and h2c are read, gRPC inside; a pool that wants anything else leaves us not serving."""
    async with serving.running(serving.settings(FIRST)) as picker:
        await picker.sync()
        (runtime,) = picker.picker.pool_registry.by_name.values()
        for protocol, status in (
            ("kubernetes.io/h2c", "SERVING"),
            ("kubernetes.io/wss", "NOT_SERVING"),
            ("http", "SERVING"),
        ):
            runtime.on_discovered(
                DiscoveredPool(endpoints=(Endpoint(FIRST),), app_protocol=protocol)
            )
            for name in NAMES:
                assert await picker.health(name) == status
            assert await picker.health("liveness") == "SERVING"


async def test_013_unknown_names_with_leader_election():
    """With an election, an undefined name is unknown in the reply, not as an error."""
    readiness = health.Readiness(lambda: True, is_leader=lambda: False)
    async with (
        serving.serving_health(readiness) as port,
        grpc.aio.insecure_channel(f"{LOCAL}:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        statuses = {}
        for name in (*NAMES, "liveness"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            statuses[name] = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    assert statuses.pop("inference-extension") == "SERVICE_UNKNOWN"
    assert statuses.pop("liveness") == "SERVING"
    assert set(statuses.values()) == {"NOT_SERVING"}


async def test_014_the_receive_limit_ends_one_stream_only():
    """A message over the limit ends its stream with RESOURCE_EXHAUSTED; others go on."""
    limits = LimitsSection(max_message_bytes=6 << 20)
    plain = DecisionsSection(metadata=False)
    async with serving.running(serving.settings(FIRST), limits=limits, decisions=plain) as picker:
        await picker.sync()
        async with picker.channel() as channel:
            fits = Stream(channel)
            await fits.say(
                ext_proc_script.request_headers({**ext_proc_script.PLAIN, ":path": "/upload"})
            )
            await fits.say(ext_proc_script.request_body(b"x" * (5 << 20), ends=True))
            assert await fits.hear() == [ext_proc_script.route(FIRST)]
            fits.call.cancel()
            large = Stream(channel)
            await large.say(ext_proc_script.request_body(b"x" * (7 << 20)))
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await large.rest()
            assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await routed(channel) == FIRST
    assert LimitsSection().max_message_bytes >= 4 << 20


async def test_015_two_pickers_side_by_side():
    """Two pickers with equal settings but for their endpoints serve their own."""
    async with (
        serving.running(serving.settings(FIRST)) as first,
        serving.running(serving.settings(SECOND)) as second,
    ):
        await first.sync()
        await second.sync()
        for picker, address in ((first, FIRST), (second, SECOND)):
            async with picker.channel() as channel:
                assert await routed(channel) == address


def test_016_the_reference_pickers_flags_are_accepted():
    """The arguments of the conformance suite's Deployment are taken."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    flags.add(parser)
    words = (
        "--pool-name primary --pool-namespace backend --zap-encoder json --grpc-port 9002"
        f" --grpc-health-port 9003 --endpoints {FIRST}"
    )
    args, args.unknown_flags = parser.parse_known_args(words.split())
    resolved = flags.resolve(args)
    assert resolved.settings.pool.name == "primary"
    assert (resolved.settings.server.grpc_port, resolved.settings.server.grpc_health_port) == (
        9002,
        9003,
    )
    assert resolved.settings.log.format == "json"
    assert not any("zap" in warning for warning in resolved.warnings)
