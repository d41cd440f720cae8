import asyncio
import contextlib
import datetime as dt
import socket
import ssl
import types

import pytest
from aiohttp import web
from kubernetes.aio.config import incluster_config

from extproc.discovery.kubernetes import api_client, api_responses, settings, watch_plan
from extproc.errors import ConfigError
from tests.discovery.kubernetes import builders, fake
from tests.support.certificates import write_certificate

PODS = watch_plan.WatchedCollection(watch_plan.PODS, "default")
REF = settings.InferencePoolRef("default", "pool")


@contextlib.asynccontextmanager
async def secure(path, tokens):
    """A server with a certificate that lists no pods for the bearer of one of the tokens."""

    async def answer(request):
        if request.headers.get("Authorization", "").lower() not in {f"bearer {t}" for t in tokens}:
            return fake.refuse(401, "Unauthorized")
        return web.Response(body=builders.page(), content_type="application/json")

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, path.with_suffix(".key"))
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
def account(tmp_path, monkeypatch):
    """The files of a service account, as in a pod."""
    (tmp_path / "token").write_text("first")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "server.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    return tmp_path


@contextlib.asynccontextmanager
async def connected(**wanted):
    server = api_client.KubernetesApiClient(settings.KubernetesSettings(sources=(REF,), **wanted))
    await server.open()
    try:
        yield server
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def in_pod(account, monkeypatch, tokens=frozenset({"first"})):
    """A client in a pod whose API server takes the tokens."""
    async with secure(write_certificate(account, "server"), tokens) as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        async with connected() as server:
            yield server


async def test_api_client_uses_the_service_account_of_the_pod(account, monkeypatch):
    """Address, authority and token come from the pod; a rotated token is read again on 401."""
    tokens = {"first"}
    async with in_pod(account, monkeypatch, tokens) as server:
        assert server.name.startswith("https://127.0.0.1:")
        assert await server.page(PODS, "", limit=500) == builders.page()
        tokens.clear()
        tokens.add("second")
        (account / "token").write_text("second")
        refused = await server.page(PODS, "", limit=500)
        assert (refused.status, refused.credentials_expired) == (401, True)
        await server.renew(server.generation)
        assert await server.page(PODS, "", limit=500) == builders.page()


async def test_a_certificate_of_another_authority_is_refused(account, monkeypatch):
    """Its certificate is not of our authority; a new one of ours is read by renewing."""
    theirs = write_certificate(account, "theirs")
    async with secure(theirs, {"first"}) as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        write_certificate(account, "server")
        async with connected() as server:
            refused = await server.page(PODS, "", limit=500)
            assert (refused.status, refused.credentials_expired) == (0, True)
            (account / "server.crt").write_bytes(theirs.read_bytes())
            await server.renew(server.generation)
            assert await server.page(PODS, "", limit=500) == builders.page()


def test_a_service_account_without_a_token_is_refused(account, monkeypatch):
    """The error says where the credentials were looked for."""
    (account / "token").write_text("")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    with pytest.raises(ConfigError, match="service account"):
        asyncio.run(
            api_client.KubernetesApiClient(settings.KubernetesSettings(sources=(REF,))).open()
        )


async def test_a_service_account_stays_in_use_while_its_token_is_missing(account, monkeypatch):
    """No kubeconfig file, which may be that of another cluster, takes its place."""
    monkeypatch.setenv("KUBECONFIG", str(account / "kubeconfig"))
    async with secure(write_certificate(account, "server"), {"first"}) as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        async with connected() as client:
            (account / "token").unlink()
            with pytest.raises(ConfigError, match=r"the service account, .*/token"):
                await client.renew(client.generation)
            (account / "token").write_text("first")
            await client.renew(client.generation)
            assert client.name == f"https://127.0.0.1:{port}"


async def test_a_token_file_may_end_in_a_newline(account, monkeypatch):
    """So `kubectl create token` writes it; the newline is no part of the token."""
    (account / "token").write_text("first\n")
    async with in_pod(account, monkeypatch) as server:
        assert await server.page(PODS, "", limit=500) == builders.page()
        assert await server.send("GET", PODS.path, seconds=60.0) == builders.page()


async def test_a_token_that_no_header_may_contain_is_a_failed_request(account, monkeypatch):
    """The next one is read by renewing."""
    (account / "token").write_text("fir\0st")
    async with in_pod(account, monkeypatch) as server:
        refused = await server.page(PODS, "", limit=500)
        assert (refused.status, refused.credentials_expired) == (0, True)
        (account / "token").write_text("first")
        await server.renew(server.generation)
        assert await server.page(PODS, "", limit=500) == builders.page()


async def test_a_missing_token_is_a_failed_request(account, monkeypatch):
    """The client reads it again after a minute; what it raises then ends nothing."""
    async with in_pod(account, monkeypatch) as server:
        configuration = server._session.client.configuration
        loader = configuration.refresh_api_key_hook.__closure__[0].cell_contents
        loader.token_expires_at = dt.datetime.min  # noqa: DTZ901 - the client's own
        (account / "token").write_text("")
        refused = await server.page(PODS, "", limit=500)
        assert (refused.status, refused.credentials_expired) == (0, True)
        (account / "token").unlink()
        assert (await server.page(PODS, "", limit=500)).status == 0


async def test_renewing_credentials_does_not_end_open_watches(tmp_path):
    """A watch goes on over the old credentials; of many that ask at once the first renews."""
    fakes = await fake.FakeApiServer().start()
    async with connected(kubeconfig=fakes.kubeconfig(tmp_path)) as server:
        generation = server.generation
        async with server.watch(PODS, "1000", 60) as stream:
            await asyncio.gather(*(server.renew(generation) for _ in range(5)))
            assert server.generation == generation + 1
            await fakes.until_watched(1)
            fakes.send(b"still here")
            assert await anext(stream) == b"still here"
    await fakes.close()


async def test_every_watch_has_a_connection(tmp_path):
    """The client's default of 100 would leave the last ones waiting for ever."""
    fakes = await fake.FakeApiServer().start()
    async with (
        connected(kubeconfig=fakes.kubeconfig(tmp_path)) as server,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(120):
            await stack.enter_async_context(server.watch(PODS, "1000", 60))
        await fakes.until_watched(120)
    await fakes.close()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3.0), ("100000", 10.0), ("", 0.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), ("-1", 0.0)],
)
async def test_retry_after_is_read(tmp_path, header, seconds):
    """Retry-After in seconds, within reason."""
    fakes = await fake.FakeApiServer().start()

    async def busy(_):
        return fake.refuse(429, "slow down", **({"Retry-After": header} if header else {}))

    fakes.answers.append(busy)
    async with connected(kubeconfig=fakes.kubeconfig(tmp_path)) as server:
        error = await server.page(PODS, "", limit=500)
    await fakes.close()
    assert error == api_responses.ApiError(429, "slow down", seconds)


async def test_an_error_without_a_status_object_is_reported(tmp_path):
    """A proxy in between answers in its own words."""
    fakes = await fake.FakeApiServer().start()

    async def gateway(_):
        return web.Response(status=502, text="<html>bad gateway</html>")

    fakes.answers.append(gateway)
    async with connected(kubeconfig=fakes.kubeconfig(tmp_path)) as server:
        error = await server.page(PODS, "", limit=500)
    await fakes.close()
    assert (error.status, error.message) == (502, "<html>bad gateway</html>")


def test_a_lost_peer_is_detected():
    """A watch may be silent for minutes, so its connection is probed."""
    with socket.socket() as link:
        transport = types.SimpleNamespace(get_extra_info=lambda name: link)
        connection = types.SimpleNamespace(transport=transport)
        api_client._keep_alive(types.SimpleNamespace(connection=connection))
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
