from __future__ import annotations

import pytest

from extproc.config import kubernetes_plan
from extproc.config.autoscaling import ScaleTarget, ScalingSection
from extproc.config.pool_sections import (
    ClusterSection,
    KubernetesSection,
    PoolSection,
    PoolSource,
)
from extproc.config.settings import Settings
from extproc.election import ElectionSettings
from extproc.errors import ConfigError

INSIDE = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "NAMESPACE": "here"}


def planned(*pools, environment=INSIDE, pool=None, **cluster):
    """The plan for some pools."""
    settings = Settings(
        pool=pool or PoolSource(),
        pools=pools,
        cluster=ClusterSection(leader_election=True, **cluster),
    )
    return kubernetes_plan.plan_election(settings, where="file", environment=environment)


def vllm(**more):
    return PoolSource(name="label", kubernetes=KubernetesSection(inference_pool="vllm", **more))


SCALED = ScalingSection(target=ScaleTarget(name="a"))


def test_leader_election_is_off_by_default():
    """By default every replica serves."""
    settings = Settings(pool=vllm())
    assert kubernetes_plan.plan_election(settings, where="file", environment=INSIDE) is None


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"pool": vllm()}, "epp-here-vllm.llm-d.ai"),
        ({"pool": vllm(namespace="there")}, "epp-there-vllm.llm-d.ai"),
        ({"pool": PoolSource(kubernetes=KubernetesSection(service="s"))}, "epp-here-s.llm-d.ai"),
        (
            {
                "pool": PoolSource(
                    name="p", kubernetes=KubernetesSection(selector={"a": "b"}, ports=(1,))
                )
            },
            "epp-here-p.llm-d.ai",
        ),
        (
            {"pool": PoolSource(kubernetes=KubernetesSection(selector={"a": "b"}))},
            "epp-here-pool.llm-d.ai",
        ),
        ({"discover_pools": "namespace"}, "epp-here-pools.llm-d.ai"),
        ({"discover_pools": "cluster", "pool": vllm()}, "epp-here-pools.llm-d.ai"),
        ({"pool": PoolSource(name="p", endpoints=("10.0.0.1:1",))}, "epp-here-p.llm-d.ai"),
        ({"pool": vllm(), "lease": ElectionSettings(name="mine")}, "mine"),
        (
            {"pool": PoolSource(endpoints=("10.0.0.1:1",), autoscaling=SCALED)},
            "epp-here-a.llm-d.ai",
        ),
        (
            {
                "pool": PoolSource(
                    kubernetes=KubernetesSection(selector={"a": "b"}), autoscaling=SCALED
                )
            },
            "epp-here-a.llm-d.ai",
        ),
    ],
)
def test_the_name_of_the_lease(arguments, name):
    """One pool: the upstream picker's; several: one for the Deployment; or what is written."""
    assert planned(**arguments).lease.name == name


def test_several_configured_pools_share_a_lease():
    """They share one Lease."""
    pools = [
        PoolSection(name=name, kubernetes=KubernetesSection(inference_pool=name))
        for name in ("one", "two")
    ]
    assert planned(*pools).lease.name == "epp-here-pools.llm-d.ai"
    assert planned(pools[0]).lease.name == "epp-here-one.llm-d.ai"


def test_the_lease_is_in_the_namespace_of_the_process():
    """Wherever the pool is: rights to Leases are granted where the replicas run."""
    assert planned(pool=vllm(namespace="there")).lease.namespace == "here"
    lease = ElectionSettings(namespace="elsewhere")
    assert planned(pool=vllm(), lease=lease).lease.namespace == "elsewhere"


def test_election_uses_the_api_server_of_discovery():
    """Kubeconfig and context."""
    plan = planned(pool=vllm(), kubeconfig="/k", context="c")
    assert (plan.api_settings.kubeconfig, plan.api_settings.context) == ("/k", "c")


def test_election_without_kubernetes_is_refused():
    """The error says what to do; a kubeconfig is enough, and so is a pod around."""
    listed = PoolSource(endpoints=("10.0.0.1:1",))
    with pytest.raises(
        ConfigError, match=r"set cluster\.kubeconfig, or leave cluster\.leader_election off"
    ):
        planned(pool=listed, environment={})
    assert planned(pool=listed, environment={}, kubeconfig="/k") is not None
    assert planned(pool=vllm(), environment={}) is not None


@pytest.mark.parametrize("name", ["My_Lease", "x" * 254, "a..b"])
def test_an_invalid_lease_name_is_refused(name):
    """It is refused before anybody is asked."""
    with pytest.raises(ConfigError, match=r"cluster\.lease\.name"):
        planned(pool=vllm(), lease=ElectionSettings(name=name))
    with pytest.raises(ConfigError, match="name the Lease yourself"):
        planned(pool=PoolSource(name=name, endpoints=("10.0.0.1:1",)))


@pytest.mark.parametrize(
    "times",
    [
        {"duration_s": 10},
        {"renew_s": 15.0},
        {"retry_s": 9.0},
        {"duration_s": 1, "renew_s": 2.0, "retry_s": 0.1},
    ],
)
def test_inconsistent_lease_times_are_refused(times):
    """A leader gives up before others may take over, and has time to try again."""
    with pytest.raises(ConfigError, match="below renew_s, and renew_s below duration_s"):
        planned(pool=vllm(), lease=ElectionSettings(**times))
