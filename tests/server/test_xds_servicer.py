"""The xDS server over real gRPC; the other end speaks Envoy's own types."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import grpc
import pytest

from extproc import supervision
from extproc.endpoint import Endpoint, Load
from extproc.server import control_plane_servers, ext_proc_servicer
from extproc.supervision import Supervisor
from extproc.telemetry.control_plane_metrics import XdsCounters
from extproc.xds import sessions
from extproc.xds.resources import ASSIGNMENT, CLUSTER, ClusterOptions
from tests.support.pool_fixture import PoolFixture
from tests.support.serving import LOCAL
from tests.support.xds_peer import Status, clusters, core, discovery, endpoints

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"

#: As many as Envoy has, more or less.
EXTENSIONS = [core.Extension(name=f"envoy.{at}", category="envoy.http") for at in range(300)]


class XdsScene:
    """A server over one pool, and a client's channel to it."""

    def __init__(self):
        self.pool_fixture = PoolFixture({FIRST: None, SECOND: None})
        self.counters = XdsCounters()
        self.synced = True
        self.other_pools = {}
        self.supervisor = Supervisor()
        self.discovery = control_plane_servers.AggregatedDiscoveryServicer(
            lambda: {"": self.pool_fixture.store.pool} | self.other_pools,
            h2c=frozenset,
            synced=lambda: self.synced,
            options=ClusterOptions(),
            counters=self.counters,
            supervisor=self.supervisor,
        )

    def open_sotw(self):
        return SotwStream(self.channel)

    def differences(self):
        return DeltaStream(self.channel)

    def set_endpoints(self, *addresses):
        self.pool_fixture.store.set_endpoints([Endpoint(address) for address in addresses], 1.0)


@contextlib.asynccontextmanager
async def serving(max_message_bytes=1 << 24):
    """A scene whose discovery looks at its pools."""
    scene = XdsScene()
    server = ext_proc_servicer.build_server(max_message_bytes)
    control_plane_servers.register(server, scene.discovery)
    port = ext_proc_servicer.bind(server, f"{LOCAL}:0", flag="--xds-port")
    await server.start()
    supervised = scene.supervisor.keep("xds", scene.discovery.run)
    looking = asyncio.get_running_loop().create_task(supervised)
    try:
        async with grpc.aio.insecure_channel(f"{LOCAL}:{port}") as scene.channel:
            yield scene
    finally:
        looking.cancel()
        await asyncio.wait([looking])
        await server.stop(None)
    assert looking.cancelled()


class SotwStream:
    """A stream of whole states, from Envoy's end."""

    method, request, response = (
        control_plane_servers.SOTW,
        discovery.DiscoveryRequest,
        discovery.DiscoveryResponse,
    )

    def __init__(self, channel):
        self.call = channel.stream_stream(f"/{control_plane_servers.SERVICE}/{self.method}")()

    async def say(self, type_url, **fields):
        await self.call.write(bytes(self.request(type_url=type_url, **fields)))

    async def hear(self):
        data = await self.call.read()
        assert data is not grpc.aio.EOF, await self.call.details()
        return self.response.parse(data)

    async def take(self, type_url, *names):
        """Hear an answer of this type and say that it is fine; returns what was in it."""
        answer = await self.hear()
        assert answer.type_url == type_url
        assert {resource.type_url for resource in answer.resources} <= {type_url}
        await self.say(
            type_url,
            resource_names=list(names),
            version_info=answer.version_info,
            response_nonce=answer.nonce,
        )
        return [resource.value for resource in answer.resources]

    async def ended(self):
        """The status it ended with; nothing more was said."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            assert await self.call.read() is grpc.aio.EOF
        return await self.call.code()


class DeltaStream(SotwStream):
    """A stream of differences."""

    method, request, response = (
        control_plane_servers.DELTA,
        discovery.DeltaDiscoveryRequest,
        discovery.DeltaDiscoveryResponse,
    )


def addresses(data):
    """Of an assignment, as `ip:port`."""
    assignment = endpoints.ClusterLoadAssignment.parse(data)
    places = [
        endpoint.endpoint.address.socket_address
        for group in assignment.endpoints
        for endpoint in group.lb_endpoints
    ]
    return [f"{address.address}:{address.port_value}" for address in places]


async def listening(scene):
    """A stream that has taken the first cluster and its endpoints."""
    stream = scene.open_sotw()
    await stream.say(CLUSTER, node=core.Node(id="edge-1", extensions=EXTENSIONS))
    (cluster,) = await stream.take(CLUSTER)
    assert clusters.Cluster.parse(cluster).name == "engines"
    await stream.say(ASSIGNMENT, resource_names=["engines"])
    (assignment,) = await stream.take(ASSIGNMENT, "engines")
    assert addresses(assignment) == [FIRST, SECOND]
    return stream


async def test_envoy_receives_every_change():
    """Clusters, then endpoints, then each change of them while the stream is open."""
    async with serving() as scene:
        stream = await listening(scene)
        scene.set_endpoints(FIRST)
        assert addresses(*await stream.take(ASSIGNMENT, "engines")) == [FIRST]
        scene.set_endpoints()
        assert addresses(*await stream.take(ASSIGNMENT, "engines")) == []
        assert scene.counters.responses == {"clusters": 1, "endpoints": 3}
        assert scene.counters.streams_open == 1
        await stream.call.done_writing()
        assert await stream.ended() is grpc.StatusCode.OK
        assert scene.counters.streams_open == 0


async def test_responses_may_exceed_the_largest_message():
    """The largest message is for what arrives: pools have any number of endpoints."""
    async with serving(max_message_bytes=1 << 14) as scene:
        stream = await listening(scene)
        pool = [f"127.0.0.1:{port}" for port in range(1, 1001)]
        scene.set_endpoints(*pool)
        assert set(addresses(*await stream.take(ASSIGNMENT, "engines"))) == set(pool)


async def test_scrapes_send_no_update():
    """A new load changes the pool and not what Envoy knows of it."""
    async with serving() as scene:
        stream = await listening(scene)
        store = scene.pool_fixture.store
        mark = store.begin_scrape(store.pool.find(FIRST).endpoint)
        store.observe(mark, Load(at=1.0, waiting=7.0), 1.0)
        scene.discovery.step()
        scene.set_endpoints(SECOND)
        assert addresses(*await stream.take(ASSIGNMENT, "engines")) == [SECOND]
        assert scene.counters.responses["endpoints"] == 2


async def test_nothing_is_sent_before_discovery_is_synced():
    """A replica that has just started does not remove the endpoints of an Envoy."""
    async with serving() as scene:
        scene.synced = False
        stream = scene.open_sotw()
        await stream.say(CLUSTER)
        hearing = asyncio.ensure_future(stream.hear())
        scene.discovery.step()
        assert not hearing.done()
        assert not scene.counters.responses
        scene.synced = True
        assert (await hearing).type_url == CLUSTER


async def test_nothing_is_sent_while_no_pool_can_be_encoded():
    """An Envoy keeps what another replica sent, unless there is a pool to send."""
    async with serving() as scene:
        scene.set_endpoints("no-ip-address:8000")
        streams = [scene.open_sotw(), scene.differences()]
        for stream in streams:
            await stream.say(CLUSTER)
        while not scene.supervisor.failures:
            await asyncio.sleep(0)
        hearing = [asyncio.ensure_future(stream.hear()) for stream in streams]
        scene.discovery.step()
        assert not any(answer.done() for answer in hearing)
        assert not scene.counters.responses
        scene.other_pools["llama"] = PoolFixture({SECOND: None}).store.pool
        for answer in hearing:
            assert len((await answer).resources) == 1
        assert scene.supervisor.failures["xds"] == 1


async def test_a_later_envoy_receives_the_current_snapshot():
    """Pools are not read while no stream is open, and the next stream gets their current state."""
    async with serving() as scene:
        stream = await listening(scene)
        await stream.call.done_writing()
        await stream.ended()
        scene.set_endpoints(SECOND)
        late = scene.open_sotw()
        await late.say(ASSIGNMENT, resource_names=["engines"], response_nonce="9")
        assert addresses(*await late.take(ASSIGNMENT, "engines")) == [SECOND]


async def test_a_nack_is_logged_once_and_counted_each_time(caplog):
    """With the name of the Envoy and its own words."""
    with caplog.at_level(logging.ERROR, "extproc.server"):
        async with serving() as scene:
            for _ in range(2):
                stream = scene.open_sotw()
                await stream.say(CLUSTER, node=core.Node(id="edge-1", extensions=EXTENSIONS))
                answer = await stream.hear()
                await stream.say(
                    CLUSTER,
                    response_nonce=answer.nonce,
                    error_detail=Status(code=13, message="unknown policy"),
                )
                await stream.call.done_writing()
                assert await stream.ended() is grpc.StatusCode.OK
            assert scene.counters.nacks == {"clusters": 2}
    assert caplog.messages == ["xDS: Envoy edge-1 refused clusters: unknown policy"]


@pytest.mark.parametrize("kind", [SotwStream, DeltaStream])
async def test_an_invalid_request_ends_only_its_stream(kind):
    """An unreadable message is a violation of the protocol by the peer."""
    async with serving() as scene:
        stream = await listening(scene)
        broken = kind(scene.channel)
        await broken.call.write(b"\x0a\xff\xff")
        assert await broken.ended() is grpc.StatusCode.INVALID_ARGUMENT
        scene.set_endpoints(SECOND)
        assert addresses(*await stream.take(ASSIGNMENT, "engines")) == [SECOND]


async def test_other_resource_types_are_not_answered():
    """A request for listeners is passed over; the next one is answered."""
    async with serving() as scene:
        stream = scene.open_sotw()
        await stream.say("type.googleapis.com/envoy.config.listener.v3.Listener")
        await stream.say(CLUSTER)
        assert (await stream.hear()).type_url == CLUSTER


async def test_draining_ends_streams_with_ok_and_takes_no_more():
    """Envoy keeps what it holds and asks another picker."""
    async with serving() as scene:
        stream = await listening(scene)
        await scene.discovery.release()
        assert await stream.ended() is grpc.StatusCode.OK
        late = scene.open_sotw()
        assert await late.ended() is grpc.StatusCode.UNAVAILABLE


class XdsWriting:
    """A call that asks once, and whose answer takes as long as the test wants."""

    def __init__(self):
        request = discovery.DiscoveryRequest(type_url=CLUSTER)
        self.requests = [bytes(request)]
        self.writes = asyncio.Event()
        self.written = asyncio.get_running_loop().create_future()

    async def read(self):
        return self.requests.pop() if self.requests else await asyncio.Event().wait()

    async def write(self, _):
        self.writes.set()
        await self.written


async def test_a_write_in_progress_completes_before_the_end():
    """A call of which a write was cancelled is never ended by gRPC."""
    async with serving() as scene:
        call = XdsWriting()
        handler = asyncio.ensure_future(scene.discovery.stream_sotw(None, call))
        await call.writes.wait()
        released = asyncio.ensure_future(scene.discovery.release())
        await asyncio.wait([handler, released], timeout=0.01)
        assert not call.written.cancelled()
        call.written.set_result(None)
        await released
        await handler
        assert scene.counters.streams_open == 0


async def test_a_killed_envoy_leaves_no_stream():
    """A stream that breaks is over, and the others go on."""
    async with serving() as scene:
        stream, killed = await listening(scene), await listening(scene)
        killed.call.cancel()
        while scene.counters.streams_open == 2:
            await asyncio.sleep(0)
        scene.set_endpoints(FIRST)
        assert addresses(*await stream.take(ASSIGNMENT, "engines")) == [FIRST]


async def test_delta_streams_are_served():
    """The incremental form: only what changed, and what is gone by name."""
    async with serving() as scene:
        stream = scene.differences()
        await stream.say(CLUSTER, node=core.Node(id="edge-1", extensions=EXTENSIONS))
        (cluster,) = (await stream.hear()).resources
        assert cluster.name == "engines"
        await stream.say(ASSIGNMENT, resource_names_subscribe=["engines", "gone"])
        answer = await stream.hear()
        assert addresses(answer.resources[0].resource.value) == [FIRST, SECOND]
        assert answer.removed_resources == ["gone"]
        await stream.say(ASSIGNMENT, response_nonce=answer.nonce)
        scene.set_endpoints(SECOND)
        changed = await stream.hear()
        assert addresses(changed.resources[0].resource.value) == [SECOND]
        assert changed.resources[0].version != answer.resources[0].version


async def test_a_stream_that_raises_ends_alone(monkeypatch, caplog):
    """It ends with INTERNAL, what was said is not logged, and the others hear of changes."""
    async with serving() as scene:
        well = await listening(scene)
        real = sessions.SessionCodec.handle_request

        def raising(speaker, data):
            if b"poison" in data:
                raise OverflowError("what an Envoy said")
            return real(speaker, data)

        monkeypatch.setattr(sessions.SessionCodec, "handle_request", raising)
        bad = scene.open_sotw()
        await bad.say(CLUSTER, node=core.Node(id="poison"))
        assert await bad.call.code() is grpc.StatusCode.INTERNAL
        scene.set_endpoints(FIRST)
        assert addresses(*await well.take(ASSIGNMENT, "engines")) == [FIRST]
        assert scene.supervisor.failures["xds"] == 1
        assert scene.counters.streams_open == 1
    assert "what an Envoy said" not in caplog.text


async def test_a_publish_step_that_raises_is_retried(monkeypatch):
    """The loop goes on after a pause, and tells of what changed meanwhile."""
    monkeypatch.setattr(supervision, "FIRST_PAUSE_S", 0.01)
    async with serving() as scene:
        subject = scene.discovery
        real, wrong = subject.step, [2]

        def raising():
            if wrong[0]:
                wrong[0] -= 1
                raise OverflowError
            real()

        subject.step = raising
        await listening(scene)
        assert scene.supervisor.failures["xds"] == 2
        assert scene.supervisor.degraded == []
