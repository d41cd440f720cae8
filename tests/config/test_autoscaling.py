from __future__ import annotations

import pytest

from extproc.cli import check
from extproc.config import lint
from extproc.errors import ConfigError
from tests.support.config_text import read


def scaling(text):
    return read(f"pool: {{autoscaling: {{{text}}}}}").pool.autoscaling


def test_autoscaling_is_off_by_default():
    """Autoscaling is off by default, and no peer is queried."""
    settings = read("")
    assert settings.pool.autoscaling is None
    assert not settings.autoscaling.keda.enabled
    assert settings.autoscaling.peers == ()


@pytest.mark.parametrize(
    ("kind", "group", "version", "resource"),
    [
        ("Deployment", "apps", "v1", "deployments"),
        ("StatefulSet", "apps", "v1", "statefulsets"),
        ("LeaderWorkerSet", "leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
        ("Model", "kubeai.org", "v1", "models"),
    ],
)
def test_well_known_kinds_need_only_a_name(kind, group, version, resource):
    """The kind determines the API path of the scale subresource."""
    target = scaling(f"target: {{kind: {kind}, name: x}}").target.filled
    assert (target.group, target.version, target.resource) == (group, version, resource)


def test_explicit_target_fields_override_those_of_the_kind():
    """And another kind is taken when everything is written."""
    target = scaling("target: {name: x, version: v2}").target.filled
    assert (target.group, target.version, target.resource) == ("apps", "v2", "deployments")
    target = scaling("target: {kind: F, name: x, group: g.io, version: v1, resource: fs}").target
    assert target.filled.resource == "fs"


@pytest.mark.parametrize(
    ("text", "where", "actual"),
    [
        ("min: 3", "min", "3"),
        ("policy: what", "policy", "'what'"),
        ("policy: kubeai, params: {target: 3}", "params", "target"),
        ("policy: queue-depth, params: {up: -1}", "params", "up"),
        (
            "policy: queue-depth, params: {up: 1, down: 5}",
            "params",
            "down of at most up (1), got 5",
        ),
        ("target: {kind: Fleet, name: x}", "target.kind", "Fleet"),
        ("target: {name: X_}", "target.name", "'X_'"),
        ("target: {name: x, namespace: 'a/b'}", "target.namespace", "'a/b'"),
        ("target: {name: x}, exec: [scale, '{replicas}']", "autoscaling", "target and exec"),
        ("launch: {command: [x]}, exec: [scale, '{replicas}']", "autoscaling", "launch and exec"),
        ("exec: [scale]", "exec", "none of 1"),
        ("launch: {command: []}", "launch.command", ""),
        ("max: 0", "max", "0"),
    ],
)
def test_contradictory_settings_are_refused(text, where, actual):
    """With the place and what was found there."""
    with pytest.raises(ConfigError) as refused:
        scaling(text)
    assert where in str(refused.value)
    assert actual in str(refused.value)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("exec: [scale, --token=s3cret]", "none of 2"),
        ("exec: 'scale --token=s3cret {replicas}'", "text"),
        ("exec: [scale, 53275]", "another value"),
        ("exec: [scale, '']", "''"),
        ("launch: vllm --api-key s3cret", "text"),
        ("launch: {command: vllm --api-key s3cret}", "text"),
        ("launch: {}", "a mapping with 0 keys"),
        ("launch: {command: [vllm], start_s: 5m}", "'5m'"),
    ],
)
def test_errors_repeat_no_word_of_a_command(text, got):
    """It may hold a password, and the console shows why a reload was refused."""
    with pytest.raises(ConfigError) as refused:
        scaling(text)
    assert refused.value.got == got


def test_launched_engines_are_a_discovery_source():
    """One of several pools may have no other; a second source is refused."""
    pool = "pools: [{name: a, autoscaling: {launch: {command: [x]}}MORE}]"
    assert read(pool.replace("MORE", "")).pools[0].autoscaling.launch.command == ("x",)
    with pytest.raises(ConfigError, match=r"endpoints and autoscaling\.launch"):
        read(pool.replace("MORE", ", endpoints: ['127.0.0.1:1']"))


def test_scale_to_zero_without_a_queue_is_a_warning():
    """The first request after a while would be refused while an engine starts."""
    text = (
        "pool: {endpoints: ['127.0.0.1:1'], autoscaling: {min: MIN}}\nflow_control: {enabled: ON}"
    )
    warnings = list(lint.find_warnings(read(text.replace("MIN", "0").replace("ON", "false"))))
    assert any("flow_control.enabled" in warning for warning in warnings)
    for low, on in (("1", "false"), ("0", "true")):
        assert not list(lint.find_warnings(read(text.replace("MIN", low).replace("ON", on))))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("max: 3", "0 to 3 by adaptive; others act on the number, from /metrics or KEDA's scaler"),
        ("launch: {command: [vllm, serve]}", "0 to 1 by adaptive; starts and ends engines"),
        ("exec: [s, '{replicas}']", "0 to 1 by adaptive; runs s {replicas}"),
    ],
)
def test_check_names_the_actuator(text, line):
    """One line for each pool that is scaled."""
    lines = list(check.describe_pools(read(f"pool: {{autoscaling: {{{text}}}}}")))
    assert f"replicas    {line}" in lines


def test_check_names_the_scaled_object(monkeypatch):
    """And the actuator, without saying that readiness is the leader's."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    text = "pool: {autoscaling: {target: {kind: StatefulSet, name: x, namespace: n}}}"
    lines = "\n".join(check.describe_pools(read(text)))
    assert "patches statefulsets/scale of x in namespace n, by the holder of a Lease" in lines
    assert "ready " not in lines
