from __future__ import annotations

import copy
import json
import re

import pytest

from extproc.cli import main
from extproc.config import envoy_lint, envoy_tree
from tests.config.envoy_files import (
    HOLDING,
    cluster,
    findings,
    host,
    http_options,
    load,
    manager,
    mutations,
    notes,
    processor,
    route,
)

EXT_PROC = "envoy.filters.http.ext_proc"
PER_ROUTE = {
    "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
}
FILTER_CONFIG = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig"}


def checks(tree):
    return [result.check for result in findings(tree)]


def http_filter(tree, name):
    filters = manager(tree)["http_filters"]
    return next(entry for entry in filters if entry["name"].endswith(name))


def test_routes_without_ext_proc_are_left_alone():
    """Their limits cut no answer of an engine."""
    tree = load()
    routes = manager(tree)["route_config"]["virtual_hosts"][0]["routes"]
    extra = copy.deepcopy(routes[0])
    extra["route"]["timeout"] = "1s"
    routes.insert(0, extra)
    assert [result.check for result in findings(tree)] == ["route_timeout"]
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    off = {"@type": kind, "disabled": True}
    extra["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": off}
    assert findings(tree) == []


def test_overrides_of_routes_are_read():
    """Gateways add a filter that sees nothing, and let routes say what it is for."""
    tree = load()
    config = processor(tree)
    wanted = {**config["processing_mode"], "request_body_mode": "NONE"}
    config["processing_mode"] = {
        "request_header_mode": "SKIP",
        "response_header_mode": "SKIP",
        "response_trailer_mode": "SKIP",
    }
    route_entry = manager(tree)["route_config"]["virtual_hosts"][0]["routes"][0]
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    override = {"@type": kind, "overrides": {"processing_mode": wanted}}
    route_entry["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": override}
    assert [result.check for result in findings(tree)] == ["request_body_mode"]


def test_early_header_mutation_counts_as_removal():
    """Envoy has a second place where headers are removed before any filter."""
    tree = load()
    wanted = [*mutations(tree)]
    mutations(tree).clear()
    kind = "early_header_mutation.header_mutation.v3.HeaderMutation"
    config = {"@type": f"type.googleapis.com/envoy.extensions.http.{kind}", "mutations": wanted}
    manager(tree)["early_header_mutation_extensions"] = [{"name": "early", "typed_config": config}]
    assert findings(tree) == []


def test_references_of_a_dump_are_followed():
    """Routes of RDS and filters of ECDS stand apart; what waits to be in force does not count."""
    tree = load()
    static = tree["static_resources"]
    own = manager(tree)
    table = own.pop("route_config")
    own["rds"] = {"route_config_name": table["name"]}
    table["virtual_hosts"][0]["routes"][0]["route"]["timeout"] = "15s"
    entry = next(item for item in own["http_filters"] if item["name"].endswith("ext_proc"))
    config = entry.pop("typed_config")
    entry["config_discovery"] = {}
    broken = copy.deepcopy(static["listeners"])
    dump = {
        "configs": [
            {"@type": "x/envoy.admin.v3.BootstrapConfigDump", "bootstrap": tree},
            {
                "dynamic_listeners": [
                    {"active_state": {"listener": part}} for part in static["listeners"]
                ]
            },
            {"dynamic_listeners": [{"warming_state": {"listener": part}} for part in broken]},
            {"static_clusters": [{"cluster": part} for part in static["clusters"]]},
            {"dynamic_route_configs": [{"route_config": table}]},
            {"ecds_filters": [{"ecds_filter": {"name": entry["name"], "typed_config": config}}]},
        ]
    }
    running = envoy_tree.find_running_configuration(dump)
    assert [result.check for result in findings(running)] == ["route_timeout"]


OFF = {
    "the filter": lambda tree: http_filter(tree, "ext_proc").update(disabled=True),
    "its table": lambda tree: manager(tree)["route_config"].update(
        typed_per_filter_config={EXT_PROC: {**PER_ROUTE, "disabled": True}}
    ),
    "its host": lambda tree: host(tree).update(
        typed_per_filter_config={EXT_PROC: {**FILTER_CONFIG, "disabled": True}}
    ),
    "its route": lambda tree: host(tree)["routes"][0].update(
        typed_per_filter_config={
            EXT_PROC: {**FILTER_CONFIG, "config": {**PER_ROUTE, "disabled": True}}
        }
    ),
}


@pytest.mark.parametrize("place", OFF)
def test_a_filter_that_sees_no_route_is_an_error(place):
    """Envoy never calls extproc, wherever the filter is disabled."""
    tree = load()
    OFF[place](tree)
    assert [(item.severity, item.check) for item in findings(tree)] == [
        ("error", "ext_proc_disabled")
    ]


def test_a_route_enables_a_disabled_filter():
    """An override without `disabled` is enough."""
    tree = load()
    http_filter(tree, "ext_proc")["disabled"] = True
    wanted = {**FILTER_CONFIG, "config": {**PER_ROUTE, "overrides": {"request_attributes": ["a"]}}}
    host(tree)["routes"][0]["typed_per_filter_config"] = {EXT_PROC: wanted}
    assert findings(tree) == []


def test_a_filter_without_routes_beside_another_is_a_note():
    """A gateway may have the filter in every connection manager."""
    tree = load()
    listeners = tree["static_resources"]["listeners"]
    listeners.append(copy.deepcopy(listeners[0]))
    OFF["its host"](tree)
    assert findings(tree) == []
    assert "ext_proc_disabled" in notes(tree)


def test_a_disabled_filter_removes_no_headers():
    """The headers of clients reach ext_proc where the filter in front of it is off."""
    tree = load()
    http_filter(tree, "header_mutation")["disabled"] = True
    assert checks(tree) == ["steering_headers"]
    del http_filter(tree, "header_mutation")["disabled"]
    off = {"envoy.filters.http.header_mutation": {**FILTER_CONFIG, "disabled": True}}
    host(tree)["routes"][0]["typed_per_filter_config"] = off
    assert checks(tree) == ["steering_headers"]


@pytest.mark.parametrize(
    ("matcher", "is_removed"),
    [
        ({"prefix": "x-gateway-"}, True),
        ({"prefix": "X-Gateway-"}, False),
        ({"prefix": "X-Gateway-", "ignore_case": True}, True),
        ({"contains": "destination-endpoint"}, True),
        ({"safe_regex": {"regex": "x-gateway-.*"}}, True),
        ({"safe_regex": {"regex": "("}}, False),
        ({"suffix": "-endpoint"}, False),
        ({"exact": "x-gateway-destination-endpoint"}, False),
    ],
)
def test_headers_are_also_removed_by_match(matcher, is_removed):
    """`remove_on_match` counts for every header that it matches."""
    tree = load()
    listed = mutations(tree)
    listed[:] = [item for item in listed if not item["remove"].startswith("x-gateway-")]
    assert checks(tree) == ["steering_headers"]
    listed.append({"remove_on_match": {"key_matcher": matcher}})
    assert checks(tree) == ([] if is_removed else ["steering_headers"])


def test_an_ext_proc_filter_of_another_service_is_left_alone():
    """Filter, overrides and cluster of another service are not those of extproc."""
    tree = load()
    other = {
        "name": "guard",
        "typed_config": {
            "@type": processor(tree)["@type"],
            "grpc_service": {"envoy_grpc": {"cluster_name": "guard"}},
            "processing_mode": {"response_header_mode": "SKIP"},
        },
    }
    manager(tree)["http_filters"].insert(0, other)
    overrides = {"processing_mode": {"request_body_mode": "NONE"}}
    host(tree)["typed_per_filter_config"] = {"guard": {**PER_ROUTE, "overrides": overrides}}
    assert findings(tree) == []
    clusters = ("guard-extproc", "picker")
    for entry, name in zip((other["typed_config"], processor(tree)), clusters, strict=True):
        entry["grpc_service"]["envoy_grpc"]["cluster_name"] = name
    assert {*clusters} == {*envoy_tree.picker_clusters([manager(tree)])}


def test_destinations_are_read_in_every_form():
    """Names of headers have no case, and the destination is in dynamic metadata, too."""
    tree = load()
    engines = cluster(tree, "engines")
    engines["original_dst_lb_config"]["http_header_name"] = "X-Gateway-Destination-Endpoint"
    assert findings(tree) == []
    path = [{"key": "x-gateway-destination-endpoint"}]
    engines["original_dst_lb_config"] = {"metadata_key": {"key": "envoy.lb", "path": path}}
    assert findings(tree) == []


def test_connections_of_http2_engines_are_not_counted():
    """One carries many requests."""
    tree = load()
    del cluster(tree, "engines")["circuit_breakers"]["thresholds"][0]["max_connections"]
    http_options(tree, "engines")["explicit_http_config"] = {"http2_protocol_options": {}}
    assert findings(tree) == []


@pytest.mark.parametrize("value", ["40000", "4e4", 40000.0])
def test_numbers_are_read_as_envoy_reads_them(value):
    """JSON of protobuf has several forms of a number."""
    tree = load()
    cluster(tree, "engines")["circuit_breakers"]["thresholds"][0]["max_requests"] = value
    assert findings(tree) == []


def in_camel_case(tree):
    if isinstance(tree, list):
        return [in_camel_case(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {
        key
        if key.startswith(("@", "envoy."))
        else re.sub("_([a-z0-9])", lambda match: match[1].upper(), key): in_camel_case(value)
        for key, value in tree.items()
    }


def test_names_of_fields_may_be_in_camel_case():
    """Envoy reads both; names of filters are no fields."""
    tree = in_camel_case(load())
    assert [item for item in envoy_lint.read(tree, HOLDING, where="envoy.yaml") if item.fix] == []
    tree = load()
    http_filter(tree, "ext_proc")["name"] = "extProc"
    off = {"extProc": {**PER_ROUTE, "disabled": True}}
    host(tree)["typed_per_filter_config"] = off
    assert checks(in_camel_case(tree)) == ["ext_proc_disabled"]


MALFORMED = {
    "filter": lambda tree: manager(tree)["http_filters"].insert(0, None),
    "threshold": lambda tree: cluster(tree, "engines").update(
        circuit_breakers={"thresholds": [None]}
    ),
    "mode": lambda tree: processor(tree).update(processing_mode=[1]),
    "route": lambda tree: route(tree).update(retry_policy="often"),
}


@pytest.mark.parametrize("part", MALFORMED)
def test_a_malformed_file_is_an_error_of_the_configuration(part, tmp_path, capsys):
    """The exit status is that of a wrong file."""
    tree = load()
    MALFORMED[part](tree)
    path = tmp_path / "envoy.json"
    path.write_text(json.dumps(tree))
    assert main.main(["check", "--endpoints", "10.0.0.1:80", "--envoy", str(path)]) == 2
    assert "expected an Envoy configuration" in capsys.readouterr().err
