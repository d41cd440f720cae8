from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.settings import Settings
from extproc.diagnostics import envoy_diagnosis
from extproc.diagnostics.pages import EnvoyPages
from extproc.scrape.client import FetchedPage
from tests.manifests import tools

ROOT = Path(__file__).parents[2]


def page(value):
    return FetchedPage(value.encode() if isinstance(value, str) else json.dumps(value).encode())


def info(version="1.40.0", state="LIVE"):
    return page({"version": f"1a2b/{version}/Clean/RELEASE/BoringSSL", "state": state})


def dump(name="override-host.yaml", change=lambda static: None):
    """A config dump of a shipped file."""
    tree = tools.loaded((ROOT / "envoy" / name).read_text())
    static = tree["static_resources"]
    change(static)
    bootstrap = {
        "@type": "type.googleapis.com/envoy.admin.v3.BootstrapConfigDump",
        "bootstrap": tree,
    }
    return page(
        {
            "configs": [
                bootstrap,
                {"static_listeners": [{"listener": part} for part in static["listeners"]]},
                {"static_clusters": [{"cluster": part} for part in static["clusters"]]},
            ]
        }
    )


def host(port, **health):
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {"address": address, "health_status": {"eds_health_status": "HEALTHY", **health}}


def clusters(pickers=(9002,), failing=(), engines=(8001, 8002), pool="engines", picker="extproc"):
    return page(
        {
            "cluster_statuses": [
                {
                    "name": picker,
                    "host_statuses": [
                        *(host(port) for port in pickers),
                        *(host(port, failed_active_health_check=True) for port in failing),
                    ],
                },
                {"name": pool, "host_statuses": [host(port) for port in engines]},
            ]
        }
    )


GOOD = EnvoyPages(
    url="http://127.0.0.1:9901",
    server_info=info(),
    config_dump=dump(),
    clusters=clusters(),
    stats=page("http.inference.ext_proc.streams_started: 5\n"),
)
ENDPOINTS = ("127.0.0.1:8001", "127.0.0.1:8002")


def findings(pages):
    read = envoy_diagnosis.diagnose(pages, Settings(), endpoints=ENDPOINTS)
    return [
        (result.severity, result.check, result.place)
        for result in read
        if result.severity != "fine"
    ]


def test_an_envoy_in_order_has_no_findings():
    """Its configuration is a shipped file."""
    assert findings(GOOD) == []


ENVOY = "Envoy http://127.0.0.1:9901"
MANAGER = "connection manager inference"
FAULTS = {
    "gone": ({"server_info": FetchedPage(failure="refused")}, ("error", "envoy_reachable", ENVOY)),
    "draining": ({"server_info": info(state="DRAINING")}, ("error", "envoy_state", ENVOY)),
    "old": ({"server_info": info("1.35.9")}, ("error", "envoy_version", ENVOY)),
    "new": ({"server_info": info("1.55.0")}, ("note", "envoy_version", ENVOY)),
    "unknown": (
        {"server_info": page({"state": "LIVE"})},
        ("note", "envoy_version", ENVOY),
    ),
    "locked": ({"config_dump": FetchedPage(failure="status 403")}, ("error", "config_dump", ENVOY)),
    "another server": ({"config_dump": page({"configs": "many"})}, ("error", "ext_proc", ENVOY)),
    "no filter": (
        {"config_dump": dump(change=lambda static: static.update(listeners=[]))},
        ("error", "ext_proc", ENVOY),
    ),
    "no replica": (
        {"clusters": clusters(pickers=())},
        ("error", "picker_hosts", "cluster extproc"),
    ),
    "failing replica": (
        {"clusters": clusters(pickers=(), failing=(9002,))},
        ("error", "picker_hosts", "cluster extproc"),
    ),
    "half of the replicas": (
        {"clusters": clusters(failing=(9003,))},
        ("warning", "picker_hosts", "cluster extproc"),
    ),
    "endpoint missing": (
        {"clusters": clusters(engines=(8001,))},
        ("warning", "endpoints_listed", "cluster engines"),
    ),
    "endpoints missing": (
        {"clusters": clusters(engines=(1, 2))},
        ("error", "endpoints_listed", "cluster engines"),
    ),
    "no selected host": (
        {
            "config_dump": dump(
                change=lambda static: static["clusters"][0]["load_balancing_policy"]["policies"][0][
                    "typed_extension_config"
                ]["typed_config"].pop("selected_host_key")
            )
        },
        ("warning", "selected_host", ENVOY),
    ),
    **{
        counter: (
            {"stats": page(f"http.inference.ext_proc.{counter}: 3\n")},
            (row[0], counter, MANAGER),
        )
        for counter, row in envoy_diagnosis.FILTER_COUNTERS.items()
    },
    "no counters": (
        {"stats": page("cluster.xds-grpc.circuit_breakers.default.rq_open: 0\n")},
        ("note", "counters_recorded", ENVOY),
    ),
    "open": (
        {"stats": page("cluster.extproc.circuit_breakers.default.rq_open: 1\n")},
        ("error", "breakers_open", "cluster extproc"),
    ),
    **{
        f"tripped {kind}": (
            {"stats": page(f"cluster.engines.upstream_rq_{kind}_overflow: 7\n")},
            ("warning", "breakers_tripped", "cluster engines"),
        )
        for kind in ("pending", "active")
    },
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_running_envoy_is_a_finding(name):
    """And nothing else."""
    fields, expected = FAULTS[name]
    assert findings(msgspec.structs.replace(GOOD, **fields)) == [expected]


def test_counters_that_another_service_shares_are_notes():
    """Envoy counts the filters of one connection manager together."""

    def add(static):
        chain = static["listeners"][0]["filter_chains"][0]
        filters = chain["filters"][0]["typed_config"]["http_filters"]
        picker = next(part for part in filters if part["name"].endswith("ext_proc"))
        other = copy.deepcopy(picker) | {"name": "other", "disabled": True}
        other["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = "other"
        filters.insert(0, other)

    stats = page("http.inference.ext_proc.rejected_header_mutations: 3\n")
    pages = msgspec.structs.replace(GOOD, config_dump=dump(change=add), stats=stats)
    assert findings(pages) == [("note", "rejected_header_mutations", MANAGER)]


def test_a_cluster_that_xds_did_not_bring_is_a_finding():
    """Advice is that for the filter, or for the route, unless the cluster is on its way."""
    eds = dump("override-host-eds.yaml")
    warming = json.loads(eds.body)
    cluster = {"@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", "name": "engines"}
    warming["configs"].append({"dynamic_warming_clusters": [{"cluster": cluster}]})
    renamed = clusters(pool="demo")
    for listed, config_dump, severity, place, advice in (
        (clusters(picker="picker"), eds, "error", "cluster extproc", "grpc_service"),
        (renamed, eds, "error", "cluster engines", "pool.name"),
        (renamed, eds, "error", "cluster engines", "reaches its xDS server"),
        (renamed, page(warming), "note", "cluster engines", "wait;"),
    ):
        pages = msgspec.structs.replace(GOOD, config_dump=config_dump, clusters=listed)
        assert findings(pages) == [(severity, "missing_cluster", place)]
        results = envoy_diagnosis.diagnose(pages, Settings(), endpoints=ENDPOINTS)
        (result,) = (result for result in results if result.check == "missing_cluster")
        assert advice in result.fix
    assert findings(msgspec.structs.replace(GOOD, config_dump=eds)) == []


def test_counters_with_names_of_their_own_are_those_of_the_cluster():
    """Istio ends the names of clusters in its statistics with a semicolon."""
    config_dump = dump(change=lambda static: static["clusters"][0].update(alt_stat_name="a|b;"))
    stats = page("cluster.a|b;.circuit_breakers.default.rq_open: 1\n")
    pages = msgspec.structs.replace(GOOD, config_dump=config_dump, stats=stats)
    assert findings(pages) == [("error", "breakers_open", "cluster engines")]


def test_other_clusters_are_left_alone():
    """Their circuit breakers are none of ours."""
    stats = page(
        "cluster.web.circuit_breakers.default.rq_open: 1\n"
        "cluster.extproc.circuit_breakers.default.rq_open: 0\n"
    )
    assert findings(msgspec.structs.replace(GOOD, stats=stats)) == []


def test_the_versions_are_those_of_the_tests():
    """`make versions` runs the end-to-end tests with each of them."""
    line = re.search(r"^ENVOY_VERSIONS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    versions = [tuple(map(int, version.split(".")[:2])) for version in line[1].split()]
    assert min(versions) == envoy_diagnosis.OLDEST_VERSION
    assert max(versions) == envoy_diagnosis.NEWEST_VERSION


def mutated(tree, path, value):
    """A tree with another value somewhere."""
    tree = copy.deepcopy(tree)
    node = tree
    for step in path[:-1]:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = list(keys)[step % len(keys)] if keys else None
        if key is None or not isinstance(node[key], (dict, list)) or not node[key]:
            break
        node = node[key]
    keys = sorted(node) if isinstance(node, dict) else range(len(node))
    node[list(keys)[path[-1] % len(keys)]] = value
    return tree


DUMP = json.loads(GOOD.config_dump.body)
CLUSTERS = json.loads(GOOD.clusters.body)
VALUES = st.sampled_from([None, 0, True, "", "x", [], {}, [[]], [None], {"a": None}, "9" * 5000])


@given(path=st.lists(st.integers(0, 50), min_size=1, max_size=14), value=VALUES)
def test_any_form_is_judged(path, value):
    """A page of no Envoy, or of another version, is a finding and not a traceback."""
    for pages in (
        {"config_dump": page(mutated(DUMP, path, value))},
        {"clusters": page(mutated(CLUSTERS, path, value))},
    ):
        findings(msgspec.structs.replace(GOOD, **pages))
