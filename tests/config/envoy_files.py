"""Shipped Envoy files, the places in them that tests change, and what is reported of them."""

from __future__ import annotations

from pathlib import Path

from extproc.config import envoy_lint, settings
from extproc.config.settings import FlowControlSection
from tests.manifests import tools

ENVOY = Path(__file__).parents[2] / "envoy"
SHIPPED = sorted(ENVOY.glob("*.yaml"))
USAGE_MODES = {
    "request_trailer_mode": "SKIP",
    "response_header_mode": "SEND",
    "response_body_mode": "BUFFERED",
    "response_trailer_mode": "SEND",
}
HOLDING = settings.Settings(flow_control=FlowControlSection(enabled=True))


def load(name="original-dst-buffered.yaml"):
    return tools.loaded((ENVOY / name).read_text())


def manager(tree):
    chain = tree["static_resources"]["listeners"][0]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]


def processor(tree):
    filters = manager(tree)["http_filters"]
    return next(entry for entry in filters if entry["name"].endswith("ext_proc"))["typed_config"]


def host(tree):
    return manager(tree)["route_config"]["virtual_hosts"][0]


def route(tree):
    return host(tree)["routes"][0]["route"]


def cluster(tree, name):
    return next(
        cluster for cluster in tree["static_resources"]["clusters"] if cluster["name"] == name
    )


def http_options(tree, name):
    (options,) = cluster(tree, name)["typed_extension_protocol_options"].values()
    return options


def mutations(tree):
    """Header mutations of the shipped files before the picker."""
    filters = manager(tree)["http_filters"]
    mutation = next(
        mutation for mutation in filters if mutation["name"].endswith("header_mutation")
    )
    return mutation["typed_config"]["mutations"]["request_mutations"]


def findings(tree, configured=HOLDING):
    return [
        finding
        for finding in envoy_lint.read(tree, configured, where="envoy.yaml")
        if finding.severity not in ("fine", "note")
    ]


def read(tree, configured):
    return list(envoy_lint.read(tree, configured, where="envoy.yaml"))


def notes(tree):
    return {finding.check for finding in read(tree, HOLDING) if finding.severity == "note"}


def without(owner, key):
    del owner[key]


def disable_filter(added):
    added["typed_per_filter_config"] = {
        "envoy.filters.http.ext_proc": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "disabled": True,
        }
    }
