"""`extproc doctor` against real Envoys: shipped files without errors, staged faults named."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import signal
import sys

import pytest

from extproc.config.settings import Settings
from extproc.demo import stack
from extproc.diagnostics import collector, envoy_diagnosis
from tests.e2e import installation
from tests.manifests import tools
from tests.support.canary import CANARY

FILES = sorted(path.name for path in installation.SHIPPED.glob("*.yaml"))


async def examine(fixture, *arguments):
    """Findings by check, and exit status, of the command line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc", "doctor", "--format", "json", "--timeout", "30"),
        *("--envoy", f"127.0.0.1:{fixture.ports.admin}", "--server", f"127.0.0.1:{fixture.pages}"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert CANARY.encode() not in output
    result = json.loads(output)
    assert result["ok"] is (process.returncode == 0)
    return result["findings"], process.returncode


@contextlib.asynccontextmanager
async def installed(*endpoints, template):
    """An installation of a shipped file; one replica of extproc serves xDS where it is asked for."""
    arguments = ["--config-text", installation.UNSCRAPED]
    xds_port = stack.free_port()
    if stack.asks_for_xds(installation.SHIPPED / template):
        arguments += ["--fallback-endpoints", "1", "--xds", "--xds-port", str(xds_port)]

    async with installation.installed(
        *endpoints,
        template=template,
        plaintext=False,
        arguments=arguments,
        change=installation.name_xds_server(xds_port),
    ) as fixture:
        if stack.asks_for_xds(installation.SHIPPED / template):
            await fixture.until_stats(lambda stats: "cluster.engines.membership_total" in stats)
        yield fixture


@pytest.mark.parametrize("template", installation.first_and_slow(FILES))
async def test_a_shipped_file_has_no_errors(template):
    """Envoy's own dump of the file is judged as the file is; engines that are there are read."""
    async with stack.stack() as engines:
        _, address = await engines.engine()
        async with installed(address, template=template) as fixture:
            findings, status = await examine(fixture)
            wrong = [result for result in findings if result["severity"] in ("error", "warning")]
            assert [result["check"] for result in wrong if result["check"] != "metrics_time"] == []
            checks = {result["check"] for result in findings}
            assert checks >= {"envoy_version", "picker_hosts", "picker_ready", "prefix_caching"}
            assert status == 0


async def test_settings_of_a_running_picker_are_compared():
    """They are those of its flags, and flags of doctor beat them."""
    async with installation.installed("127.0.0.1:1", plaintext=True) as fixture:
        findings, _ = await examine(fixture)
        assert "picker_tls" not in [entry["check"] for entry in findings]
        for arguments in (["--secure-serving", "true"], ["--config-text", installation.UNSCRAPED]):
            findings, _ = await examine(fixture, *arguments)
            (result,) = [entry for entry in findings if entry["check"] == "picker_tls"]
            assert result["severity"] == "warning"


@pytest.mark.slow
async def test_a_picker_that_is_gone_is_an_error():
    """Envoy says that no replica is healthy, and the picker does not answer itself."""
    async with installed("127.0.0.1:1", template="original-dst-buffered.yaml") as fixture:
        await fixture.extproc.stop(signal.SIGKILL)
        await fixture.until_stats(lambda stats: "cluster.extproc.membership_healthy" not in stats)
        findings, status = await examine(fixture)
        errors = [result["check"] for result in findings if result["severity"] == "error"]
        assert sorted(errors) == ["picker_hosts", "picker_reachable"]
        assert status == 1
        await fixture.start_extproc()


@pytest.mark.slow
async def test_an_endpoint_that_envoy_lacks_is_an_error():
    """Endpoints stand in two places with the override-host profile."""
    async with installation.installed(
        "127.0.0.1:1", template="override-host.yaml", listed=["127.0.0.1:9"]
    ) as fixture:
        findings, _ = await examine(fixture)
        (result,) = [entry for entry in findings if entry["check"] == "endpoints_listed"]
        assert (result["severity"], result["place"]) == ("error", "cluster engines")
        assert "127.0.0.1:1" in result["got"]


def manager(tree):
    return installation.manager(tree)


def processor(tree):
    return installation.processor(tree)


def route(tree):
    return manager(tree)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]


def cluster(tree, name):
    return installation.cluster(tree, name)


def listener(tree):
    return tree["static_resources"]["listeners"][0]


def mutations(tree):
    filters = manager(tree)["http_filters"]
    return next(entry for entry in filters if entry["name"].endswith("header_mutation"))[
        "typed_config"
    ]["mutations"]["request_mutations"]


_BUFFER = {
    "name": "buffer",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer",
        "max_request_bytes": 1000,
    },
}

#: Check to the severity and to what stages it in original-dst-buffered.yaml. What Envoy refuses to
#: start with is not here: it is staged in files, by the tests of the lint.
FAULTS = {
    "stream_idle_timeout": ("warning", lambda tree: manager(tree).pop("stream_idle_timeout")),
    "max_stream_duration": (
        "warning",
        lambda tree: manager(tree).update(
            common_http_protocol_options={"max_stream_duration": "600s"}
        ),
    ),
    "message_timeout": ("warning", lambda tree: processor(tree).pop("message_timeout")),
    "request_headers_timeout": (
        "warning",
        lambda tree: manager(tree).pop("request_headers_timeout"),
    ),
    "request_timeout": ("warning", lambda tree: manager(tree).pop("request_timeout")),
    "steering_headers": (
        "warning",
        lambda tree: mutations(tree).remove({"remove": "x-gateway-destination-endpoint"}),
    ),
    "route_timeout": ("error", lambda tree: route(tree).pop("timeout")),
    "route_stream_duration": (
        "warning",
        lambda tree: route(tree).update(max_stream_duration={"max_stream_duration": "60s"}),
    ),
    "local_replies": ("note", lambda tree: manager(tree).pop("local_reply_config")),
    "access_log": ("note", lambda tree: manager(tree).pop("access_log")),
    "grpc_timeout": (
        "error",
        lambda tree: processor(tree)["grpc_service"].update(timeout="10s"),
    ),
    "metadata": ("note", lambda tree: processor(tree).pop("metadata_options")),
    "allow_mode_override": ("note", lambda tree: processor(tree).pop("allow_mode_override")),
    "request_header_mode": (
        "error",
        lambda tree: processor(tree)["processing_mode"].update(request_header_mode="SKIP"),
    ),
    "request_body_mode": (
        "warning",
        lambda tree: processor(tree)["processing_mode"].update(request_body_mode="NONE"),
    ),
    "response_header_mode": (
        "warning",
        lambda tree: processor(tree)["processing_mode"].update(response_header_mode="SKIP"),
    ),
    "response_trailers": (
        "warning",
        lambda tree: processor(tree)["processing_mode"].update(response_trailer_mode="SKIP"),
    ),
    "failure_mode_allow": (
        "warning",
        lambda tree: (
            processor(tree)["processing_mode"].update(
                request_body_mode="FULL_DUPLEX_STREAMED", request_trailer_mode="SEND"
            ),
            route(tree).pop("retry_policy", None),
        ),
    ),
    "duplex_retries": (
        "warning",
        lambda tree: (
            processor(tree)["processing_mode"].update(
                request_body_mode="FULL_DUPLEX_STREAMED", request_trailer_mode="SEND"
            ),
            processor(tree).pop("failure_mode_allow"),
            route(tree).update(retry_policy={"retry_on": "reset"}),
        ),
    ),
    "mutation_rules": (
        "error",
        lambda tree: processor(tree).update(mutation_rules={"disallow_all": True}),
    ),
    "max_request_bytes": (
        "warning",
        lambda tree: manager(tree)["http_filters"].insert(0, copy.deepcopy(_BUFFER)),
    ),
    "buffer_limit": (
        "warning",
        lambda tree: listener(tree).pop("per_connection_buffer_limit_bytes"),
    ),
    "http2_window": (
        "warning",
        lambda tree: manager(tree).pop("http2_protocol_options"),
    ),
    "message_bytes": (
        "error",
        lambda tree: listener(tree).update(per_connection_buffer_limit_bytes=1 << 30),
    ),
    "picker_breakers": (
        "warning",
        lambda tree: cluster(tree, "extproc").pop("circuit_breakers"),
    ),
    "http2": (
        "error",
        lambda tree: (
            cluster(tree, "extproc").pop("typed_extension_protocol_options"),
            cluster(tree, "extproc").pop("health_checks"),
        ),
    ),
    "picker_health": ("note", lambda tree: cluster(tree, "extproc").pop("health_checks")),
    "destination": (
        "error",
        lambda tree: cluster(tree, "engines")["original_dst_lb_config"].update(
            http_header_name="x-other"
        ),
    ),
    "engine_breakers": (
        "warning",
        lambda tree: cluster(tree, "engines").pop("circuit_breakers"),
    ),
    "upstream_idle_timeout": (
        "warning",
        lambda tree: cluster(tree, "engines").pop("typed_extension_protocol_options"),
    ),
}


def rename(tree, name):
    """Give the listener, the connection manager and the clusters of a file names of their own."""
    text = json.dumps(tree)
    for part in ("extproc", "engines"):
        text = text.replace(f'"cluster_name": "{part}"', f'"cluster_name": "{part}-{name}"')
        text = text.replace(f'"cluster": "{part}"', f'"cluster": "{part}-{name}"')
        text = text.replace(f'"name": "{part}"', f'"name": "{part}-{name}"')
    renamed = json.loads(text)
    listener(renamed)["name"] = f"listener-{name}"
    manager(renamed)["stat_prefix"] = name
    return renamed


def stage():
    """Configuration of an Envoy with a listener for every fault, and of none."""
    template = tools.loaded((installation.SHIPPED / "original-dst-buffered.yaml").read_text())
    bootstrap = {
        "admin": {
            "address": {"socket_address": {"address": "127.0.0.1", "port_value": stack.free_port()}}
        },
        "static_resources": {"listeners": [], "clusters": []},
    }
    for name, change in {
        "none": lambda _: None,
        **{key: row[1] for key, row in FAULTS.items()},
    }.items():
        tree = copy.deepcopy(template)
        change(tree)
        tree = rename(tree, name)
        address = listener(tree)["address"]["socket_address"]
        address.update(address="127.0.0.1", port_value=stack.free_port())
        bootstrap["static_resources"]["listeners"] += tree["static_resources"]["listeners"]
        bootstrap["static_resources"]["clusters"] += tree["static_resources"]["clusters"]
    return bootstrap


async def test_every_staged_fault_is_named():
    """One Envoy with a listener for each fault: the dump shows it, with severity and fix."""
    bootstrap = stage()
    port = bootstrap["admin"]["address"]["socket_address"]["port_value"]
    async with stack.stack() as children:
        await children.envoy(bootstrap)
        reader = collector.Collector(Settings(), timeout_s=30)
        url = collector.parse_url(f"127.0.0.1:{port}", where="--envoy", port=port)
        pages = await reader.collect(envoy=url, picker=None)
    by_fault = {}
    for result in envoy_diagnosis.diagnose(pages.envoy, Settings(), endpoints=()):
        if result.severity != "fine" and result.check != "picker_hosts":
            for name in FAULTS:
                words = result.place.replace(",", " ").split()
                if {name, f"extproc-{name}", f"engines-{name}", f"listener-{name}"} & set(words):
                    by_fault.setdefault(name, []).append(result)
            assert "none" not in result.place, result
    assert set(by_fault) == set(FAULTS)
    for name, (severity, _) in FAULTS.items():
        (result,) = [result for result in by_fault[name] if result.check == name]
        assert result.severity.replace("cut", "error") == severity
        assert result.wanted
        assert result.fix
        others = [other for other in by_fault[name] if other is not result]
        # gRPC health checks need HTTP/2 as well, so both go.
        assert [other.check for other in others] == (["picker_health"] if name == "http2" else [])
    assert collector.diagnose(pages, Settings()).status == 1
