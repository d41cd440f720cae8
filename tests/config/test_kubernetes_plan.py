from __future__ import annotations

import pytest

from extproc.config import kubernetes_plan
from extproc.discovery.kubernetes.settings import (
    AllPools,
    InferencePoolRef,
    KubernetesSettings,
    PodSelector,
    ServiceRef,
)
from extproc.errors import ConfigError
from tests.support.config_text import read


def plan(text, **environment):
    settings = read(text)
    return kubernetes_plan.plan_kubernetes(settings, where="f.yaml", environment=environment)


def test_without_kubernetes_sources_nothing_is_watched():
    """Listed endpoints need no cluster."""
    assert plan("pool: {endpoints: ['10.0.0.1:80']}") is None


def test_every_kubernetes_source_is_planned():
    """An InferencePool, a selector and a Service, in the namespace of the process if none is said."""
    watched = plan(
        """
cluster: {kubeconfig: k, context: c, policies: false}
pools:
- {name: a, kubernetes: {inference_pool: x, namespace: y}}
- {name: b, kubernetes: {selector: {l: v}, ports: [80]}}
- {name: c, kubernetes: {service: s, port: http}}
- {name: d, endpoints: ['10.0.0.1:80']}
""",
        NAMESPACE="here",
    )
    assert watched.settings == KubernetesSettings(
        sources=[
            InferencePoolRef("y", "x"),
            PodSelector("here", "b", {"l": "v"}, (80,)),
            ServiceRef("here", "s", "http"),
        ],
        kubeconfig="k",
        context="c",
        policies=False,
    )
    assert watched.pools == {"y/x": "a", "here/b": "b", "here/s": "c"}


@pytest.mark.parametrize(
    ("text", "namespace"),
    [
        ("cluster: {discover_pools: cluster, namespace: ignored}", ""),
        ("cluster: {discover_pools: namespace}", "here"),
        ("cluster: {discover_pools: namespace, namespace: there}", "there"),
    ],
)
def test_all_pools_of_a_namespace_or_cluster_are_planned(text, namespace):
    """Of the cluster, of the own namespace, or of another."""
    watched = plan(text, NAMESPACE="here")
    assert watched.settings.sources == [AllPools(namespace)]
    assert watched.pools == {}


def test_an_object_in_two_pools_is_refused():
    """The same Service twice would be two pictures of one thing."""
    with pytest.raises(ConfigError, match="in a and b"):
        plan(
            "pools: [{name: a, kubernetes: {service: s}}, {name: b, kubernetes: {service: s}}]",
            NAMESPACE="n",
        )


def test_outside_a_pod_the_namespace_is_default(tmp_path, monkeypatch):
    """The variable comes first, then the service account, then `default`."""
    own = tmp_path / "namespace"
    monkeypatch.setattr(kubernetes_plan, "_NAMESPACE_FILE", own)
    assert kubernetes_plan.namespace({}) == "default"
    own.write_text("mine\n")
    assert kubernetes_plan.namespace({}) == "mine"
    assert kubernetes_plan.namespace({"NAMESPACE": "other"}) == "other"
