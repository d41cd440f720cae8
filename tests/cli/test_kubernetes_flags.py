from __future__ import annotations

import argparse

import pytest

from extproc.cli import flags
from extproc.config import pool_sections
from extproc.errors import ConfigError

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"


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
        (["--endpoint-selector=app"], "--endpoint-selector", "key=value"),
        (["--endpoint-selector=env in (a,b)"], "--endpoint-selector", "without in"),
        (["--endpoint-selector=a=b,tier!=gpu"], "--endpoint-selector", "without in"),
        (["--endpoint-selector=!old,a=b"], "--endpoint-selector", "existence"),
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
