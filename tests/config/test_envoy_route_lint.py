from __future__ import annotations

import copy

import pytest

from extproc.config import settings
from extproc.config.pool_sections import SchedulingSection
from tests.config.envoy_files import (
    cluster,
    disable_filter,
    findings,
    host,
    load,
    manager,
    notes,
    route,
    without,
)


def test_other_clusters_of_a_gateway_are_notes():
    """A route that extproc sees may go elsewhere, if others go where it says."""
    tree = load()
    host = manager(tree)["route_config"]["virtual_hosts"][0]
    other = copy.deepcopy(cluster(tree, "extproc"))
    other["name"] = "other"
    tree["static_resources"]["clusters"].append(other)
    extra = copy.deepcopy(host["routes"][0])
    extra["route"]["cluster"] = "other"
    host["routes"].insert(0, extra)
    assert "destination" in notes(tree)


def test_short_idle_limits_of_a_route_without_flow_control_are_warnings():
    """An answer may say nothing for as long as its prompt is computed."""
    tree = load()
    route(tree)["idle_timeout"] = "5s"
    (result,) = findings(tree, settings.Settings())
    assert (result.severity, result.check) == ("warning", "route_idle_timeout")
    assert "requests" not in result.got
    route(tree)["idle_timeout"] = "600s"
    assert findings(tree, settings.Settings()) == []


def test_retries_in_full_duplex_are_named():
    """Envoy may send such a body twice."""
    tree = load("original-dst.yaml")
    route(tree)["retry_policy"] = {"retry_on": "reset"}
    assert [result.check for result in findings(tree)] == ["duplex_retries"]
    host(tree)["retry_policy"] = route(tree).pop("retry_policy")
    assert [result.check for result in findings(tree)] == ["duplex_retries"]


@pytest.mark.parametrize(
    ("name", "checks"),
    [("original-dst-buffered.yaml", ["fallbacks"]), ("override-host.yaml", [])],
)
def test_further_endpoints_need_a_policy_that_tries_them(name, checks):
    """ORIGINAL_DST takes no list."""
    naming = settings.Settings(scheduling=SchedulingSection(fallbacks=2))
    assert [result.check for result in findings(load(name), naming)] == checks


def test_idle_limits_of_all_routes_replace_that_of_the_manager():
    """Zero is none; a route without one has that of the manager."""
    tree = load()
    without(manager(tree), "stream_idle_timeout")
    for entry in host(tree)["routes"]:
        entry["route"]["idle_timeout"] = "0s"
    assert findings(tree) == []
    del route(tree)["idle_timeout"]
    assert [result.check for result in findings(tree)] == ["stream_idle_timeout"]


@pytest.mark.parametrize(
    "layer",
    [
        {
            "circuit_breakers.extproc.default": {
                "max_requests": 40000,
                "max_pending_requests": 40000,
            }
        },
        {
            "circuit_breakers.extproc.default.max_requests": 40000,
            "circuit_breakers": {"extproc.default.max_pending_requests": 40000},
        },
    ],
)
def test_static_runtime_layers_set_limits_of_circuit_breakers(layer):
    """Names are joined as Envoy joins them; those of other clusters do not count."""
    tree = load()
    without(cluster(tree, "extproc"), "circuit_breakers")
    tree["layered_runtime"] = {"layers": [{"name": "first", "static_layer": layer}]}
    assert findings(tree) == []
    cluster(tree, "extproc")["circuit_breakers"] = {"thresholds": [{"max_requests": 3}]}
    assert findings(tree) == []
    tree["layered_runtime"]["layers"][0]["static_layer"] = {
        name.replace("extproc", "other"): value for name, value in layer.items()
    }
    assert "picker_breakers" in [result.check for result in findings(tree)]


def test_a_route_to_engines_around_the_picker_is_named():
    """With a policy that chooses without extproc, nothing else shows it."""
    tree = load("override-host.yaml")
    added = copy.deepcopy(host(tree)["routes"][0])
    disable_filter(added)
    host(tree)["routes"].append(added)
    (result,) = findings(tree)
    assert (result.check, result.severity) == ("ext_proc_bypassed", "warning")
    assert result.place.endswith("cluster engines")


def test_a_route_that_divides_requests_over_pools_is_named():
    """The cluster is chosen by weight, and the endpoint by the one picker."""
    tree = load("override-host.yaml")
    other = copy.deepcopy(cluster(tree, "engines"))
    other["name"] = "others"
    tree["static_resources"]["clusters"].append(other)
    action = route(tree)
    names = (action.pop("cluster"), "others")
    action["weighted_clusters"] = {"clusters": [{"name": name, "weight": 1} for name in names]}
    (result,) = findings(tree)
    assert (result.check, result.severity) == ("weighted_clusters", "warning")


OTHER_PICKER = {
    "envoy.filters.http.ext_proc": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        "overrides": {"grpc_service": {"envoy_grpc": {"cluster_name": "extproc"}}},
    }
}


@pytest.mark.parametrize(
    "second",
    [
        {"name": "others", "weight": 0},
        {"name": "engines", "weight": 1},
        {"name": "others", "weight": 1, "typed_per_filter_config": OTHER_PICKER},
    ],
)
def test_weights_that_leave_each_request_to_the_picker_of_its_cluster_are_fine(second):
    """No request goes to a cluster of weight 0, and each cluster may have a picker of its own."""
    tree = load("override-host.yaml")
    other = copy.deepcopy(cluster(tree, "engines"))
    other["name"] = "others"
    tree["static_resources"]["clusters"].append(other)
    first = {"name": route(tree).pop("cluster"), "weight": 1}
    route(tree)["weighted_clusters"] = {"clusters": [first, second]}
    assert findings(tree) == []


def test_a_weighted_cluster_without_ext_proc_is_bypassing_and_not_divided():
    """Envoy chooses the endpoints of its requests, and those of the other cluster are the picker's."""
    tree = load("override-host.yaml")
    other = copy.deepcopy(cluster(tree, "engines"))
    other["name"] = "others"
    tree["static_resources"]["clusters"].append(other)
    off = {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
        "disabled": True,
    }
    overrides = {"envoy.filters.http.ext_proc": off}
    first = {"name": route(tree).pop("cluster"), "weight": 1}
    second = {"name": "others", "weight": 1, "typed_per_filter_config": overrides}
    route(tree)["weighted_clusters"] = {"clusters": [first, second]}
    (result,) = findings(tree)
    assert (result.check, result.severity) == ("ext_proc_bypassed", "warning")
    assert result.place.endswith("cluster others")


@pytest.mark.parametrize("is_secure", [True, False])
def test_tls_at_one_end_alone_is_named(is_secure):
    """The finding says which end has it; where endpoints differ there is none."""
    configured = settings.Settings(server=settings.ServerSection(secure_serving=is_secure))
    tree = load()
    socket = cluster(tree, "extproc")["transport_socket"]
    if is_secure:
        del cluster(tree, "extproc")["transport_socket"]
    (result,) = findings(tree, configured)
    assert (result.check, result.severity) == ("picker_tls", "warning")
    assert result.wanted == ("TLS" if is_secure else "plaintext")
    matches = [{"name": "some", "match": {}, "transport_socket": socket}]
    cluster(tree, "extproc")["transport_socket_matches"] = matches
    assert findings(tree, configured) == []
