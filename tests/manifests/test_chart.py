"""Objects that helm renders from the chart."""

import json
import subprocess

import pytest
import yaml

from extproc.config.settings import Settings
from tests.manifests import parts, rules, tools

#: Everything that can be turned on.
ALL_ON = tools.ROOT / "tests/manifests/all_on.yaml"

BY_SELECTOR = ("--set", "pool.selector.app=vllm", "--set", "pool.selector.tier=gpu")

SETS = {
    "defaults": (),
    "all on": ("--values", str(ALL_ON)),
    "by selector": BY_SELECTOR,
    "every pool": ("--set", "pool.every=namespace"),
    "whole cluster": ("--set", "pool.every=cluster", "--set", "leaderElection.enabled=true"),
    "every engine": (
        *("--set", "pool.every=cluster", "--set", "engineAutoscaling.enabled=true"),
        *("--set-json", 'config.autoscaling.discovered_pools=[{"pools": ["*"], "max": 4}]'),
    ),
    "least": (
        *("--set", "networkPolicy.enabled=false", "--set", "podDisruptionBudget.enabled=false"),
        *("--set", "tls.enabled=false"),
    ),
}

OFF = ("--set", "peerSync.enabled=false")
SCALES = ("--set", "engineAutoscaling.enabled=true")


@pytest.fixture(params=SETS.values(), ids=SETS)
def arguments(request):
    return request.param


@pytest.fixture
def documents(arguments):
    return tools.charted(*arguments)


def picker(*arguments):
    """Pod spec and container."""
    (result,) = parts.pickers(tools.charted(*arguments))
    return result


def clusterwide(documents):
    return parts.of_kind(documents, "ClusterRole")


def test_objects_are_valid(documents):
    """They hold to the schemas, to each other and to what the program does."""
    assert not list(rules.wrong(documents))


def test_permissions_are_minimal(arguments, documents):
    """The literal table, and more only where it was asked for."""
    slices = rules.SLICES if arguments == SETS["all on"] else {}
    leases = rules.LEASES if "leaderElection.enabled=true" in arguments or slices else {}
    scales = rules.SCALES if arguments in (SETS["all on"], SETS["every engine"]) else {}
    reviews = rules.REVIEWS if arguments == SETS["all on"] else {}
    granted = {**rules.ALLOWED, **slices, **leases, **scales, **reviews}
    assert rules.granted(documents) == granted
    wide = {
        rule["resources"][0]
        for item in clusterwide(documents)
        for rule in item["rules"]
        if "resources" in rule
    }
    assert not wide & {"leases", "configmaps"}
    everywhere = {"pods"} if "pool.every=cluster" in arguments else set()
    assert wide & {"pods"} == everywhere
    assert not reviews or wide == {resource for _, resource in rules.REVIEWS}
    assert bool(wide) == bool(everywhere or reviews)


def test_the_configuration_is_valid(documents):
    """The file that the values make is read by the strict reader."""
    (result,) = parts.pickers(documents)
    assert isinstance(parts.resolved(documents, *result), Settings)


def test_configuration_values_reach_the_file():
    """Sections of `config` are those of the file."""
    settings = parts.resolved(tools.charted(*SETS["all on"]), *picker(*SETS["all on"]))
    assert settings.scheduling.unknown_model == "reject"
    assert settings.scrape.idle_interval_s == 1.0


def test_the_pool_has_the_release_s_name_or_its_own():
    """Without a name the pool is called as the release is."""
    assert parts.parsed(picker()[1]["args"]).pool_name == "release"
    assert parts.parsed(picker("--set", "pool.name=vllm")[1]["args"]).pool_name == "vllm"


def test_a_selector_needs_no_pool():
    """Labels and ports take the place of the name."""
    requested = parts.parsed(picker(*BY_SELECTOR)[1]["args"])
    assert requested.pool_name is None
    assert requested.endpoint_selector == "app=vllm,tier=gpu"
    assert requested.endpoint_target_ports == "8000"


@pytest.mark.parametrize("scope", ["namespace", "cluster"])
def test_all_pools_are_configured_in_the_file(scope):
    """No single pool is named then."""
    values = ("--set", f"pool.every={scope}", "--set", "config.log.level=debug")
    result = picker(*values)
    requested = parts.parsed(result[1]["args"])
    assert (requested.pool_name, requested.endpoint_selector) == (None, None)
    settings = parts.resolved(tools.charted(*values), *result)
    assert (settings.cluster.discover_pools, settings.log.level) == (scope, "debug")
    assert settings.cluster.match_rules == ()


def test_match_rules_come_from_a_value():
    """The list of rules goes into the picker's configuration."""
    rule = "pool.matchRules[0].pools={a/*},pool.matchRules[0].hosts={*.a.example}"
    values = ("--set", "pool.every=cluster", "--set", rule)
    settings = parts.resolved(tools.charted(*values), *picker(*values))
    (result,) = settings.cluster.match_rules
    assert (result.pools, result.hosts) == (("a/*",), ("*.a.example",))


def test_a_token_of_a_secret_guards_debug_pages():
    """The Secret is mounted where the configuration names its file."""
    values = ("--set", "adminToken.secretName=debug,config.server.enable_cert_reload=false")
    documents = tools.charted(*values)
    pod = parts.only(documents, "Deployment")["spec"]["template"]["spec"]
    (mount,) = [item for item in pod["containers"][0]["volumeMounts"] if item["name"] == "admin"]
    (volume,) = [entry for entry in pod["volumes"] if entry["name"] == "admin"]
    assert volume["secret"]["secretName"] == "debug"
    settings = parts.resolved(documents, *picker(*values))
    assert settings.server.admin_token_file == f"{mount['mountPath']}/token"
    assert not settings.server.enable_cert_reload


def test_a_value_guards_metrics_by_tokens():
    """The picker reviews tokens, and Prometheus sends one of an account that may read the path only."""
    values = ("--set", "monitoring.auth.enabled=true,monitoring.serviceMonitor.enabled=true")
    documents = tools.charted(*values)
    assert parts.resolved(documents, *picker(*values)).server.metrics_endpoint_auth
    assert rules.scraped_paths(documents) == ["/metrics"]
    assert not parts.of_kind(tools.charted(*values, "--set", "rbac.create=false"), "ClusterRole")
    (monitor,) = parts.of_kind(
        tools.charted("--set", "monitoring.serviceMonitor.enabled=true"), "ServiceMonitor"
    )
    assert "authorization" not in monitor["spec"]["endpoints"][0]


def test_releases_that_select_pods_have_leases_of_their_own():
    """A Lease for all of them would let the replicas of one release alone be ready."""

    def lease(*flags, release="release"):
        values = ("--set", "leaderElection.enabled=true", *BY_SELECTOR, *flags)
        documents = tools.charted(*values, release=release)
        ((pod, container),) = parts.pickers(documents)
        return parts.resolved(documents, pod, container).cluster.lease.name

    assert lease() == "epp-models-release-extproc.llm-d.ai"
    assert lease(release="other") == "epp-models-other-extproc.llm-d.ai"
    assert lease("--set", "config.cluster.lease.name=mine") == "mine"
    assert (
        lease("--set", "config.pool.name=vllm") == ""
    )  # the name of the pool is in that of the Lease


def test_names_that_look_like_numbers_stay_names():
    """YAML would read them as numbers, which the API server refuses."""
    names = (
        *("nameOverride=101", "fullnameOverride=extproc", "serviceAccount.name=102"),
        *("tls.secretName=103", "adminToken.secretName=104", "priorityClassName=105"),
        *("config.autoscaling.state=106", "pool.create.matchLabels.app=107"),
    )
    switches = "engineAutoscaling.enabled=true,leaderElection.enabled=true,pool.create.enabled=true"
    flags = [part for name in names for part in ("--set-string", name)]
    documents = tools.charted(*flags, "--set", switches, release="20261130")
    assert not list(rules.wrong(documents))
    assert parts.only(documents, "InferencePool")["metadata"]["name"] == "20261130"
    assert rules.named(documents) == [["106"]]


def test_chart_mounts_extra_volumes():
    """Volumes and mounts of the values reach pod and container."""
    pod, container = picker(*SETS["all on"])
    assert {"name": "redis", "secret": {"secretName": "redis"}} in pod["volumes"]
    mount = {"name": "redis", "mountPath": "/etc/redis", "readOnly": True}
    assert mount in container["volumeMounts"]


def test_xds_is_off_by_default():
    """Then it has a port of container and Service, and the policy lets Envoys in."""
    assert parts.parsed(picker()[1]["args"]).xds is None
    assert "xds" not in parts.ports(picker()[1])
    documents = tools.charted(*SETS["all on"])
    container = picker(*SETS["all on"])[1]
    port = int(parts.parsed(container["args"]).xds_port)
    assert parts.ports(container)["xds"] == port
    service = parts.only(documents, "Service", "the-picker")["spec"]
    assert port in {item["port"] for item in service["ports"]}
    rule = parts.only(documents, "NetworkPolicy")["spec"]["ingress"][0]
    assert port in {entry["port"] for entry in rule["ports"]}


def test_the_pool_names_its_picker():
    """An InferencePool that the chart makes points back at the chart's Service."""
    documents = tools.charted(*SETS["all on"])
    pool = parts.only(documents, "InferencePool")
    assert pool["metadata"]["name"] == parts.parsed(picker(*SETS["all on"])[1]["args"]).pool_name
    service = parts.only(documents, "Service", "the-picker")
    assert pool["spec"]["endpointPickerRef"]["name"] == service["metadata"]["name"]


def test_the_grace_period_follows_the_drain():
    """A longer drain is given the time it takes, by flag and by grace period."""
    pod, container = picker("--set", "drainTimeoutSeconds=120")
    assert parts.parsed(container["args"]).drain_timeout == "120s"
    assert pod["terminationGracePeriodSeconds"] > 120


@pytest.mark.parametrize(
    ("values", "mount", "cert", "secure", "protocol"),
    [
        ((), False, None, None, "http2"),
        (("--set", "tls.secretName=cert"), True, "/etc/extproc-tls", None, "http2"),
        (("--set", "tls.enabled=false"), False, None, "false", "kubernetes.io/h2c"),
    ],
    ids=["self-made", "secret", "plaintext"],
)
def test_tls(values, mount, cert, secure, protocol):
    """A Secret is mounted where there is one, and the Service says what is spoken."""
    pod, container = picker(*values)
    requested = parts.parsed(container["args"])
    assert (requested.cert_path, requested.secure_serving) == (cert, secure)
    assert any("secret" in volume for volume in pod["volumes"]) is mount
    port = parts.only(tools.charted(*values), "Service", "release-extproc")["spec"]["ports"][0]
    assert port["appProtocol"] == protocol


def test_an_autoscaler_takes_the_replicas():
    """The Deployment has no number of its own where an autoscaler has one."""
    documents = tools.charted(*SETS["all on"])
    assert "replicas" not in parts.only(documents, "Deployment")["spec"]
    assert parts.only(tools.charted(), "Deployment")["spec"]["replicas"] == 2


@pytest.mark.parametrize(
    ("values", "exchange", "count"),
    [
        ((), True, True),
        (OFF, False, False),
        (("--set", "replicaCount=1"), False, False),
        (("--set", "replicaCount=1", "--set", "autoscaling.enabled=true"), True, True),
        (("--set", "config.peer_sync.url=redis://redis"), False, False),
        (SCALES, True, True),
        ((*SCALES, *OFF), False, True),
        (SETS["all on"], False, True),
        (SETS["every engine"], True, True),
    ],
)
def test_replicas_find_and_reach_each_other(values, exchange, count):
    """By a Service without an address, of the port of their pages, on which the policy lets them.

    They exchange requests unless it is off or Redis is used, and count each other's where they scale.
    """
    documents = tools.charted(*values)
    ((pod, container),) = parts.pickers(documents)
    settings = parts.resolved(documents, pod, container)
    assert bool(settings.peer_sync.peers) is exchange
    peers = settings.autoscaling.peers or settings.peer_sync.peers
    policy = parts.only(documents, "NetworkPolicy")["spec"]
    assert bool(peers) is count is parts.are_peers_allowed(policy, settings.server.metrics_port)
    services = [item["metadata"]["name"] for item in parts.of_kind(documents, "Service")]
    assert any(name.endswith("-peers") for name in services) is count
    for peer in peers:
        host, _, port = peer.partition(":")
        service = parts.only(documents, "Service", host)["spec"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
        assert int(port) == service["ports"][0]["port"] == settings.server.metrics_port


@pytest.mark.parametrize("values", ["all on", "every engine"])
def test_replicas_that_scale_keep_what_they_learned(values):
    """The ConfigMap that the configuration names is the one that the rights name."""
    documents = tools.charted(*SETS[values])
    ((pod, container),) = parts.pickers(documents)
    settings = parts.resolved(documents, pod, container)
    assert rules.named(documents) == [[settings.autoscaling.state]]


def test_values_of_autoscaling_override_defaults():
    """Peers and the name of the state may be one's own; the rights follow."""
    own = (
        "--set",
        "config.autoscaling.state=mine",
        "--set-json",
        'config.autoscaling.peers=["a:1"]',
    )
    documents = tools.charted("--set", "engineAutoscaling.enabled=true", *own)
    (result,) = parts.pickers(documents)
    output = parts.resolved(documents, *result).autoscaling
    assert (output.state, output.peers) == ("mine", ("a:1",))
    assert rules.named(documents) == [["mine"]]


def test_all_on_sets_every_value():
    """A new value is turned on in the tests, too."""
    known = yaml.safe_load((tools.CHART / "values.yaml").read_text())
    input_ = yaml.safe_load(ALL_ON.read_text())
    assert set(known) == set(input_)


def test_the_schema_knows_every_value():
    """And nothing else, but what Helm itself adds."""
    schema = json.loads((tools.CHART / "values.schema.json").read_text())
    values = yaml.safe_load((tools.CHART / "values.yaml").read_text())
    assert _in_schema(schema) - {("global",)} == _in_values(values)


#: Values whose inside is Kubernetes' or the picker's, and not listed in the schema one by one.
_FREE = {("resources",), ("config",)}


def _in_schema(schema, at=()):
    if at in _FREE:
        return set()
    inner = schema.get("properties", {}).items()
    return {(*at, key) for key, _ in inner}.union(*(_in_schema(v, (*at, k)) for k, v in inner))


def _in_values(values, at=()):
    if at in _FREE or not isinstance(values, dict):
        return set()
    inner = values.items()
    return {(*at, key) for key, _ in inner}.union(*(_in_values(v, (*at, k)) for k, v in inner))


def test_other_sources_of_engines_are_taken():
    """Fields of `config` that no value of the chart decides name the engines in place of `pool`."""
    service = ("--set", "config.pool.kubernetes.service=vllm", "--set", "rbac.endpointSlices=true")
    settings = parts.resolved(tools.charted(*service), *picker(*service))
    assert settings.pool.kubernetes.service == "vllm"


def test_only_pools_of_the_stable_group_are_created():
    """The other group has no version v1."""
    create = "pool.create.enabled=true,pool.create.matchLabels.app=vllm"
    error = tools.charted_refusal("--set", f"{create},pool.group=inference.networking.x-k8s.io")
    assert "expected pool.group inference.networking.k8s.io" in error


def test_a_pool_is_named_or_selected():
    """Two at once are an error that says so."""
    for more in ("pool.name=vllm", "pool.every=cluster"):
        assert "one of name, selector and every" in tools.charted_refusal(
            "--set", more, *BY_SELECTOR
        )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("pool.matchRules[0].pools={a/*}", "pool.matchRules: they are for"),
        ("pool.group=inference.networking.x-k8s.io,pool.every=cluster", "pool.group: inference"),
        ("pool.group=inference.networking.x-k8s.io,pool.selector.a=b", "pool.group: inference"),
    ],
)
def test_values_of_another_source_of_engines_are_refused(values, says):
    """They would do nothing: the error says what they are for."""
    assert says in tools.charted_refusal("--set", values)


def test_helm_lint_passes():
    """Warnings are errors here."""
    command = [
        *tools.need("helm lint"),
        "--strict",
        "--kube-version",
        tools.KUBERNETES,
        str(tools.CHART),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


def test_monitoring_objects_are_those_of_the_files():
    """Rules and dashboards reach the cluster as they stand in the chart, under labels of the values."""
    documents = tools.charted(*SETS["all on"])
    rule = parts.only(documents, "PrometheusRule")
    text = (tools.CHART / "files/alerts/prometheusrule.yaml").read_text()
    assert rule["spec"] == tools.loaded(text)["spec"]
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    shown = {}
    for item in parts.of_kind(documents, "ConfigMap"):
        if item["metadata"]["labels"].get("grafana_board") == "yes":
            shown |= item["data"]
    files = {path.name: path for path in (tools.CHART / "files/dashboards").glob("*.json")}
    assert shown.keys() == files.keys()
    for name, path in files.items():
        assert json.loads(shown[name]) == json.loads(path.read_text())
    defaults = tools.charted("--set", "monitoring.dashboards.enabled=true")
    labeled = [
        item
        for item in parts.of_kind(defaults, "ConfigMap")
        if item["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    assert len(labeled) == len(files)
