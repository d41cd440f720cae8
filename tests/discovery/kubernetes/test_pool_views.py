import pytest

from extproc.discovery.kubernetes import api_responses, objects, pool_views, watch_plan
from tests.discovery.kubernetes import builders


def pod(**facts):
    line = builders.line("ADDED", builders.pod(**facts))
    return api_responses.WatchReader(watch_plan.PODS).decode_event(line).value


def slice_of(**facts):
    line = builders.line("ADDED", builders.slice_of(**facts))
    return api_responses.WatchReader(watch_plan.SLICES).decode_event(line).value


def addresses(endpoints):
    return [endpoint.address for endpoint in endpoints]


def test_an_endpoint_of_a_single_port_has_the_name_of_the_pod():
    """Its labels are the pod's, and where it runs."""
    (endpoint,) = pool_views.pod_endpoints(pod(name="a", node="n1"), (8000,))
    assert (endpoint.address, endpoint.name, endpoint.uid) == ("10.0.0.1:8000", "a", "uid-a")
    assert endpoint.labels == {
        "namespace": "default",
        "app": "vllm",
        "kubernetes.io/hostname": "n1",
    }


def test_every_port_is_a_data_parallel_rank():
    """Pods times ports, in the order of the ports.

    Source: docs/reference/protocol-conformance.md#point-61.
    """
    endpoints = pool_views.pod_endpoints(pod(name="a"), (8001, 8000))
    assert [(endpoint.name, endpoint.address) for endpoint in endpoints] == [
        ("a-rank-0", "10.0.0.1:8001"),
        ("a-rank-1", "10.0.0.1:8000"),
    ]


@pytest.mark.parametrize(
    ("annotation", "ports"),
    [
        ("8001", [8001]),
        (" 8002 , 8000", [8000, 8002]),
        ("9999,8001", [8001]),
        ("9999", []),
        ("", []),
        ("x,-1,8000.0, 8001", [8001]),
        ("\uff11", []),
        ("8" * 5000, []),
    ],
)
def test_062_active_ports_limit_ranks(annotation, ports):
    """Names stay those of the target ports; unknown ports are ignored.

    Source: docs/reference/protocol-conformance.md#point-62.
    """
    subject = pod(name="a", annotations={"llm-d.ai/active-ports": annotation})
    endpoints = pool_views.pod_endpoints(subject, (8000, 8001, 8002))
    assert addresses(endpoints) == [f"10.0.0.1:{port}" for port in ports]
    assert [endpoint.name for endpoint in endpoints] == [f"a-rank-{port - 8000}" for port in ports]


def test_ipv6_addresses_have_brackets():
    """As EPP protocol 004 writes it."""
    assert addresses(pool_views.pod_endpoints(pod(ip="FD00::0:1"), (8000,))) == ["[fd00::1]:8000"]


@pytest.mark.parametrize("ip", ["", "localhost", "10.0.0", "10.0.0.1:80"])
def test_a_pod_without_an_address_is_no_endpoint(ip):
    """Neither is one whose address is none."""
    assert pool_views.pod_endpoints(pod(ip=ip), (8000,)) == ()


def test_a_kubeai_pod_states_its_port_and_models():
    """The model is the base, every adapter label an adapter.

    Source: docs/spec/prior-systems.md#adapter-names.
    """
    labels = {"model": "llama", "adapter.kubeai.org/sql": "hash", "adapter.kubeai.org/wiki": "h"}
    subject = pod(labels=labels, annotations={"model-pod-port": "8000"})
    (endpoint,) = pool_views.pod_endpoints(subject, ())
    assert endpoint.address == "10.0.0.1:8000"
    assert (endpoint.models.bases, endpoint.models.adapters) == ({"llama"}, {"sql", "wiki"})


def test_the_model_label_alone_is_ignored():
    """Anybody may use that name; KubeAI's pods carry their port as well."""
    (endpoint,) = pool_views.pod_endpoints(pod(labels={"model": "llama"}), (8000,))
    assert endpoint.models is None


def test_a_pod_without_a_port_is_no_endpoint_where_pods_name_theirs():
    """So is one whose port is none."""
    assert pool_views.pod_endpoints(pod(), ()) == ()
    for text in ("x", "0", "99999999"):
        assert pool_views.pod_endpoints(pod(annotations={"model-pod-port": text}), ()) == ()


def test_no_annotation_replaces_the_ip():
    """The right to annotate a pod would otherwise be the right to redirect traffic."""
    subject = pod(annotations={"model-pod-ip": "127.0.0.1", "model-pod-port": "7000"})
    assert addresses(pool_views.pod_endpoints(subject, ())) == ["10.0.0.1:7000"]


def test_endpoints_come_in_the_order_of_pod_names():
    """So that replicas of the picker agree, whatever the order of events."""
    pods = [pod(name=name, ip=f"10.0.0.{at}") for at, name in enumerate("cab")]
    merged = pool_views.merge(
        [(pod_of_pool, pool_views.pod_endpoints(pod_of_pool, (8000,))) for pod_of_pool in pods]
    )
    assert [endpoint.name for endpoint in merged] == ["a", "b", "c"]


def test_the_younger_of_two_pods_has_a_shared_address():
    """The IP went on before the last word of the older was heard."""
    old = pod(name="z", created="2026-01-01T00:00:00Z")
    new = pod(name="a", created="2026-01-01T00:00:01Z")
    merged = pool_views.merge(
        [
            (pod_of_pool, pool_views.pod_endpoints(pod_of_pool, (8000,)))
            for pod_of_pool in (old, new)
        ]
    )
    assert [endpoint.name for endpoint in merged] == ["a"]


def test_endpoints_of_slices():
    """Ready and not terminating; unknown is ready, as the API says."""
    backends = [
        builders.backend("10.0.0.1", "a"),
        builders.backend("10.0.0.2", "b", ready=False),
        builders.backend("10.0.0.3", "c", terminating=True),
        builders.backend("10.0.0.4", "d") | {"conditions": {}},
        {"addresses": ["10.0.0.5"]},
        {"addresses": []},
    ]
    endpoints = pool_views.slice_endpoints([slice_of(backends=backends)], "http")
    assert [(endpoint.name, endpoint.address) for endpoint in endpoints] == [
        ("10.0.0.5:8000", "10.0.0.5:8000"),
        ("a", "10.0.0.1:8000"),
        ("d", "10.0.0.4:8000"),
    ]
    assert endpoints[1].uid == "uid-a"
    assert endpoints[1].labels == {
        "namespace": "default",
        "kubernetes.io/hostname": "node-1",
        "topology.kubernetes.io/zone": "zone-1",
    }


@pytest.mark.parametrize(
    ("port", "number"),
    [("http", 8000), ("8000", 8000), ("metrics", 9090), ("9090", 9090), ("grpc", 0), ("", 0)],
)
def test_the_port_of_a_service_is_selected_by_name_or_number(port, number):
    """With several ports, none named is none."""
    endpoint_slice = slice_of(ports={"http": 8000, "metrics": 9090}, backends=[builders.backend()])
    endpoints = pool_views.slice_endpoints([endpoint_slice], port)
    assert addresses(endpoints) == ([f"10.0.0.1:{number}"] if number else [])


def test_the_only_port_of_a_service_need_not_be_named():
    """Without a port that is the one."""
    endpoint_slice = slice_of(backends=[builders.backend()])
    assert addresses(pool_views.slice_endpoints([endpoint_slice], "")) == ["10.0.0.1:8000"]


def test_a_pod_in_several_slices_is_one_endpoint():
    """A Service of two families, and slices that are being reshaped, name pods twice."""
    four = slice_of(name="four", backends=[builders.backend()])
    again = slice_of(name="again", backends=[builders.backend()])
    six = slice_of(name="six", family="IPv6", backends=[builders.backend("fd00::1")])
    assert addresses(pool_views.slice_endpoints([six, four, again], "http")) == ["10.0.0.1:8000"]
    assert addresses(pool_views.slice_endpoints([six], "http")) == ["[fd00::1]:8000"]


def test_the_app_protocol_of_a_service_is_passed_on():
    """The port's appProtocol."""
    port = objects.SlicePort("http", 8000, "kubernetes.io/h2c")
    endpoint_slice = objects.EndpointSlice(
        namespace="d", name="s", service="e", family="IPv4", ports=(port,)
    )
    assert pool_views.app_protocol([endpoint_slice], "http") == "kubernetes.io/h2c"
    assert pool_views.app_protocol([endpoint_slice], "other") == ""


@pytest.mark.parametrize(
    ("port", "number"),
    [("65535", 65535), ("65536", 0), ("99999", 0), ("0", 0), ("-1", 0), ("٣", 0), ("9" * 400, 0)],
)
def test_an_invalid_port_gives_no_endpoint(port, number):
    """KubeAI's annotation is free text: only 1 to 65535 is a port."""
    subject = objects.Pod(
        namespace="n", name="p", uid="u", ip="127.0.0.1", ready=True, model_port=port
    )
    assert addresses(pool_views.pod_endpoints(subject, ())) == (
        [f"127.0.0.1:{number}"] if number else []
    )
