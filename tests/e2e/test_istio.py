"""The configuration that Istio generated for the overlay, through a real Envoy."""

from __future__ import annotations

import copy
import json
import signal
from pathlib import Path

import pytest

from extproc.config import envoy_lint
from extproc.config.settings import Settings
from extproc.demo import stack
from tests.e2e import backend, http1, installation
from tests.e2e.test_override_host import ROUND_ROBIN
from tests.manifests import tools

GENERATED = Path(__file__).parent / "istio.yaml"
FILTER = tools.MANIFESTS / "overlays/istio/envoyfilter.yaml"
PICKER = "outbound|9002||extproc.models.svc.cluster.local"
PATH = "/v1/chat/completions"
#: With request ids on responses from extproc, as in the manifests, and from Envoy.
CONFIG = ROUND_ROBIN.removesuffix("}") + ", responses: {request_id: true}}"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()


def to_static():
    """The resources of Istio as a file, with the EnvoyFilter of the overlay applied."""
    generated = tools.loaded(GENERATED.read_text())
    config = {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {
            "listeners": [generated["listener"]],
            "clusters": generated["clusters"],
        },
    }
    manager = installation.manager(config)
    del manager["rds"]
    manager["route_config"] = generated["route_config"]
    first, merged = (
        entry["patch"]["value"]
        for entry in tools.loaded(FILTER.read_text())["spec"]["configPatches"]
    )
    manager["http_filters"].insert(0, first)
    manager.update(copy.deepcopy(merged["typed_config"]))
    for cluster in generated["clusters"]:
        del cluster["eds_cluster_config"]
        cluster.update(type="STATIC", load_assignment={})
    return config


def route(config):
    (host,) = installation.manager(config)["route_config"]["virtual_hosts"]
    return host["routes"][0]


def installed(folder, *endpoints, change=lambda config: None):
    """An installation with that file; the cluster of extproc gets its address by a short name."""
    config = to_static()
    installation.cluster(config, PICKER)["name"] = "extproc"
    path = folder / "istio.json"
    path.write_text(json.dumps(config))

    def restore(config):
        installation.cluster(config, "extproc")["name"] = PICKER
        change(config)

    return installation.installed(
        *endpoints,
        template=str(path),
        plaintext=False,
        change=restore,
        arguments=["--config-text", CONFIG, "--fallback-endpoints", "2"],
    )


@pytest.fixture(scope="module")
def dead():
    return f"127.0.0.1:{stack.free_port()}"


@pytest.fixture(scope="module")
def place(live, served, dead, tmp_path_factory):
    folder = tmp_path_factory.mktemp("istio")
    with live.holding(installed(folder, dead, served.address)) as item:
        yield item


async def test_bodies_pass_and_usage_is_read(place, served):
    """A large request and its answer arrive whole; extproc sees both, and clients steer nothing."""
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    served.plays[PATH] = backend.saying(
        json.dumps({"id": "a", "choices": [], "usage": usage}).encode(),
        headers=[("content-type", "application/json")],
    )
    for body in (CHAT, CHAT.replace(b"hello", b"x" * (1 << 19))):
        answer = await http1.ask(
            place.port, PATH, body, headers=[("x-gateway-destination-endpoint", "127.0.0.1:9")]
        )
        assert answer.status == 200
        assert answer.json()["usage"] == usage
        assert served.asks[-1].size == len(body)
        assert served.address in served.asks[-1].head.get("x-gateway-destination-endpoint")
    await place.until(
        lambda result: (
            sum(value for name, value in result.items() if "extproc_usage_tokens_total" in name)
            >= 14
        )
    )


async def test_a_dead_engine_is_retried_at_the_next_one(place, served, dead):
    """Istio's own retry policy follows the list of extproc, which learns which engine answered."""
    for _ in range(4):
        assert (await http1.ask(place.port, "/v1/models")).status == 200
    entry = await place.access(path="/v1/models", attempts=2)
    assert entry["picked"] == f"{dead},{served.address}"
    assert entry["endpoint"] == served.address


async def test_a_body_above_the_buffer_of_envoy_passes_or_fails_as_json(place, served):
    """Istio leaves the buffer at 1 MiB: what is larger is whole where it passes a living engine.

    A dead engine may fail it. Envoy sends it to the next engine only if the connection fails before the
    buffer is full, which depends on how fast the body comes.
    """
    body = CHAT.replace(b"hello", b"x" * (1 << 20))
    answers = [await http1.ask(place.port, "/upload", body) for _ in range(4)]
    sizes = [answer.json().get("bytes") for answer in answers if answer.status == 200]
    assert set(sizes) == {len(body)}
    errors = {
        (answer.status, answer.json()["error"]["type"])
        for answer in answers
        if answer.status != 200
    }
    # Either the connection failed with the body in the buffer, or the body outgrew it meanwhile.
    assert errors <= {(503, "model_server_unavailable"), (507, "request_ended_by_envoy")}


async def test_a_response_has_the_request_id_once(place):
    """Though Envoy and extproc both add it."""
    answer = await http1.ask(place.port, PATH, CHAT, headers=[("x-request-id", "both")])
    assert answer.status == 200
    assert answer.head.all("x-request-id") == ["both"]


async def test_a_refusal_of_extproc_is_json(place):
    """With the request id of the client."""
    answer = await http1.ask(place.port, PATH, b"{", headers=[("x-request-id", "own")])
    assert answer.status == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.head.get("x-request-id") == "own"


async def test_without_extproc_errors_are_json(place):
    """FailClose: the EnvoyFilter of the overlay writes the body."""
    await place.settled()
    await place.extproc.stop(signal.SIGKILL)
    answer = await http1.ask(place.port, PATH, CHAT)
    assert answer.status == 500
    assert answer.json()["error"]["type"] == "endpoint_picker_unavailable"
    await place.start_extproc()


#: Of a request whose head and body are sent in one write.
HEADERS = [http1.AUTHORIZATION, ("content-length", str(len(CHAT)))]


@pytest.mark.parametrize(("is_listed", "status"), [(False, 200), (True, 500)])
async def test_failing_open_needs_a_cluster_without_replicas(served, tmp_path, is_listed, status):
    """FailOpen: a body that is on its way to a dead replica is lost, one that never left is not."""

    def fail_open(config):
        (filter_config,) = route(config)["typed_per_filter_config"].values()
        filter_config["overrides"]["failure_mode_allow"] = True
        if not is_listed:
            installation.cluster(config, PICKER)["load_assignment"]["endpoints"] = []

    async with installed(tmp_path, served.address, change=fail_open) as fixture:
        await fixture.extproc.stop(signal.SIGKILL)
        async with http1.calling(fixture.port) as call:
            # Envoy must have the body before it knows that the connection to the replica failed.
            await call.start("POST", PATH, HEADERS, body=CHAT)
            assert (await call.answer()).status == status
        assert (await http1.ask(fixture.port, "/v1/models")).status == 200
        await fixture.start_extproc()


def test_the_lint_knows_the_configuration():
    """Retries are Istio's default; Gateway API has no field for the other two."""
    results = envoy_lint.read(to_static(), Settings(), where="istio.yaml")
    assert {(item.severity, item.check) for item in results if item.severity != "fine"} == {
        ("warning", "duplex_retries"),
        ("note", "http2_keepalive"),
        ("note", "picker_health"),
    }
