"""Objects that kustomize renders from the base and from every overlay."""

import copy
import hashlib
import itertools
import json
import os
import re

import pytest

from tests.e2e import installation
from tests.manifests import parts, rules, tools

EVERYTHING = tools.ROOT / "tests/manifests/everything"
SHARED = tools.ROOT / "tests/manifests/shared_pickers"
SCALERS = tools.ROOT / "tests/manifests/shared_scalers"
KEDA = tools.ROOT / "tests/manifests/keda"
FOLDERS = [
    tools.MANIFESTS / "base",
    EVERYTHING,
    *sorted(path.parent for path in tools.MANIFESTS.glob("overlays/*/kustomization.yaml")),
]


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def folder(request):
    return request.param


@pytest.fixture
def documents(folder):
    return tools.kustomized(folder)


def test_objects_are_valid(documents):
    """They hold to the schemas, to each other and to what the program does."""
    assert not list(rules.wrong(documents))


def test_two_pickers_serve_and_none_leads(documents, folder):
    """Two replicas, or an autoscaler that keeps two; leader election only where it was asked for."""
    (deployment,) = parts.of_kind(documents, "Deployment", "extproc")
    scaled = parts.of_kind(documents, "HorizontalPodAutoscaler")
    replicas = [item["spec"]["minReplicas"] for item in scaled] or [deployment["spec"]["replicas"]]
    assert replicas == [2]
    assert ("replicas" in deployment["spec"]) != bool(scaled)
    ((pod, container),) = parts.pickers(documents)
    leads = parts.resolved(documents, pod, container).cluster.leader_election
    assert leads is (folder == EVERYTHING)
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == (
        "100%" if leads else 0
    )
    budget = parts.only(documents, "PodDisruptionBudget", "extproc")["spec"]["maxUnavailable"]
    assert budget == ("100%" if leads else 1)


def test_permissions_are_minimal(documents, folder):
    """Roles of the namespace with the literal table; more only with the components for more."""
    assert not parts.of_kind(documents, "ClusterRole")
    more = {**rules.SLICES, **rules.SCALES} if folder == EVERYTHING else {}
    assert rules.granted(documents) == {**rules.ALLOWED, **more}


@pytest.mark.parametrize("rendered", [*FOLDERS, SHARED, SCALERS, KEDA], ids=lambda path: path.name)
def test_kustomize_gives_no_warning(rendered):
    """No manifest uses what kustomize is about to drop."""
    assert tools.warnings(rendered) == ""


def followed(documents):
    """Objects of the cluster that the picker of these objects follows."""
    ((pod, container),) = parts.pickers(documents)
    return parts.resolved(documents, pod, container).pool.kubernetes


def test_extproc_flags_name_the_pool(documents):
    """By the name of the InferencePool that is there, or by labels; in its own namespace."""
    requested = followed(documents)
    assert bool(requested.inference_pool) != bool(requested.selector)
    for pool in parts.of_kind(documents, "InferencePool"):
        assert requested.inference_pool == pool["metadata"]["name"]
    assert requested.namespace == parts.NAMESPACE
    ((_, container),) = parts.pickers(documents)
    (variable,) = container["env"]
    assert variable["name"] == "NAMESPACE"
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"


def test_engines_are_reachable(documents):
    """The policy lets the picker out to the pool's ports."""
    wanted = set(followed(documents).ports)
    for pool in parts.of_kind(documents, "InferencePool"):
        wanted |= {item["number"] for item in pool["spec"]["targetPorts"]}
    for policy in parts.of_kind(documents, "NetworkPolicy"):
        out = {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]}
        assert wanted <= out


def test_collectors_of_traces_are_reachable(documents):
    """Each policy lets spans out, to any address: those of the picker, and of an Envoy of ours."""
    for policy in parts.of_kind(documents, "NetworkPolicy"):
        anywhere = [rule["ports"] for rule in policy["spec"]["egress"] if "to" not in rule]
        assert {"port": 4317, "protocol": "TCP"} in itertools.chain(*anywhere)


def test_network_policy_admits_data_planes(documents):
    """The policy allows some client on every port that the Service offers."""
    service = parts.only(documents, "Service", "extproc")
    ((_, container),) = parts.pickers(documents)
    policy = parts.only(documents, "NetworkPolicy", "extproc")
    numbers = {}
    ((pod, _),) = parts.pickers(documents)
    for item in pod["containers"]:
        numbers |= parts.ports(item)
    offered = {numbers[port["targetPort"]] for port in service["spec"]["ports"]}
    allowed = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert offered <= allowed
    assert parts.ports(container)["health"] in allowed


def test_load_balancer_health_checks_use_served_ports(documents):
    """A health check of the picker asks its health port, one of the pool a target port."""
    ((_, container),) = parts.pickers(documents)
    for check in parts.of_kind(documents, "HealthCheckPolicy"):
        requested = check["spec"]["default"]["config"]
        if check["spec"]["targetRef"]["kind"] == "Service":
            assert requested["grpcHealthCheck"]["port"] == parts.ports(container)["health"]
        else:
            pool = parts.only(documents, "InferencePool")
            assert {"number": requested["httpHealthCheck"]["port"]} in pool["spec"]["targetPorts"]


def test_gateway_timeouts_allow_long_answers(documents):
    """No route has a time limit of its own."""
    for route in parts.of_kind(documents, "HTTPRoute"):
        for rule in route["spec"]["rules"]:
            assert rule.get("timeouts", {"request": "0s"}) == {"request": "0s"}


def edge():
    """Changes of the shipped Envoy file to requests in front of the picker."""
    path = tools.ROOT / "envoy/original-dst.yaml"
    manager = installation.manager(tools.loaded(path.read_text()))
    return manager, manager["http_filters"][0]["typed_config"]


def gateway_log(manager):
    """Fields of the shipped access log, the decision from the header: the filters take no such metadata."""
    fields = manager["access_log"][0]["typed_config"]["log_format"]["json_format"]
    return {**fields, "decision": "%RESP(X-EXTPROC-DECISION)%"}


def test_gateways_remove_the_same_headers_as_the_shipped_files():
    """Gateways remove them before the picker where they can; uploads have the same time limit."""
    manager, mutation = edge()
    named = [item["remove"] for item in mutation["mutations"]["request_mutations"]]
    documents = tools.kustomized(tools.MANIFESTS / "overlays/envoy-gateway")
    policy = parts.only(documents, "ClientTrafficPolicy")["spec"]
    assert sorted(policy["headers"]["earlyRequestHeaders"]["remove"]) == sorted(named)
    # The API takes no more than this.
    assert len(named) <= 16
    times = policy["timeout"]["http"]
    assert times["requestReceivedTimeout"] == manager["request_timeout"]
    assert times["requestHeadersReceivedTimeout"] == manager["request_headers_timeout"]
    assert policy["headers"]["requestID"] == "PreserveOrGenerate"
    assert manager["preserve_external_request_id"]
    documents = tools.kustomized(tools.MANIFESTS / "overlays/istio")
    spec = parts.only(documents, "EnvoyFilter")["spec"]
    first, times = (entry["patch"]["value"]["typed_config"] for entry in spec["configPatches"])
    assert first["@type"] == mutation["@type"]
    removed = [single["remove"] for single in first["mutations"]["request_mutations"]]
    assert sorted(removed) == sorted(named)
    del times["@type"]
    shipped = copy.deepcopy(manager)
    shipped["access_log"][0]["typed_config"]["log_format"]["json_format"] = gateway_log(manager)
    assert times == {key: shipped[key] for key in times}
    assert {"access_log", "local_reply_config"} <= times.keys()
    gateway = parts.only(documents, "Gateway")["metadata"]["name"]
    assert gateway in spec["workloadSelector"]["labels"].values()


def test_istio_rules_are_for_the_services_of_picker_and_pool():
    """TLS on the port of the picker alone; the Service of the pool has the name that Istio gives it."""
    documents = tools.kustomized(tools.MANIFESTS / "overlays/istio")
    pool = parts.only(documents, "InferencePool")
    picker, name = pool["spec"]["endpointPickerRef"], pool["metadata"]["name"]
    rules_by_host = {
        item["spec"]["host"]: item["spec"]["trafficPolicy"]
        for item in parts.of_kind(documents, "DestinationRule")
    }
    service = f"{name}-ip-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    assert rules_by_host.keys() == {picker["name"], service}
    (port,) = rules_by_host[picker["name"]]["portLevelSettings"]
    assert port["port"] == picker["port"]
    assert set(rules_by_host[picker["name"]]) == {"portLevelSettings"}


def test_gateways_write_the_access_log_of_the_shipped_files():
    """All of it, but agentgateway, which adds what it does not log by itself."""
    manager, _ = edge()
    log_format = gateway_log(manager)
    documents = tools.kustomized(tools.MANIFESTS / "overlays/kgateway")
    (log,) = parts.only(documents, "HTTPListenerPolicy")["spec"]["accessLog"]
    assert log["fileSink"]["jsonFormat"] == log_format
    documents = tools.kustomized(tools.MANIFESTS / "overlays/envoy-gateway")
    (log,) = parts.only(documents, "EnvoyProxy")["spec"]["telemetry"]["accessLog"]["settings"]
    assert log["format"]["json"] == log_format
    reference = parts.only(documents, "Gateway")["spec"]["infrastructure"]["parametersRef"]
    assert reference["name"] == parts.only(documents, "EnvoyProxy")["metadata"]["name"]
    documents = tools.kustomized(tools.MANIFESTS / "overlays/agentgateway")
    log = parts.only(documents, "AgentgatewayPolicy")["spec"]["frontend"]["accessLog"]
    for attribute in log["attributes"]["add"]:
        ((header,),) = (re.findall(r'headers\["(.+?)"\]', attribute["expression"]),)
        assert f"({header.upper()})" in log_format[attribute["name"]]


def test_envoy_gateway_is_patched_where_it_has_no_policy():
    """Errors and request ids are those of the shipped files, on the listener of the Gateway."""
    manager, _ = edge()
    documents = tools.kustomized(tools.MANIFESTS / "overlays/envoy-gateway")
    policy, gateway = parts.only(documents, "EnvoyPatchPolicy"), parts.only(documents, "Gateway")
    name = gateway["metadata"]["name"]
    assert policy["spec"]["targetRef"]["name"] == name
    (listener,) = gateway["spec"]["listeners"]
    patched = {}
    for patch in policy["spec"]["jsonPatches"]:
        assert patch["name"] == f"models/{name}/{listener['name']}"
        folder, _, field = patch["operation"]["path"].rpartition("/")
        assert folder == "/default_filter_chain/filters/0/typed_config"
        patched[field] = patch["operation"]["value"]
    assert set(patched) == {"always_set_request_id_in_response", "local_reply_config"}
    assert patched == {field: manager[field] for field in patched}


def test_envoy_gateway_has_the_limits_of_the_shipped_files():
    """Those of the cluster of engines in a policy, those of extproc's in the runtime of Envoy."""
    config = tools.loaded((installation.SHIPPED / "original-dst.yaml").read_text())
    documents = tools.kustomized(tools.MANIFESTS / "overlays/envoy-gateway")
    policy = parts.only(documents, "BackendTrafficPolicy")["spec"]
    engines = installation.cluster(config, "engines")
    (limits,) = engines["circuit_breakers"]["thresholds"]
    assert policy["circuitBreaker"] == {
        "maxConnections": limits["max_connections"],
        "maxPendingRequests": limits["max_pending_requests"],
        "maxParallelRequests": limits["max_requests"],
    }
    (options,) = engines["typed_extension_protocol_options"].values()
    idle = options["common_http_protocol_options"]["idle_timeout"]
    assert policy["timeout"]["http"]["connectionIdleTimeout"] == idle
    (patch,) = parts.only(documents, "EnvoyProxy")["spec"]["bootstrap"]["jsonPatches"]
    pool = parts.only(documents, "InferencePool")["metadata"]["name"]
    name = f"envoy.clusters.endpointpicker_{pool}_models_ext_proc"
    assert patch["path"].rpartition("/")[2] == f"circuit_breakers.{name}.default"
    (limits,) = installation.cluster(config, "extproc")["circuit_breakers"]["thresholds"]
    # AI Gateway retries no stream.
    assert patch["value"] | {"max_retries": limits["max_retries"]} == limits


def test_policies_are_for_the_gateway_of_their_overlay():
    """Under its name and kind."""
    for overlay, kind in (
        ("agentgateway", "AgentgatewayPolicy"),
        ("envoy-gateway", "BackendTrafficPolicy"),
        ("envoy-gateway", "ClientTrafficPolicy"),
        ("kgateway", "HTTPListenerPolicy"),
    ):
        documents = tools.kustomized(tools.MANIFESTS / "overlays" / overlay)
        (target,) = parts.only(documents, kind)["spec"]["targetRefs"]
        gateway = parts.only(documents, "Gateway")
        assert (target["kind"], target["name"]) == ("Gateway", gateway["metadata"]["name"])


def test_cluster_wide_overlays_have_read_permissions_only():
    """The same rights in the whole cluster, for an account of their own namespace."""
    documents = tools.kustomized(SHARED)
    assert not list(rules.wrong(documents))
    assert not parts.of_kind(documents, "Role")
    assert rules.granted(documents) == rules.ALLOWED
    (subject,) = parts.only(documents, "ClusterRoleBinding")["subjects"]
    account = parts.only(documents, "ServiceAccount")["metadata"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    ((pod, container),) = parts.pickers(documents)
    assert parts.resolved(documents, pod, container).cluster.discover_pools == "cluster"
    assert parts.parsed(container["args"]).pool_name is None


def test_cluster_wide_scaling_may_write_replicas_only():
    """Objects anywhere, the Lease and what was learned in their own namespace."""
    documents = tools.kustomized(SCALERS)
    assert not list(rules.wrong(documents))
    assert rules.granted(documents) == {**rules.ALLOWED, **rules.SCALES}
    (role,) = parts.of_kind(documents, "Role")
    assert {item for rule in role["rules"] for item in rule["resources"]} == {
        "leases",
        "configmaps",
    }
    account = parts.only(documents, "ServiceAccount")["metadata"]
    for binding in parts.of_kind(documents, "ClusterRoleBinding"):
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    ((pod, container),) = parts.pickers(documents)
    settings = parts.resolved(documents, pod, container)
    assert settings.cluster.discover_pools == "cluster"
    (rule,) = settings.autoscaling.discovered_pools
    assert rule.annotations


def test_component_metrics_auth_guards_metrics_by_tokens(tmp_path):
    """The picker reviews tokens, and Prometheus sends one of an account that may read the path only."""
    folder = place(tmp_path / "one", "monitoring", "metrics-auth", namespace="one")
    documents = tools.kustomized(folder)
    assert not list(rules.wrong(documents))
    assert rules.granted(documents) == {**rules.ALLOWED, **rules.REVIEWS}
    ((pod, container),) = parts.pickers(documents)
    assert parts.resolved(documents, pod, container).server.metrics_endpoint_auth
    assert rules.scraped_paths(documents) == ["/metrics"]


def test_component_peer_sync_redis_lets_extproc_reach_redis(tmp_path):
    """The policy of the base does not allow the port of a store, the component does."""
    usual, with_store = (
        parts.only(
            tools.kustomized(place(tmp_path / name, *components, names=False)), "NetworkPolicy"
        )
        for name, components in (("base", ()), ("store", ("peer-sync-redis",)))
    )
    rule = {"ports": [{"port": 6379, "protocol": "TCP"}]}
    assert with_store["spec"]["egress"] == [*usual["spec"]["egress"], rule]


def place(folder, *components, namespace="", names=True):
    """A kustomization of the base with components, in a namespace of its own."""
    folder.mkdir()
    described = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        **({"namespace": namespace} if namespace else {}),
        "resources": [os.path.relpath(tools.MANIFESTS / "base", folder)],
        "components": [
            os.path.relpath(tools.MANIFESTS / "components" / component, folder)
            for component in components
        ],
        "transformers": [os.path.relpath(NAMES, folder)] if names else [],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(described))
    return folder


NAMES = tools.MANIFESTS / "components/cluster-wide/names"
CLUSTER_WIDE = ("cluster-wide", "cluster-wide-engine-autoscaling")
WITHOUT_NAMESPACE = (*CLUSTER_WIDE, "metrics-auth")


def test_cluster_wide_installations_share_no_names(tmp_path):
    """Objects without a namespace end with that of their installation, and so do references."""
    shown = []
    for namespace in ("one", "other"):
        folder = place(tmp_path / namespace, *WITHOUT_NAMESPACE, namespace=namespace)
        documents = tools.kustomized(folder)
        assert not list(rules.wrong(documents))
        names = [(document["kind"], document["metadata"]["name"]) for document in documents]
        shown.append({name for name in names if name[0].startswith("Cluster")})
        for binding in parts.of_kind(documents, "ClusterRoleBinding"):
            assert ("ClusterRole", binding["roleRef"]["name"]) in names
            assert binding["subjects"][0]["namespace"] == namespace
    assert [len(item) for item in shown] == [8, 8]
    assert not shown[0] & shown[1]
    assert ("ClusterRole", "extproc:one") in shown[0]


@pytest.mark.parametrize(
    ("components", "namespace", "reason"),
    [
        (CLUSTER_WIDE[1:], "one", "no matches for Id ClusterRole"),
        (CLUSTER_WIDE[::-1], "one", "no matches for Id ClusterRole"),
        (CLUSTER_WIDE, "", "metadata.namespace"),
    ],
)
def test_cluster_wide_components_fail_without_a_namespace(tmp_path, components, namespace, reason):
    """One after the other, and a namespace for the names: without them nothing is rendered."""
    folder = place(tmp_path / "one", *components, namespace=namespace)
    assert reason in tools.refusal(folder)


def test_cluster_wide_names_without_their_namespace_can_not_be_applied(tmp_path):
    """The API server takes no % in names of RBAC: no rights are shared for want of a transformer."""
    folder = place(tmp_path / "one", *CLUSTER_WIDE, namespace="one", names=False)
    documents = tools.kustomized(folder)
    names = [
        document["metadata"]["name"]
        for document in documents
        if document["kind"].startswith("Cluster")
    ]
    assert len(names) == 4
    assert all("%" in name for name in names)


def test_keda_overlays_have_no_permissions_and_the_scaler_port():
    """The scaler's port is served and reached, and both sides have the same bounds."""
    documents = tools.kustomized(KEDA)
    assert not list(rules.wrong(documents))
    assert rules.granted(documents) == rules.ALLOWED
    ((pod, container),) = parts.pickers(documents)
    settings = parts.resolved(documents, pod, container)
    spec = parts.only(documents, "ScaledObject")["spec"]
    scaling = settings.pool.autoscaling
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (scaling.min, scaling.max)
    (trigger,) = spec["triggers"]
    host, _, port = trigger["metadata"]["scalerAddress"].partition(":")
    service = parts.only(documents, "Service", host.partition(".")[0])
    assert int(port) == service["spec"]["ports"][0]["port"] == settings.autoscaling.keda.port


@pytest.mark.parametrize("folder", [*FOLDERS, SHARED, SCALERS, KEDA], ids=lambda path: path.name)
def test_replicas_find_and_reach_each_other(folder):
    """By a Service without an address, of the port of their pages, on which the policy lets them."""
    documents = tools.kustomized(folder)
    ((pod, container),) = parts.pickers(documents)
    settings = parts.resolved(documents, pod, container)
    (peer,) = settings.peer_sync.peers
    assert not settings.autoscaling.peers
    host, _, port = peer.partition(":")
    service = parts.only(documents, "Service", host)["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert int(port) == service["ports"][0]["port"] == settings.server.metrics_port
    policy = parts.only(documents, "NetworkPolicy", "extproc")["spec"]
    assert parts.are_peers_allowed(policy, int(port))


def test_replicas_that_scale_keep_what_they_learned():
    """The ConfigMap that the configuration names is the one that the rights name."""
    documents = tools.kustomized(EVERYTHING)
    ((pod, container),) = parts.pickers(documents)
    settings = parts.resolved(documents, pod, container)
    assert rules.named(documents) == [[settings.autoscaling.state]]


def test_components_of_monitoring_have_the_files_of_the_chart():
    """Alerts and dashboards are the same objects in both installations."""
    documents = tools.kustomized(EVERYTHING)
    rule = parts.only(documents, "PrometheusRule")
    text = (tools.CHART / "files/alerts/prometheusrule.yaml").read_text()
    assert rule["spec"] == tools.loaded(text)["spec"]
    shown = {}
    for item in parts.of_kind(documents, "ConfigMap"):
        if item["metadata"].get("labels", {}).get("grafana_dashboard") == "1":
            shown |= item["data"]
    files = {path.name: path for path in (tools.CHART / "files/dashboards").glob("*.json")}
    assert shown == {name: path.read_text() for name, path in files.items()}


#: Rows of the guide for Helm: overlay, files and values.
GATEWAYS = re.findall(
    r"^\| \[`([a-z-]+)`\]\(gateways/[a-z-]+\.md\) \| (.*) \| (.*) \|$",
    (tools.ROOT / "docs/guides/install-helm.md").read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(("overlay", "files", "values"), GATEWAYS, ids=lambda text: text[:14])
def test_the_chart_takes_the_place_of_an_overlay(overlay, files, values):
    """With the files and values of the guide, its objects fit those of the overlay."""
    folder = tools.MANIFESTS / "overlays" / overlay
    resources = tools.loaded((folder / "kustomization.yaml").read_text())["resources"]
    assert re.findall("`(.*?)`", files) == [name for name in resources if name != "../../base"]
    wanted = tools.kustomized(folder)
    sections = [tools.loaded(text) for text in re.findall("`(.*?)`", values)]
    flags = [
        part
        for section in sections
        for key, value in section.items()
        for part in ("--set-json", f"{key}={json.dumps(value)}")
    ]
    create = "pool.name=vllm,pool.create.enabled=true,pool.create.matchLabels.app=vllm"
    chart = tools.charted("--set", f"fullnameOverride=extproc,{create}", *flags)
    assert _connected(chart) == _connected(wanted)


def _connected(documents):
    """Facts that patches of overlays change, and names that gateways refer to."""
    labels = parts.only(documents, "Deployment", "extproc")["spec"]["template"]["metadata"][
        "labels"
    ]
    pool = parts.only(documents, "InferencePool")
    policy = parts.only(documents, "NetworkPolicy", "extproc")["spec"]
    ((_, container),) = parts.pickers(documents)
    return {
        "fallback": parts.parsed(container["args"]).fallback_endpoints,
        "injection": labels.get("sidecar.istio.io/inject"),
        "address": parts.only(documents, "Service", "extproc")["spec"].get("clusterIP"),
        "clients": policy["ingress"][0].get("from") or "all",
        "pool": (pool["metadata"]["name"], pool["spec"]["endpointPickerRef"]["name"]),
    }


def test_the_guide_for_helm_lists_every_gateway():
    """Each overlay with an InferencePool has a row."""
    overlays = (tools.MANIFESTS / "overlays").glob("*/gateway.yaml")
    assert sorted(row[0] for row in GATEWAYS) == sorted(path.parent.name for path in overlays)
