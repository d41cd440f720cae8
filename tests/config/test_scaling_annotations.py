from __future__ import annotations

import re
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.autoscaling.runtime import scale_subresource
from extproc.cli import check
from extproc.config import loader, pool_annotations, pools
from extproc.errors import ConfigError

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\ncluster: {discover_pools: cluster}\n"
KEY = "team-a/llama"


def read(rules):
    return loader.settings(
        loader.parse(HEAD + f"autoscaling: {{discovered_pools: {rules}}}", where="f.yaml")
    )


def scaling(rules, key=KEY, **annotations):
    annotations = {f"extproc/scale-{name}": text for name, text in annotations.items()}
    return pool_annotations.resolve_scaling(
        read(rules).autoscaling.discovered_pools, key, annotations
    )


def test_without_a_rule_nothing_is_scaled():
    """An annotation without a matching rule has no effect."""
    assert scaling("[]", target="vllm") is None
    assert scaling("[{pools: ['team-b/*']}]", target="vllm") is None


def test_the_first_matching_rule_applies():
    """Patterns are those of file names, over namespace/name."""
    rules = "[{pools: ['team-a/*'], max: 2}, {max: 9}]"
    assert scaling(rules).max == 2
    assert scaling(rules, "team-b/llama").max == 9


def test_a_rule_names_the_object_after_the_pool():
    """In the namespace of the pool, whatever the picker's own is."""
    target = scaling("[{target: {kind: StatefulSet, name: '{name}-engines'}}]").target
    assert (target.namespace, target.resource, target.name) == (
        "team-a",
        "statefulsets",
        "llama-engines",
    )


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("vllm", "apps/v1/deployments/vllm"),
        ("StatefulSet/vllm", "apps/v1/statefulsets/vllm"),
        ("apps/v1/Deployment/vllm", "apps/v1/deployments/vllm"),
        ("g.io/v2/fleets/Fleet/vllm", "g.io/v2/fleets/vllm"),
    ],
)
def test_an_annotation_names_the_scaled_object(text, path):
    """By name alone, with a kind, or with group and version."""
    target = scaling("[{target: {name: other}}]", target=text).target
    assert f"{target.group}/{target.version}/{target.resource}/{target.name}" == path
    assert target.namespace == "team-a"


@pytest.mark.parametrize(
    ("annotations", "bounds"),
    [
        ({}, (1, 4)),
        ({"max": "3"}, (1, 3)),
        ({"max": "40"}, (1, 4)),
        ({"min": "0", "max": "2"}, (0, 2)),
        ({"min": "9"}, (4, 4)),
    ],
)
def test_annotated_replicas_stay_within_the_rule(annotations, bounds):
    """The rule of the configuration bounds the replicas that annotations name."""
    wanted = scaling("[{min: 1, max: 4}]", **annotations)
    assert (wanted.min, wanted.max) == bounds


@pytest.mark.parametrize("annotations", [{"target": "none"}, {"max": "0"}])
def test_an_annotation_disables_scaling(annotations):
    """Also where a rule names its object."""
    assert scaling("[{target: {name: vllm}}]", **annotations) is None


def test_a_rule_can_ignore_annotations():
    """A rule with `annotations: false` takes target and bounds from the configuration."""
    wanted = scaling("[{annotations: false, max: 2}]", target="vllm", max="1")
    assert (wanted.target, wanted.max) == (None, 2)


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        ({"target": "Fleet/x"}, "target.kind"),
        ({"target": "a/b/c"}, "'a/b/c'"),
        ({"target": "Deployment/X_"}, "'X_'"),
        ({"target": "apps//Deployment/x"}, "'apps//Deployment/x'"),
        ({"min": "many"}, "'many'"),
        ({"max": "-1"}, "'-1'"),
        ({"target": "apps/v1/statefulsets/Deployment/x"}, "target.kind"),
        ({"target": "apps/v1/deployments/Fleet/x"}, "target.kind"),
        ({"target": "x\ny"}, "target.name"),
        ({"target": "Deployment/" + "x" * 254}, "target.name"),
        ({"target": "Deployment/a..b"}, "target.name"),
        ({"target": "apps/v1?x=/deployments/Deployment/x"}, "target.version"),
        ({"target": "apps/v1%2Fnamespaces%2Fb/deployments/Deployment/x"}, "target.version"),
        ({"target": "../v1/Deployment/x"}, "target.group"),
        ({"target": "apps/v1/deployments%2Fx/Deployment/x"}, "target.resource"),
    ],
)
def test_an_invalid_annotation_is_reported(annotations, expected):
    """The pool and the annotation are named."""
    with pytest.raises(ConfigError) as refused:
        scaling("[{}]", **annotations)
    assert f"annotation of {KEY}" in str(refused.value)
    assert expected in str(refused.value) or "scale-target" in str(refused.value)


def test_a_long_annotation_makes_no_long_error():
    """A log line repeats the beginning of it."""
    with pytest.raises(ConfigError) as refused:
        scaling("[{}]", target="x" * 200_000)
    assert len(str(refused.value)) < 400


#: What annotations may be made of: honest words, and what ends or leaves a path segment.
WORDS = st.sampled_from(
    [
        *("apps", "v1", "deployments", "Deployment", "vllm", "statefulsets", "StatefulSet", ""),
        *("/", "%2F", "%2f", "%252F", "..", ".", "?", "#", "%00", "\n", "\\", ";", "&x=", "%"),
        *("namespaces", "kube-system", "coredns", "scale", "Fleet", "v1%2Fnamespaces%2Fb"),
    ]
)
TEXTS = st.one_of(
    st.lists(WORDS, max_size=12).map("".join),
    st.lists(WORDS, min_size=1, max_size=5).map("/".join),
    st.lists(st.lists(WORDS, min_size=1, max_size=4).map("".join), max_size=5).map("/".join),
    st.text(max_size=60),
)


@given(text=TEXTS)
def test_no_annotation_reaches_another_namespace(text):
    """An accepted target is a plain path below the namespace of the pool."""
    try:
        wanted = scaling("[{}]", target=text)
    except ConfigError:
        return
    if wanted is None or wanted.target is None:
        return
    path = scale_subresource.target_path(wanted.target)
    # However often a server unquotes it, it is the same path.
    assert unquote(path) == path
    assert re.fullmatch(
        r"/apis/[a-z0-9.-]+/v[a-z0-9]+/namespaces/team-a/[a-z0-9-]+/[a-z0-9.-]+", path
    )
    assert not {".", ".."} & set(path.split("/"))


@pytest.mark.parametrize(
    ("rules", "fixture"),
    [
        ("[{min: 3}]", "discovered_pools.0.min"),
        ("[{policy: what}]", "policy"),
        ("[{target: {name: x, namespace: y}}]", "target.namespace"),
        ("[{target: {kind: Fleet, name: x}}]", "target.kind"),
        ("[{pools: []}]", "pools"),
    ],
)
def test_contradictory_rules_are_refused(rules, fixture):
    """When the configuration is read, not when a pool comes."""
    with pytest.raises(ConfigError) as refused:
        read(rules)
    assert fixture.replace(".0.", "[0].") in str(refused.value) or fixture in str(refused.value)


def test_rules_without_pools_from_kubernetes_are_refused():
    """They would never do anything."""
    text = (
        HEAD.replace("cluster: {discover_pools: cluster}\n", "")
        + "autoscaling: {discovered_pools: [{}]}"
    )
    with pytest.raises(ConfigError, match="discover_pools"):
        loader.settings(loader.parse(text, where="f.yaml"))


def test_scaling_of_objects_requires_leader_election():
    """Rules that may change scale targets need it; rules without a target do not."""
    assert pools.scales_kubernetes_objects(read("[{}]"))
    assert pools.scales_kubernetes_objects(read("[{annotations: false, target: {name: '{name}'}}]"))
    assert not pools.scales_kubernetes_objects(read("[{annotations: false}]"))


def test_check_describes_scaling_of_discovered_pools(monkeypatch):
    """The line names pools, bounds, policy and scale target."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    lines = list(check.describe_pools(read("[{max: 4, target: {name: '{name}'}}]")))
    line = next(line for line in lines if line.startswith("replicas"))
    assert "of *: 0 to 4 by adaptive" in line
    assert "deployments/scale of {name}" in line
