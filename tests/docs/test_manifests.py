"""The Kubernetes example holds together with what the program does."""

import re
from pathlib import Path

import yaml

from extproc.config import loader, pools
from extproc.config.settings import ServerSection

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = list(yaml.safe_load_all((ROOT / "manifests/plain.yaml").read_text()))
BY_KIND = {document["kind"]: document for document in DOCUMENTS}


def container():
    return BY_KIND["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def test_the_configuration_is_valid():
    """The ConfigMap holds a file that the strict reader takes."""
    (text,) = BY_KIND["ConfigMap"]["data"].values()
    settings = loader.settings(loader.parse(text, where="plain.yaml"))
    assert pools.parse_entries(settings.pool, where="plain.yaml")[0].host == "vllm-headless"


def test_ports_are_the_defaults():
    """Container and Service ports are the default ports of the program."""
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    server = ServerSection()
    assert ports == {
        "grpc": server.grpc_port,
        "health": server.grpc_health_port,
        "metrics": server.metrics_port,
    }
    served = {port["port"] for port in BY_KIND["Service"]["spec"]["ports"]}
    assert served <= set(ports.values())


def test_probes_ask_the_health_port_for_names_it_answers():
    """Readiness and liveness are asked by name on the plaintext port."""
    for probe, name in (("readinessProbe", "readiness"), ("livenessProbe", "liveness")):
        assert container()[probe]["grpc"] == {
            "port": ServerSection().grpc_health_port,
            "service": name,
        }


def test_the_drain_ends_before_the_pod_is_killed():
    """The grace period is longer than the drain time."""
    spec = BY_KIND["Deployment"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] > ServerSection().drain_timeout_s


def test_arguments_name_the_mounted_file():
    """The file the arguments name is where the ConfigMap is mounted."""
    arguments = container()["args"]
    mount = container()["volumeMounts"][0]["mountPath"]
    (name,) = BY_KIND["ConfigMap"]["data"]
    assert arguments == ["serve", "--config-file", f"{mount}/{name}"]


def test_pages_with_peers_name_the_service_of_the_chart():
    """The Service of the base has another name in the chart, and a copied name would not resolve."""
    pages = [path for path in DOCS.rglob("*.md") if "extproc-peers:9090" in path.read_text()]
    assert pages
    assert [path.name for path in pages if "`RELEASE-extproc-peers" not in path.read_text()] == []


def test_files_to_change_are_listed():
    """The guide for kustomize lists each file with the name of the pool, its label or its port."""
    folder = ROOT / "manifests"
    listed = set(
        re.findall(r"`([a-z/-]+\.yaml)`", (DOCS / "guides/install-kustomize.md").read_text())
    )
    occurs = {
        str(path.relative_to(folder))
        for path in folder.glob("[boc]*/**/*.yaml")
        if not re.search("chart/|cluster-wide", str(path))
        and re.search(r"name=vllm|name: vllm\b|app[=:] ?vllm|\b8000\b", path.read_text())
    }
    routes = {path for path in occurs if path.endswith("/gateway.yaml")}
    assert routes
    assert occurs - routes == listed - {"gateway.yaml", "manifests/plain.yaml"}


def test_errors_of_envoy_are_on_the_page_of_troubleshooting():
    """Each type of error that a shipped Envoy file answers has a row."""
    files = (ROOT / "envoy").glob("*.yaml")
    types = {
        name for file in files for name in re.findall(r"type: ([a-z]+_[a-z_]+)\n", file.read_text())
    }
    assert "no_endpoint" in types
    page = (DOCS / "operations/troubleshooting.md").read_text()
    assert [name for name in types if f"`{name}`, `" not in page] == []
