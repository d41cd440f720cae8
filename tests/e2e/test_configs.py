"""The shipped Envoy configurations: what they must hold, and that Envoy takes them."""

from __future__ import annotations

import asyncio
import re

import betterproto2
import pytest

from extproc.demo import stack
from extproc.protocol.headers import SIDECAR_HEADERS
from extproc.xds import snapshot_cache
from extproc.xds.resources import ClusterOptions
from tests.e2e import installation
from tests.manifests import tools
from tests.support import xds_peer

CONFIGS = sorted(installation.SHIPPED.glob("*.yaml"))

#: Request headers that only gateways and extproc may set.
CONTROL = {
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    "test-epp-endpoint-selection",
}

#: Request headers that only clients or gateways that are trusted may set.
TURNS = {
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
    "x-llm-d-slo-ttft-ms",
    "x-slo-ttft-ms",
}


@pytest.fixture(params=CONFIGS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def config(path):
    return tools.loaded(path.read_text())


def seconds(text):
    match = re.fullmatch(r"(\d+(?:\.\d+)?)s", text)
    assert match, text
    return float(match[1])


def engines(config):
    """The engines' cluster: of the file, or what extproc serves for it, read with Envoy's types."""
    if "dynamic_resources" not in config:
        return installation.cluster(config, "engines")
    served = xds_peer.clusters.Cluster.parse(
        snapshot_cache.encode_cluster("engines", ClusterOptions(), h2c=False)
    )
    return served.to_dict(casing=betterproto2.Casing.SNAKE)


def pickers(config):
    """The clusters of pickers."""
    return [
        item
        for item in config["static_resources"]["clusters"]
        if item["name"].partition("-")[0] == "extproc"
    ]


def route(config):
    (host,) = installation.manager(config)["route_config"]["virtual_hosts"]
    (only,) = host["routes"]
    return only["route"]


async def test_envoy_accepts_the_file(path, binary):
    """Envoy accepts the file as it is shipped."""
    words = ["--mode", "validate", "-c", str(path)]
    if binary and path.name == "override-host.yaml":
        # Envoy before 1.38 does not know selected_host_key, and goes on without it.
        words.append("--allow-unknown-static-fields")
    process = await asyncio.create_subprocess_exec(
        *(binary or stack.find_envoy(), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    message, _ = await process.communicate()
    text = message.decode()
    assert process.returncode == 0, text
    assert "deprecated" not in text.lower()


def test_126_duplex_sends_trailers(config):
    """A direction in FULL_DUPLEX_STREAMED sends its trailers; the stream ends with the answer."""
    mode = installation.processor(config)["processing_mode"]
    for direction in ("request", "response"):
        if mode[f"{direction}_body_mode"] == "FULL_DUPLEX_STREAMED":
            assert mode[f"{direction}_trailer_mode"] == "SEND"
    assert mode["response_trailer_mode"] == "SEND"


def test_126_duplex_does_not_retry(config):
    """With retries, Envoy sends a duplex body that ends with trailers twice (issue 45470)."""
    mode = installation.processor(config)["processing_mode"]
    duplex = mode["request_body_mode"] == "FULL_DUPLEX_STREAMED"
    assert duplex != ("retry_policy" in route(config))


def test_http2_streams_buffer_as_much_as_connections(config):
    """HTTP/2 has the limit of HTTP/1 if Envoy buffers bodies, and no body takes a whole connection."""
    if installation.processor(config)["processing_mode"]["request_body_mode"] == "BUFFERED":
        (listener,) = config["static_resources"]["listeners"]
        options = installation.manager(config)["http2_protocol_options"]
        window_bytes = options["initial_stream_window_size"]
        assert window_bytes == listener["per_connection_buffer_limit_bytes"]
        assert options["initial_connection_window_size"] > window_bytes


def test_127_metadata_crosses(config):
    """Subset hints and the served endpoint come in, the destination goes out."""
    options = installation.processor(config)["metadata_options"]
    forwarded = set(options["forwarding_namespaces"]["untyped"])
    assert forwarded == {"envoy.lb", "envoy.lb.subset_hint"}
    assert options["receiving_namespaces"]["untyped"] == ["envoy.lb", "extproc"]


def test_128_cluster_reads_the_destination(config):
    """The engines' cluster takes the endpoint from extproc's header."""
    cluster = engines(config)
    if cluster["type"] == "ORIGINAL_DST":
        original = cluster["original_dst_lb_config"]
        assert original["use_http_header"] is True
        assert original["http_header_name"] == "x-gateway-destination-endpoint"
        assert cluster["lb_policy"] == "CLUSTER_PROVIDED"
    else:
        (policy,) = cluster["load_balancing_policy"]["policies"]
        override = policy["typed_extension_config"]["typed_config"]
        assert {"header": "x-gateway-destination-endpoint"} in override["override_host_sources"]
        assert override["fallback_policy"]["policies"]


def test_129_fails_open_only_where_it_can(config):
    """Envoy goes on without extproc but where a piece of a body may have been sent to it."""
    filter_ = installation.processor(config)
    buffered = filter_["processing_mode"]["request_body_mode"] == "BUFFERED"
    assert filter_["failure_mode_allow"] is buffered


def test_130_clients_cannot_steer(config):
    """Control headers of clients are removed before extproc sees the request."""
    filters = installation.manager(config)["http_filters"]
    names = [item["name"].rpartition(".")[2] for item in filters]
    assert names.index("header_mutation") < names.index("ext_proc") < names.index("router")
    mutations = filters[names.index("header_mutation")]["typed_config"]["mutations"]
    removed = [mutation["remove"] for mutation in mutations["request_mutations"]]
    assert sorted(removed) == sorted(CONTROL | TURNS | SIDECAR_HEADERS)


def test_131_health_check_asks_what_is_registered(config):
    """Health checks ask the ports that are used, for a name that is answered there."""
    assert pickers(config)
    for cluster in pickers(config):
        (check,) = cluster["health_checks"]
        name = check["grpc_health_check"]["service_name"]
        assert name == "envoy.service.ext_proc.v3.ExternalProcessor"


def test_132_streams_are_not_cut(config):
    """No time-out on the way is shorter than a long stream."""
    assert route(config)["timeout"] == "0s"
    assert seconds(installation.manager(config)["stream_idle_timeout"]) >= 300
    assert seconds(installation.processor(config)["message_timeout"]) >= 300


def test_stalled_requests_end(config):
    """A client cannot keep a connection by never ending its headers or its body."""
    manager = installation.manager(config)
    assert 0 < seconds(manager["request_headers_timeout"]) <= 10
    assert 60 <= seconds(manager["request_timeout"]) <= 600


def test_engines_close_after_envoy(config):
    """Envoy leaves idle connections before vLLM closes them after 5 seconds."""
    options = engines(config)["typed_extension_protocol_options"]
    (http,) = options.values()
    assert 0 < seconds(http["common_http_protocol_options"]["idle_timeout"]) < 5


def test_circuit_breakers_allow_retries(config):
    """With retries, an engine that is dead under load must not use up the default of 3 retries."""
    (limits,) = engines(config)["circuit_breakers"]["thresholds"]
    if "retry_policy" in route(config):
        assert limits["max_retries"] >= limits["max_requests"]


def test_xds_cluster_points_at_extproc(config):
    """The route's cluster is one that extproc serves, and a lost stream is soon opened again."""
    if "dynamic_resources" not in config:
        return
    ads = config["dynamic_resources"]["ads_config"]
    assert ads["set_node_on_first_message_only"] is True
    (service,) = ads["grpc_services"]
    requested = installation.cluster(config, service["envoy_grpc"]["cluster_name"])
    assert requested["name"] == "extproc-xds"
    assert seconds(service["envoy_grpc"]["retry_policy"]["retry_back_off"]["max_interval"]) <= 1
    assert config["dynamic_resources"]["cds_config"]["ads"] == {}
    assert config["node"]["id"]
    assert route(config)["cluster"] == engines(config)["name"]
    for cluster in pickers(config):
        (group,) = cluster["load_assignment"]["endpoints"]
        assert len(group["lb_endpoints"]) == 2
