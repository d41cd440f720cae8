from __future__ import annotations

import argparse

import pytest

from extproc.cli import flags
from extproc.config import pool_sections
from extproc.errors import ConfigError
from tests.support.config_text import HEAD


def resolve(*words, text=""):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    flags.add(parser)
    configured = ["--config-text", HEAD + text] if text else []
    args, args_unknown = parser.parse_known_args([*configured, *words])
    args.unknown_flags = args_unknown
    return flags.resolve(args)


def kubernetes(*words, text=""):
    return resolve(*words, text=text).settings.pool.kubernetes


def test_the_flags_of_an_upstream_deployment_follow_an_inference_pool():
    """`--pool-name` and its companions mean what they mean upstream."""
    resolved = resolve(
        *("--pool-name", "llama", "--pool-namespace=prod", "--kubeconfig", "k"),
        "--pool-group=inference.networking.x-k8s.io",
    )
    assert resolved.settings.pool == pool_sections.PoolSource(
        name="llama",
        kubernetes=pool_sections.KubernetesSection(
            inference_pool="llama",
            namespace="prod",
            group="inference.networking.x-k8s.io",
        ),
    )
    assert resolved.settings.cluster.kubeconfig == "k"
    assert resolved.warnings == ()


def test_a_selector_with_ports_needs_no_pool():
    """Labels and target ports; the name, if any, is a label."""
    words = ("--endpoint-selector", "app=vllm, tier=gpu", "--endpoint-target-ports=8000,8001")
    assert kubernetes(*words) == pool_sections.KubernetesSection(
        selector={"app": "vllm", "tier": "gpu"}, ports=(8000, 8001)
    )
    named = resolve(*words, "--pool-name=x").settings.pool
    assert (named.name, named.kubernetes.inference_pool) == ("x", "")
    assert kubernetes(*words[:2], "--endpoint-target-ports", "[8000 8001]").ports == (8000, 8001)


@pytest.mark.parametrize(
    ("selector", "labels", "in_the_api"),
    [
        ("app == vllm,tier=", {"app": "vllm", "tier": ""}, ""),
        ("a=b,a=b", {"a": "b"}, ""),
        ("a=b,a=c", {"a": "b"}, "a in (c)"),
        ("tier in (gpu, tpu),app=x", {"app": "x"}, "tier in (gpu,tpu)"),
        ("tier notin(gpu)", {}, "tier notin (gpu)"),
        ("llm-d.ai/role,!old", {}, "llm-d.ai/role,!old"),
        ("a!=b , ! c", {}, "a notin (b),!c"),
        ("in in (),notin", {}, "in in (),notin"),
    ],
)
def test_a_selector_takes_expressions(selector, labels, in_the_api):
    """All that `kubectl get pods -l` takes, but comparisons of numbers."""
    section = kubernetes("--endpoint-selector", selector)
    assert section.selector == labels
    assert ",".join(map(str, section.selector_expressions)) == in_the_api
    assert section.inference_pool == ""


def test_the_name_is_a_label_where_endpoints_are_listed():
    """With endpoints on the command line or in the file nothing is followed."""
    for words, text in (
        (["--endpoints", "10.0.0.1:80"], ""),
        ([], "pool: {endpoints: ['10.0.0.1:80']}"),
        ([], "pool: {endpoints_file: f}"),
    ):
        resolved = resolve("--pool-name", "p", *words, text=text)
        assert resolved.settings.pool.name == "p"
        assert resolved.settings.pool.kubernetes is None


def test_flags_beat_the_file():
    """A name replaces the object of the file, keeping what goes with it; a selector replaces it."""
    text = "pool: {kubernetes: {inference_pool: a, namespace: x}}"
    assert kubernetes("--pool-name=b", text=text) == pool_sections.KubernetesSection(
        inference_pool="b", namespace="x"
    )
    assert kubernetes("--pool-namespace=y", text=text).namespace == "y"
    assert kubernetes("--endpoint-selector=a=b", text=text) == pool_sections.KubernetesSection(
        selector={"a": "b"}, namespace="x"
    )
    service = "pool: {kubernetes: {service: s}}"
    assert kubernetes("--pool-name=b", text=service).service == "s"


def test_namespace_flag_selects_the_pools_of_a_namespace():
    """The flag selects the namespace whose pools are served."""
    settings = resolve("--pool-namespace=y", text="cluster: {discover_pools: namespace}").settings
    assert settings.cluster.namespace == "y"


def test_companions_without_kubernetes_are_named():
    """A flag that changes nothing is one warning."""
    (warning,) = resolve("--endpoints=10.0.0.1:80", "--pool-namespace=prod").warnings
    assert "--pool-namespace has no effect" in warning


@pytest.mark.parametrize(
    ("words", "where", "wanted"),
    [
        (["--endpoint-selector=app vllm"], "--endpoint-selector", "key=value"),
        (["--endpoint-selector=env in a,b"], "--endpoint-selector", "key in (a,b)"),
        (["--endpoint-selector=env in (a,b"], "--endpoint-selector", "key in (a,b)"),
        (["--endpoint-selector=gpus>3"], "--endpoint-selector", "key in (a,b)"),
        (["--endpoint-selector=!old=x"], "--endpoint-selector", "!key"),
        (["--endpoint-selector=,"], "--endpoint-selector", "!key"),
        (
            ["--endpoint-selector=a=b", "--endpoint-target-ports=x"],
            "--endpoint-target-ports",
            "whole",
        ),
        (["--endpoint-selector=a=b", "--endpoint-target-ports=70000"], "ports", "65535"),
        (["--pool-name=p", "--pool-group=x"], "group", "inference.networking"),
        (["--endpoint-selector=a=b", "--endpoints=10.0.0.1:80"], "--endpoint-selector", "one"),
    ],
)
def test_invalid_flags_are_refused(words, where, wanted):
    """The error names the flag or the setting it reaches."""
    with pytest.raises(ConfigError) as refused:
        resolve(*words)
    assert where in str(refused.value)
    assert wanted in str(refused.value)


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("{key: a, operator: NotIn}", "at least one value for NotIn"),
        ("{key: a, operator: Exists, values: [b]}", "no values for Exists"),
    ],
)
def test_an_expression_with_a_wrong_number_of_values_is_refused(expression, wanted):
    """The error says how many values the operator takes."""
    with pytest.raises(ConfigError) as refused:
        kubernetes(text=f"pool: {{kubernetes: {{selector_expressions: [{expression}]}}}}")
    assert refused.value.where.endswith("pool.kubernetes.selector_expressions[0]")
    assert refused.value.wanted == wanted
