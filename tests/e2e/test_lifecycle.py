"""Engines, extproc and Envoy that come and go, behind the lean profile over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.demo import stack
from tests.e2e import backend, http1, installation

CHAT = json.dumps(
    {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
).encode()
PATH = "/v1/chat/completions"

#: No engine waits for requests because others are thought to be quicker.
TAKES_TURNS = ("--strategy", "round-robin")

NAMES = ["", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor"]


@pytest.fixture(scope="module")
def children(live):
    with live.holding(stack.stack()) as item:
        yield item


@pytest.fixture(scope="module")
def engines(live, children):
    """Three simulated engines by address."""

    async def start():
        started = await asyncio.gather(*(children.engine("--speed", "1000") for _ in range(3)))
        return {address: child for child, address in started}

    return live.run(start())


@pytest.fixture(scope="module")
def place(live, engines):
    with live.holding(
        installation.installed(*engines, plaintext=False, arguments=TAKES_TURNS)
    ) as item:
        yield item


async def ask(fixture):
    return await http1.ask(fixture.port, PATH, CHAT)


async def kill(engines, address):
    """Kill an engine."""
    engines[address].process.kill()
    await engines[address].process.wait()


async def revive(children, engines, address):
    """Start an engine where one was."""
    child, _ = await children.engine("--speed", "1000", "--port", address.rpartition(":")[2])
    engines[address] = child


async def until_up(fixture, address, state):
    """Wait until extproc has seen an engine go or come."""
    await fixture.until(
        lambda result: result[f'extproc_endpoint_up{{endpoint="{address}"}}'] == state
    )


async def health(address, name):
    """Status of a name on a health port."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_001_through_envoy_over_tls(place, engines):
    """With nothing configured, Envoy and extproc talk over TLS and requests are answered."""
    answer = await ask(place)
    assert answer.status == 200
    assert f"127.0.0.1:{answer.head.get('x-inference-port')}" in engines


async def test_002_tls_by_default(place):
    """The ext_proc port speaks TLS with a certificate of its own making and offers h2."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection("127.0.0.1", place.ports.extproc, ssl=context)
    assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
    writer.transport.abort()


@pytest.mark.parametrize("name", [*NAMES, "liveness"])
async def test_005_health(place, name):
    """The health port answers in plain text for every name that probes use."""
    async with asyncio.timeout(300):  # the first look at engines may be under way
        while await health(f"127.0.0.1:{place.health}", name) != "SERVING":
            await asyncio.sleep(0.1)


async def test_131_envoy_finds_extproc_healthy(place):
    """Envoy's own health check of the ext_proc port passes."""
    # The first one may be under way, or late on a busy machine.
    stats = await place.until_stats(lambda stats: "cluster.extproc.health_check.success" in stats)
    assert stats.get("cluster.extproc.health_check.healthy") == 1
    assert stats.get("cluster.extproc.membership_healthy") == 1


@pytest.mark.slow
async def test_121_engine_killed_under_load(place, children, engines):
    """After an engine is killed under load, requests succeed; back again, it serves again."""
    stop = asyncio.Event()

    async def load():
        statuses = []
        while not stop.is_set():
            statuses.append((await ask(place)).status)
        return statuses

    async with asyncio.TaskGroup() as tasks:
        loads = [tasks.create_task(load()) for _ in range(8)]
        await place.until(lambda result: sum(_picks(result).values()) > 50)
        victim = max(_picks(await place.metrics()))
        await kill(engines, victim)
        await until_up(place, victim, 0)
        later = [(await ask(place)).status for _ in range(30)]
        stop.set()
    assert later == [200] * 30
    # A death is unknown before the first request that meets it.
    assert {status for item in loads for status in item.result()} <= {200, 503}
    await place.settled()
    await revive(children, engines, victim)
    await until_up(place, victim, 1)
    before = _picks(await place.metrics())[victim]
    # It may be left out for some seconds more; then a request tries it.
    async with asyncio.timeout(300):
        while _picks(await place.metrics())[victim] == before:
            assert {answer.status for answer in await asyncio.gather(*map(ask, [place] * 8))} == {
                200
            }


@pytest.mark.slow
async def test_121_all_engines_gone_and_back(place, children, engines):
    """With every engine gone requests get 503, and 200 once they are back."""
    for address in engines:
        await kill(engines, address)
    for address in engines:
        await until_up(place, address, 0)
    assert [(await ask(place)).status for _ in range(6)] == [503] * 6
    for address in list(engines):
        await revive(children, engines, address)
        await until_up(place, address, 1)
    assert [(await ask(place)).status for _ in range(6)] == [200] * 6


async def test_080_fail_closed(place):
    """With extproc killed requests with and without a body fail, and work once it is back."""
    await place.settled()
    place.extproc.process.kill()
    await place.extproc.process.wait()
    for body in (CHAT, None, CHAT):
        assert 500 <= (await http1.ask(place.port, PATH, body)).status <= 504
    await place.start_extproc()
    assert [(await ask(place)).status for _ in range(6)] == [200] * 6


async def test_122_extproc_killed_mid_stream():
    """A stream whose extproc is killed ends; the next request after a restart is served."""
    async with backend.backend() as served, installation.installed(served.address) as fixture:
        served.plays[PATH] = backend.first_event
        async with _streaming(fixture) as call:
            fixture.extproc.process.kill()
            await fixture.extproc.process.wait()
            await call.ended()
        served.plays.clear()
        await fixture.start_extproc()
        assert (await ask(fixture)).status == 200


@pytest.mark.parametrize("empty", ["nobody", "removed"])
async def test_067_068_no_endpoint(tmp_path, empty):
    """With an empty pool, requests with and without a body get 503 with the reason."""
    async with backend.backend() as served:
        file = tmp_path / "endpoints.yaml"
        some, none = f"endpoints: ['{served.address}']\n", "endpoints: []\n"
        file.write_text(none if empty == "nobody" else some)
        words = ["--config-text", installation.UNSCRAPED, "--endpoints-file", str(file)]
        async with installation.installed(arguments=words) as fixture:
            if empty == "removed":
                assert (await ask(fixture)).status == 200
                installation.replace_file(file, none)
                series = f'extproc_endpoint_up{{endpoint="{served.address}"}}'
                await fixture.until(lambda result: series not in result)
            for body in (CHAT, None):
                answer = await http1.ask(fixture.port, PATH, body)
                assert answer.status == 503
                assert answer.head.get("content-type") == "application/json"
                assert answer.head.get("retry-after") == "1"
                reason = answer.head.get("x-llm-d-request-dropped-reason")
                assert reason == "rejected-no-endpoints"
                assert answer.json()["error"]["code"] == 503
            installation.replace_file(file, some)
            await fixture.until(lambda values: series_of(served, values))
            assert (await ask(fixture)).status == 200


def series_of(served, result):
    """True if the metrics have series of a backend's endpoint."""
    return f'extproc_endpoint_up{{endpoint="{served.address}"}}' in result


@pytest.mark.parametrize("twice", [False, True])
async def test_011_draining(twice):
    """SIGTERM turns readiness off at once and serves on; streams outlive the end of extproc."""
    observed = asyncio.Event()
    words = ["--config-text", installation.UNSCRAPED]
    words += ["--drain-timeout", "300s" if twice else "500ms"]
    async with (
        backend.backend() as served,
        installation.installed(served.address, arguments=words) as fixture,
    ):
        served.plays[PATH] = backend.two_events(observed)
        async with _streaming(fixture) as call:
            draining = fixture.extproc.line("draining, 1 streams are open")
            fixture.extproc.process.send_signal(signal.SIGTERM)
            await draining
            if twice:  # the second signal ends a drain that is long enough to look at
                for port in (fixture.health, fixture.ports.extproc):
                    for name in NAMES:
                        assert await health(f"127.0.0.1:{port}", name) == "NOT_SERVING"
                    assert await health(f"127.0.0.1:{port}", "liveness") == "SERVING"
                assert (await http1.ask(fixture.pages, "/readyz")).status == 503
                served.plays.clear()
                assert (await ask(fixture)).status == 200
                fixture.extproc.process.send_signal(signal.SIGTERM)
            assert await fixture.extproc.process.wait() == 0
            observed.set()
            assert await call.body.rest() == b"data: 2\n\n"
        await fixture.start_extproc()
        assert (await ask(fixture)).status == 200


@contextlib.asynccontextmanager
async def _streaming(fixture):
    """A call whose first event is here."""
    async with http1.calling(fixture.port) as call:
        await call.start("POST", PATH, [("content-length", str(len(CHAT)))])
        await call.send(CHAT)
        await call.begun()
        assert await call.body.piece() == b"data: 1\n\n"
        yield call


def _picks(result):
    """Requests routed so far, by endpoint."""
    name = 'extproc_routed_requests_total{endpoint="'
    return {
        key.removeprefix(name).partition('"')[0]: value
        for key, value in result.items()
        if key.startswith(name)
    }
