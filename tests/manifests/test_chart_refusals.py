"""Values that the chart refuses, with messages that name them."""

import re

import pytest

from tests.manifests import tools


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("replicas=3", "replicas"),
        ("replicaCount=0", "replicaCount"),
        ("image.tags=1", "tags"),
        ("image.digest=sha256:1", "digest"),
        ("fullnameOverride=7-extproc", "fullnameOverride"),
        ("pool.targetPorts={}", "targetPorts"),
        ("pool.targetPorts={70000}", "targetPorts"),
        ("pool.group=example.com", "group"),
        ("pool.create.enabled=true", "matchLabels"),
        ("drainTimeoutSeconds=-1", "drainTimeoutSeconds"),
        ("tls.secret=cert", "secret"),
        ("config.kind=ExtProcConfig", "config"),
        ("extraArgs={serve}", "extraArgs"),
        ("monitoring.serviceMonitor.interval=often", "interval"),
        ("podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
    ],
)
def test_values_outside_the_schema_are_refused(value, says):
    """The error names the value."""
    assert says in tools.charted_refusal("--set", value)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("server.grpc_port=9102", "fixes port 9002"),
        ("server.grpc_health_port=9103", "fixes port 9003"),
        ("server.metrics_port=9190", "fixes port 9090"),
        ("server.secure_serving=false", "set tls.enabled"),
        ("server.drain_timeout_s=90", "set drainTimeoutSeconds"),
        ("server.metrics_endpoint_auth=true", "set monitoring.auth.enabled"),
        ("cluster.leader_election=true", "set leaderElection.enabled"),
        ("xds.enabled=true", "set xds.enabled of the chart"),
        ("xds.port=18001", "set xds.port of the chart"),
        ("cluster.discover_pools=cluster", "set pool.every"),
        ("cluster.match_rules={}", "set pool.matchRules"),
        ("server.admin_token_file=/a,adminToken.secretName=b", "adminToken.secretName sets"),
        ("server.cert_path=/a,tls.secretName=b", "tls.secretName sets"),
        ("pool.name=a", "set pool.name of the chart"),
        ("pool.kubernetes.inference_pool=a", "set pool.name"),
        ("pool.kubernetes.namespace=a", "sets the namespace of the release"),
        ("pool.kubernetes.group=a", "set pool.group"),
        ("pool.kubernetes.selector.a=b,pool.selector.a=c", "set pool.selector"),
        ("pool.kubernetes.ports={1},pool.selector.a=b", "set pool.targetPorts"),
        ("pool.kubernetes.service=a,pool.selector.a=b", "pool.selector selects"),
        ("pool.endpoints={10.0.0.1:1},pool.selector.a=b", "pool.selector selects"),
        ("pools[0].name=a,pool.selector.a=b", "pool.selector selects"),
        ("autoscaling.keda.enabled=true", "no port for KEDA"),
    ],
)
def test_fields_that_the_chart_fixes_are_refused(field, says):
    """The error names the value of the chart, or says that there is none."""
    error = tools.charted_refusal("--set", f"config.{field}")
    assert field.startswith(re.search(r"config\.([\w.]+): ", error)[1])
    assert says in error


KV_EVENTS = "replicaCount=1,config.kv_events.enabled=true,config.kv_events.bind=tcp://*:"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("xds.enabled=true,xds.port=9090", "xds.port: 9090 is the port of metrics"),
        (f"{KV_EVENTS}9002", "config.kv_events.bind: 9002 is the port of ext_proc"),
        (
            f"{KV_EVENTS}5557,config.kv_events.ranks=2,xds.enabled=true,xds.port=5558",
            "config.kv_events.bind: 5558 is the port of xds.port",
        ),
        (
            "autoscaling.enabled=true,autoscaling.minReplicas=7",
            "autoscaling.minReplicas: 7 is more than maxReplicas, 6",
        ),
        (
            "podLabels.app\\.kubernetes\\.io/name=mine",
            "podLabels: the chart sets app.kubernetes.io/name",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(values, says):
    """Rendering fails, where objects would be refused or pods end at once."""
    assert says in tools.charted_refusal("--set", values)


def test_values_of_features_that_are_off_contradict_nothing():
    """A port or a number that is not used needs no correction."""
    assert tools.charted("--set", "xds.port=9090,autoscaling.minReplicas=7")


def test_null_sections_are_refused():
    """The error names the section."""
    assert "missing property 'config'" in tools.charted_refusal("--set-json", "config=null")
    assert "/config/peer_sync" in tools.charted_refusal("--set-json", 'config={"peer_sync": null}')
