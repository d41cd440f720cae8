"""The network policy of the chart: what it lets in and out, by values."""

import pytest
import yaml

from tests.manifests import parts, tools

#: Everything that can be turned on.
ALL_ON = tools.ROOT / "tests/manifests/all_on.yaml"

OFF = ("--set", "peerSync.enabled=false")


@pytest.mark.parametrize(
    ("values", "peers"),
    [
        ((), [{"podSelector": {}}]),
        (("--set", "pool.every=cluster"), [{"namespaceSelector": {}}]),
        (("--values", str(ALL_ON)), [{"podSelector": {"matchLabels": {"app": "vllm"}}}]),
    ],
    ids=["namespace", "cluster", "given"],
)
def test_engines_are_reachable(values, peers):
    """The policy lets pickers out to the pools that they serve, on their ports."""
    policy = parts.only(tools.charted(*values), "NetworkPolicy")
    known = yaml.safe_load((tools.CHART / "values.yaml").read_text())
    input_ = yaml.safe_load(ALL_ON.read_text()) if "--values" in values else known
    rule = policy["spec"]["egress"][1]
    assert rule["to"] == peers
    assert [item["port"] for item in rule["ports"]] == input_["pool"]["targetPorts"]


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("", None),
        ("redis://redis", 6379),
        ("redis://user:secret@redis:6390/0", 6390),
        ("rediss://[fd00::1]:6380/0", 6380),
        ("unix:///run/redis", None),
    ],
)
def test_chart_policy_lets_peer_sync_out(url, port):
    """The policy has the port of the Redis that the configuration names, and of no other."""
    policy = parts.only(tools.charted("--set", f"config.peer_sync.url={url}"), "NetworkPolicy")
    ports = [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]
    plain = parts.only(tools.charted(*(OFF if url else ())), "NetworkPolicy")
    usual = [port["port"] for rule in plain["spec"]["egress"] for port in rule["ports"]]
    assert sorted(ports) == sorted([*usual, *([port] if port else [])])


@pytest.mark.parametrize(("replicas", "peers"), [(1, False), (2, True)])
def test_no_peer_of_metrics_is_none(replicas, peers):
    """An empty list leaves the port of metrics to other replicas, where there are any."""
    values = ("--set", f"replicaCount={replicas}", "--set-json", "networkPolicy.monitoring=[]")
    policy = parts.only(tools.charted(*values), "NetworkPolicy")["spec"]
    opened = [
        rule for rule in policy["ingress"] if {"port": 9090, "protocol": "TCP"} in rule["ports"]
    ]
    assert [rule["from"] for rule in opened] == ([[{"podSelector": policy["podSelector"]}]] * peers)


def test_chart_policy_has_the_port_of_metrics():
    """The policy lets metrics be read where the configuration names their port."""

    def ports(*flags):
        policy = parts.only(tools.charted(*flags), "NetworkPolicy")
        return [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]]

    assert sorted(ports("--set", "config.scrape.port=9400")) == sorted([*ports(), 9400])


def test_chart_policy_lets_kv_events_in():
    """The policy has the ports of events and replays, of every rank, where they are on."""

    def ports(*values):
        flags = [part for value in values for part in ("--set", f"config.kv_events.{value}")]
        policy = parts.only(tools.charted(*flags), "NetworkPolicy")
        return [
            (port["port"], port["endPort"])
            for rule in policy["spec"]["egress"]
            for port in rule["ports"]
            if "endPort" in port
        ]

    assert ports("enabled=false") == []
    assert ports("enabled=true") == [(5557, 5557)]
    assert ports("enabled=true", "replay_port=5600", "ranks=8") == [(5557, 5564), (5600, 5607)]


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://render:8100", 8100), ("http://[fd00::1]/a:1", 80), ("https://render/base", 443)],
)
def test_chart_policy_lets_prompts_be_rendered(url, port):
    """The policy has the port of the server that the configuration names, if events are on."""

    def ports(enabled):
        flags = f"config.kv_events.enabled={enabled},config.kv_events.render_url={url}"
        policy = parts.only(tools.charted("--set", flags), "NetworkPolicy")
        return [rule["ports"] for rule in policy["spec"]["egress"] if "to" not in rule]

    assert [{"port": port, "protocol": "TCP"}] in ports("true")
    assert len(ports("false")) == len(ports("true")) - 1


def test_chart_lets_engines_connect_to_the_one_replica_that_listens():
    """Service and policy have a port for each rank, and several replicas without a leader are refused."""
    flags = [
        *("--set", "config.kv_events.enabled=true", "--set", "config.kv_events.ranks=2"),
        *(
            "--set",
            "config.kv_events.bind=tcp://*:5600",
            "--set",
            "config.kv_events.replay_port=5558",
        ),
    ]
    assert "an engine connects to one replica" in tools.charted_refusal(*flags)
    for chosen in ("leaderElection.enabled=true", "replicaCount=1"):
        documents = tools.charted(*flags, "--set", chosen)
        service = parts.only(documents, "Service", "release-extproc")["spec"]
        bound = {port["port"]: port["targetPort"] for port in service["ports"]}
        assert (bound[5600], bound[5601]) == (5600, 5601)
        policy = parts.only(documents, "NetworkPolicy")["spec"]
        (rule,) = (rule for rule in policy["ingress"] if rule["ports"][0]["port"] == 5600)
        assert rule["from"] == [{"podSelector": {}}]
        assert [port["port"] for port in rule["ports"]] == [5600, 5601]
        out = [port for rule in policy["egress"] for port in rule["ports"] if "endPort" in port]
        assert [port["port"] for port in out] == [5558]
