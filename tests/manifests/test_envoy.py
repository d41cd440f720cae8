"""The Envoy configurations of the overlays, as the real Envoy and the overlays see them."""

import subprocess

import pytest

from extproc.demo import stack
from extproc.xds import resources
from tests.manifests import envoy_files, parts, tools


@pytest.fixture(params=envoy_files.FILES)
def overlay(request):
    return request.param


@pytest.fixture
def config(overlay):
    return tools.loaded(envoy_files.path(overlay).read_text())


def test_envoy_accepts_the_files(overlay):
    """`envoy --mode validate` has nothing against them."""
    command = [stack.find_envoy(), "--mode", "validate", "-c", str(envoy_files.path(overlay))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "deprecated" not in done.stderr


SHIPPED = sorted(envoy_files.SHIPPED.glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_envoy_accepts_the_block_of_traces(path, tmp_path):
    """With what `sed` turns on, Envoy has a tracer and the cluster it exports to."""
    changed = tmp_path / "envoy.yaml"
    changed.write_text(envoy_files.with_traces(path.read_text()))
    command = [stack.find_envoy(), "--mode", "validate", "-c", str(changed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    config = tools.loaded(changed.read_text())
    names = [cluster["name"] for cluster in config["static_resources"]["clusters"]]
    assert names[-1] == "traces"


def test_sed_turns_traces_on():
    """The command in the files does what the test does."""
    text = SHIPPED[0].read_text()
    done = subprocess.run(
        ["sed", "s/#- //"], input=text, capture_output=True, text=True, check=True
    )
    assert tools.loaded(done.stdout) == tools.loaded(envoy_files.with_traces(text))


def test_overlays_mount_the_envoy_files(overlay, config):
    """The file reaches the container that reads it, whose port is the listener's."""
    documents = tools.kustomized(tools.MANIFESTS / "overlays" / overlay)
    ((pod, container),) = [
        (pod, item)
        for pod in parts.pods(documents)
        for item in pod["containers"]
        if item["name"] == "envoy"
    ]
    path = container["args"][container["args"].index("-c") + 1]
    assert tools.loaded(parts.mounted(documents, pod, container, path)) == config
    (listener,) = config["static_resources"]["listeners"]
    assert parts.ports(container)["http"] == listener["address"]["socket_address"]["port_value"]


def test_ext_proc_clusters_point_at_the_picker(overlay, config):
    """Addresses of pickers are loopback in the same pod, else a headless Service with that port."""
    documents = tools.kustomized(tools.MANIFESTS / "overlays" / overlay)
    service = parts.only(documents, "Service", "extproc")["spec"]
    for cluster in config["static_resources"]["clusters"]:
        for group in cluster.get("load_assignment", {}).get("endpoints", ()):
            for item in group["lb_endpoints"]:
                address = item["endpoint"]["address"]["socket_address"]
                if overlay == "envoy-sidecar":
                    assert address == {"address": "127.0.0.1", "port_value": 9002}
                    continue
                assert address["address"] == "extproc"
                assert service["clusterIP"] == "None"
                assert address["port_value"] in {port["port"] for port in service["ports"]}


def test_overlays_use_shipped_envoy_files():
    """No overlay has an Envoy configuration of its own making."""
    result = {path.parent.name for path in envoy_files.OVERLAYS.glob("*/envoy.yaml")}
    assert result == set(envoy_files.FILES)


def test_envoy_routes_to_the_xds_cluster():
    """Over xDS the engines are a cluster with the name of the pool, which the route names."""
    overlay = tools.MANIFESTS / "overlays/envoy-xds"
    documents = tools.kustomized(overlay)
    ((pod, container),) = parts.pickers(documents)
    settings = parts.resolved(documents, pod, container)
    assert settings.xds.enabled
    assert settings.scheduling.fallbacks > 0
    config = tools.loaded((overlay / "envoy.yaml").read_text())
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    (host,) = manager["typed_config"]["route_config"]["virtual_hosts"]
    (route,) = host["routes"]
    assert route["route"]["cluster"] == (settings.pool.name or resources.UNNAMED)
