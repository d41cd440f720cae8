from __future__ import annotations

import json

import pytest

from extproc.config import factory, lint, pool_sections, pools, reloading
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from extproc.pool import inference_policy
from extproc.pool.inference_policy import InferencePolicy, RewriteRule, TargetModel
from extproc.request import HttpRequest
from extproc.routing.pool_match import PoolMatch
from tests.support.config_text import read


def test_a_single_pool_matches_all_requests():
    """Without `pools` the section `pool` is the only one, by its name or none."""
    (pool_plan,) = pools.pool_plans(read("pool: {name: p, endpoints: ['10.0.0.1:80']}"))
    assert (pool_plan.name, pool_plan.match) == ("p", PoolMatch())
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
    assert a.match == PoolMatch(hosts=("a.example",), models=("llama-*",))
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
    assert (brought.name, brought.match.hosts) == ("x/y", ("h",))
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
        (
            """pools:
- {name: a, endpoints_file: x, autoscaling: {target: {name: t}}}
- {name: b, endpoints_file: y, autoscaling: {target: {name: t, version: v1beta1}}}""",
            "pools[1].autoscaling.target",
            "another object",
            "that of pool a",
        ),
        ("peer_sync: {peers: ['p:1'], url: 'redis://r'}", "peer_sync", "peers or url", "both"),
        ("peer_sync: {beat_s: 3}", "peer_sync.silent_s", "at least twice beat_s (6)", "got 5"),
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


POOL = """
pool:
  endpoints: ['10.0.0.1:8000']
  objectives: {gold: 10, batch: -1}
  rewrites:
    - models: [big, large]
      targets: [{model: big-v1, weight: 90}, {model: big-v2, weight: 10}]
    - targets: [{model: small}]
"""
OBJECTIVE = "x-llm-d-inference-objective"


def decision(parts: factory.PoolParts, model: str) -> Decision:
    body = json.dumps({"model": model, "prompt": "x"}).encode()
    headers = {":method": "POST", ":path": "/v1/completions", OBJECTIVE: "gold"}
    outcome = parts.director.route(HttpRequest(headers, body), 1.0)
    assert isinstance(outcome, Decision)
    return outcome


def built(text: str) -> factory.PoolParts:
    parts = factory.build(read(text))
    parts.store.set_endpoints([Endpoint("10.0.0.1:8000")], 0.0)
    return parts


def test_the_sections_become_a_policy():
    """As they are written, and in that order."""
    assert built(POOL).director.routing.policy == InferencePolicy(
        {"gold": 10, "batch": -1},
        (
            RewriteRule(("big", "large"), (TargetModel("big-v1", 90), TargetModel("big-v2", 10))),
            RewriteRule((), (TargetModel("small"),)),
        ),
    )
    assert built("pool: {}").director.routing.policy is inference_policy.EMPTY_POLICY


def test_requests_are_routed_by_the_policy():
    """Priority and name, without Kubernetes."""
    outcome = decision(built(POOL), "other")
    assert (outcome.request.priority, outcome.model_rewrite) == (10, "small")


def test_every_pool_has_its_own_policy():
    """A section of `pools` says it for that pool alone."""
    configured = read(
        "pools:\n"
        "- {name: a, endpoints: ['10.0.0.1:1'], objectives: {gold: 1}}\n"
        "- {name: b, endpoints: ['10.0.0.2:1'], rewrites: [{targets: [{model: m}]}]}\n"
    )
    first, second = (
        factory.build(pool_plan.settings) for pool_plan in pools.pool_plans(configured)
    )
    assert first.director.routing.policy == InferencePolicy({"gold": 1})
    assert second.director.routing.policy == InferencePolicy(
        rules=(RewriteRule((), (TargetModel("m"),)),)
    )


def test_the_policy_changes_without_a_restart():
    """A changed policy of the file applies from the next request on, without a restart."""
    parts = built(POOL)
    wanted = read(POOL.replace("small", "tiny").replace("gold: 10", "gold: 3"))
    routing, _ = factory.rebuild_routing(wanted, guards=parts.guards)
    parts.director.reconfigure(routing)
    outcome = decision(parts, "other")
    assert (outcome.request.priority, outcome.model_rewrite) == (3, "tiny")
    assert list(reloading.find_restart_fields(read(POOL), wanted)) == []


@pytest.mark.parametrize(
    ("pool", "fixture"),
    [
        ("{objectives: {gold: high}}", "pool.objectives"),
        ("{objectives: {gold: 2147483648}}", "pool.objectives"),
        ("{rewrites: [{models: [m]}]}", "pool.rewrites[0]"),
        ("{rewrites: [{targets: []}]}", "pool.rewrites[0].targets"),
        ("{rewrites: [{targets: [{weight: 1}]}]}", "pool.rewrites[0].targets[0]"),
        ("{rewrites: [{targets: [{model: m, weight: -1}]}]}", "targets[0].weight"),
        ("{rewrites: [{models: [''], targets: [{model: m}]}]}", "pool.rewrites[0].models[0]"),
        ("{rewrites: [{model: m, targets: [{model: m}]}]}", "pool.rewrites[0].model"),
    ],
)
def test_policy_errors_name_their_path(pool: str, fixture: str):
    """A wrong type or bound, no target, a name without letters, an unknown key."""
    with pytest.raises(ConfigError) as raised:
        read(f"pool: {pool}")
    assert fixture in raised.value.where


def test_the_policy_is_described():
    """As `extproc check` prints it."""
    pool = read(POOL).pool
    assert list(pool_sections.describe_policy(pool.objectives, pool.rewrites)) == [
        "objectives  gold 10, batch -1",
        "rewrites    big, large to big-v1 (90), big-v2 (10)",
        "            every other model to small",
    ]
    assert list(pool_sections.describe_policy({}, ())) == []


@pytest.mark.parametrize(
    ("rewrites", "remark"),
    [
        (
            "[{models: [a, b], targets: [{model: c}]}, {models: [b], targets: [{model: d}]}]",
            "pool.rewrites[1] is never used for b: pool.rewrites[0] comes first",
        ),
        (
            "[{targets: [{model: c}]}, {targets: [{model: d}]}]",
            "pool.rewrites[1] is never used for every other model: pool.rewrites[0] comes first",
        ),
        (
            "[{targets: [{model: c, weight: 1}, {model: d}]}]",
            "pool.rewrites[0] never draws d: others have a weight",
        ),
        (
            "[{targets: [{model: c, weight: 0}, {model: d}]}]",
            "pool.rewrites[0] has only weights of 0: its targets are drawn alike",
        ),
    ],
)
def test_ineffective_rules_are_warnings(rewrites: str, remark: str):
    """Rules that never count, and targets that are never drawn; in `pools` as well."""
    assert remark in lint.find_warnings(read(f"pool: {{rewrites: {rewrites}}}"))
    pools = f"pools: [{{name: p, endpoints: ['10.0.0.1:1'], rewrites: {rewrites}}}]"
    assert remark.replace("pool.", "pools[0].") in lint.find_warnings(read(pools))


def test_rules_for_a_name_that_rewrites_replace_are_a_warning():
    """Rules go by the name after rewrites; one that another rewrite yields counts."""
    rules = "scheduling: {models: {a: {strategy: least-request}, b: {strategy: random}}}"
    rewrites = "[{models: [a], targets: [{model: b}]}, {models: [b], targets: [{model: c}]}]"
    warnings = list(lint.find_warnings(read(f"pool: {{rewrites: {rewrites}}}\n{rules}")))
    named = [warning for warning in warnings if "scheduling.models" in warning]
    assert [warning.partition(":")[0] for warning in named] == ["scheduling.models.a is never used"]
    pool = f"{{name: p, endpoints: ['10.0.0.1:1'], rewrites: {rewrites}, {rules}}}"
    named = [
        warning
        for warning in lint.find_warnings(read(f"pools: [{pool}]"))
        if "scheduling.models" in warning
    ]
    assert len(named) == 1
    assert named[0].startswith("pools[0].scheduling.models.a is never used")


def test_effective_rules_give_no_warning():
    """A usual canary, and one that is switched off."""
    warnings = list(lint.find_warnings(read(POOL.replace("weight: 10", "weight: 0"))))
    assert not [warning for warning in warnings if "rewrites" in warning]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("pool: {kubernetes: {inference_pool: p}}", True),
        ("pool: {kubernetes: {service: s}}", False),
        ("server: {llmd_metrics: true}", True),
        ("server: {llmd_metrics: false}\npool: {kubernetes: {inference_pool: p}}", False),
    ],
)
def test_the_picker_of_an_inference_pool_serves_metrics_of_llmd(text, expected):
    """Charts for that EPP find their metrics without a change of the configuration."""
    assert pools.serves_llmd_metrics(read(f"{text}\n")) is expected
