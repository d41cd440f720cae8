from __future__ import annotations

import asyncio
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import election
from extproc.autoscaling.runtime import scale_subresource, state_store
from extproc.config.autoscaling import ScaleTarget
from extproc.discovery.kubernetes import watch_plan

SEGMENTS = st.text(min_size=1, max_size=20)


def split(path):
    """The segments that a server sees, and what it would take for a query."""
    fixture, _, query = path.partition("?")
    return [unquote(segment) for segment in fixture.split("/")[1:]], query.partition("#")[0]


@given(group=SEGMENTS, version=SEGMENTS, namespace=SEGMENTS, resource=SEGMENTS, name=SEGMENTS)
def test_target_path_keeps_every_field_in_its_segment(group, version, namespace, resource, name):
    """Whatever the fields hold: also where no check came before."""
    target = ScaleTarget(
        name=name, namespace=namespace, group=group, version=version, resource=resource
    )
    wanted = ["apis", group, version, "namespaces", namespace, resource, name]
    assert split(scale_subresource.target_path(target)) == (wanted, "")


@given(namespace=SEGMENTS, name=SEGMENTS)
def test_paths_of_leases_and_collections_keep_every_field_in_its_segment(namespace, name):
    """Wherever a path of the API consists of names."""
    leases = ["apis", "coordination.k8s.io", "v1", "namespaces", namespace, "leases", name]
    assert split(election.lease_path(namespace, name)) == (leases, "")
    pods = watch_plan.WatchedCollection(watch_plan.PODS, namespace)
    assert split(pods.path) == (["api", "v1", "namespaces", namespace, "pods"], "")


@given(namespace=SEGMENTS, name=SEGMENTS)
def test_state_store_uses_a_single_config_map(namespace, name):
    """Whatever it is called."""
    paths = []

    class ScaleCluster:
        async def send(self, method, path, body=None):
            paths.append(path)
            return b"{}"

    subject = state_store.ConfigMapStateStore(
        ScaleCluster(), namespace=namespace, name=name, clock=lambda: 0.0, time=lambda: 0.0
    )
    asyncio.run(subject.load())
    (path,) = paths
    assert split(path) == (["api", "v1", "namespaces", namespace, "configmaps", name], "")


def test_autoscalers_are_unknown_where_the_answer_is_no_list():
    """An empty list says that there are none."""
    target = ScaleTarget(name="vllm", namespace="n").filled
    assert scale_subresource.parse_competing_autoscalers(b'{"items": []}', target) == ()
    assert scale_subresource.parse_competing_autoscalers(b'{"items": null}', target) == ()
    assert scale_subresource.parse_competing_autoscalers(b'{"kind": "Status"}', target) is None
    assert scale_subresource.parse_competing_autoscalers(b"[", target) is None


@pytest.mark.parametrize(
    "answer", [b'{"x": ' * 100_000, b'{"items": [{"metadata": {"name": "\xff"}}]}']
)
def test_undecodable_answers_are_empty(answer):
    """Nesting without end and text that is no UTF-8 are no list, no Scale and no ConfigMap."""
    assert (
        scale_subresource.parse_competing_autoscalers(
            answer, ScaleTarget(name="vllm", namespace="n").filled
        )
        is None
    )
    assert scale_subresource.parse_replicas(answer.replace(b"items", b"spec")) is None
    assert (
        state_store.parse_config_map(b'{"data": {"a": "\xff"}}')
        == state_store.parse_config_map(answer)
        == {}
    )
