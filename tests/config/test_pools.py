from __future__ import annotations

import pytest

from extproc.config import loader, pools
from extproc.errors import ConfigError
from extproc.routing.pool_match import PoolMatch

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"


def read(text):
    return loader.settings(loader.parse(HEAD + text, where="f.yaml"))


def test_a_single_pool_matches_all_requests():
    """Without `pools` the section `pool` is the only one, by its name or none."""
    (pool_plan,) = pools.pool_plans(read("pool: {name: p, endpoints: ['10.0.0.1:80']}"))
    assert (pool_plan.name, pool_plan.claim) == ("p", PoolMatch())
    assert pools.pool_plans(read(""))[0].name == ""


def test_pools_are_planned_independently():
    """Sources, claims and rules of each; what it does not say is the process's."""
    settings = read("""
scheduling: {strategy: lmetric}
pools:
- name: a
  endpoints: ['10.0.0.1:80']
  match: {hosts: [a.example], models: ['llama-*']}
- name: b
  kubernetes: {selector: {app: vllm}, ports: [8000, 8001], namespace: x}
  scheduling: {strategy: random}
""")
    a, b = pools.pool_plans(settings)
    assert a.claim == PoolMatch(hosts=("a.example",), models=("llama-*",))
    assert a.settings.pool.endpoints == ("10.0.0.1:80",)
    assert a.settings.pools == ()
    assert a.settings.scheduling.strategy == "lmetric"
    assert b.settings.scheduling.strategy == "random"
    assert b.settings.pool.kubernetes.ports == (8000, 8001)
    assert b.settings.pool.name == "b"


def test_all_pools_may_come_from_kubernetes():
    """`discover_pools` plans none in advance, beside a pool that is written out one."""
    assert pools.pool_plans(read("cluster: {discover_pools: cluster}")) == ()
    both = read("cluster: {discover_pools: namespace}\npool: {endpoints: ['10.0.0.1:80']}")
    assert len(pools.pool_plans(both)) == 1
    brought = pools.discovered_pool_plan(both, "x/y", PoolMatch(hosts=("h",)))
    assert (brought.name, brought.claim.hosts) == ("x/y", ("h",))
    assert brought.settings.pool.name == "x/y"
    assert not brought.settings.pool.endpoints


@pytest.mark.parametrize(
    ("text", "where", "wanted", "actual"),
    [
        (
            "pool: {endpoints: ['10.0.0.1:80'], kubernetes: {service: x}}",
            "pool",
            "one of endpoints",
            "endpoints and kubernetes",
        ),
        ("pool: {kubernetes: {}}", "pool.kubernetes", "one of inference_pool", "none of them"),
        (
            "pool: {kubernetes: {service: x, inference_pool: y}}",
            "pool.kubernetes",
            "one of inference_pool",
            "inference_pool and service",
        ),
        (
            "pool: {kubernetes: {service: x, ports: [80]}}",
            "pool.kubernetes",
            "ports only with selector",
            "ports with service",
        ),
        (
            "pool: {kubernetes: {inference_pool: x, port: http}}",
            "pool.kubernetes",
            "port only with service",
            "port with inference_pool",
        ),
        (
            "pool: {endpoints: ['10.0.0.1:80']}\npools: [{name: a, endpoints: ['10.0.0.2:80']}]",
            "pools",
            "pool or pools",
            "both",
        ),
        (
            "pools: [{name: a, endpoints: ['10.0.0.2:80']}, {name: a, endpoints_file: x}]",
            "pools[1].name",
            "every name once",
            "a again",
        ),
        ("pools: [{name: a}]", "pools[0]", "endpoints, endpoints_file", "none of them"),
        ("pools: [{endpoints: ['10.0.0.2:80']}]", "pools[0]", "the key name", "1 keys"),
        (
            "pools: [{name: a, endpoints: ['10.0.0.2:80', '10.0.0.2:80']}]",
            "pools[0]",
            "every endpoint once",
            "again",
        ),
        (
            "pool: {kubernetes: {selector: {a: b}, ports: [1,2,3,4,5,6,7,8,9]}}",
            "pool.kubernetes.ports",
            "a list of at most 8",
            "a list of 9",
        ),
        (
            "pools: [{name: a, endpoints_file: x, match: {host: y}}]",
            "pools[0].match.host",
            "hosts",
            "host",
        ),
    ],
)
def test_contradictory_fields_are_refused(text, where, wanted, actual):
    """The error names the place, what was wanted, what was there and what to do."""
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert where in refused.value.where
    assert wanted in refused.value.wanted + str(refused.value)
    assert actual in str(refused.value)
    assert refused.value.fix
