import pytest

from extproc.cli import check, main
from tests.support.config_text import read


def test_check_warns_of_no_endpoints(capsys):
    """The defaults are in order, and of no use alone."""
    assert main.main(["check"]) == 0
    assert "warning: there are no endpoints" in capsys.readouterr().out


def test_check_reads_the_endpoints_file(tmp_path, capsys):
    """An endpoints file is read and its endpoints are listed."""
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: [{host: 10.0.0.7, port: 8000, name: seven}]")
    assert main.main(["check", "--endpoints-file", str(path)]) == 0
    output = capsys.readouterr().out
    assert f"1 in {path}, watched" in output
    assert "10.0.0.7:8000  seven" in output


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("endpoints: [{host: 10.0.0.7}]", "port"),
        ("endpoint: []", "did you mean `endpoints`?"),
        ("[", "YAML or JSON"),
    ],
)
def test_check_refuses_a_broken_endpoints_file(text, expected, tmp_path, capsys):
    """A broken endpoints file is status 2, with the place."""
    path = tmp_path / "endpoints.yaml"
    path.write_text(text)
    assert main.main(["check", "--endpoints-file", str(path)]) == 2
    output = capsys.readouterr().err
    assert str(path) in output
    assert expected in output


NO_CLAIMS = "match rules none: annotations of InferencePools are ignored"


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (
            "pool: {name: p, endpoints: [{address: 'h:80', name: n, labels: {a: b}}]}",
            ["endpoints   1 listed of pool p", "            h:80  (every address of this name)  n"],
        ),
        (
            "pool: {kubernetes: {inference_pool: x}}",
            [
                "endpoints   from Kubernetes: InferencePool x (inference.networking.k8s.io)",
            ],
        ),
        (
            "pool: {kubernetes: {selector: {b: c, a: b}, ports: [1, 2]}}",
            ["endpoints   from Kubernetes: pods with a=b,b=c, ports 1, 2"],
        ),
        (
            "pool: {kubernetes: {selector: {model: llama}}}",
            ["endpoints   from Kubernetes: pods with model=llama, ports of their annotations"],
        ),
        (
            "pool: {kubernetes: {service: s, port: http}}",
            ["endpoints   from Kubernetes: EndpointSlices of Service s, port http"],
        ),
        (
            """
pools:
- {name: a, endpoints: ['10.0.0.1:80'], match: {hosts: [x, y], paths: [/v1], headers: {t: u}}}
- {name: b, endpoints: ['10.0.0.2:80'], match: {models: [m]}, scheduling: {strategy: random}}
- {name: c, kubernetes: {service: s}}
""",
            [
                "pool        a, for host x or y and path /v1 and header t=u",
                "endpoints   1 listed of pool a",
                "            10.0.0.1:80",
                "pool        b, for model m",
                "            pool a comes first where both match a request",
                "            scheduled by rules of its own",
                "endpoints   1 listed of pool b",
                "            10.0.0.2:80",
                "pool        c, for models its endpoints list, and what no other pool takes",
                "endpoints   from Kubernetes: EndpointSlices of Service s of pool c",
            ],
        ),
        (
            "cluster: {discover_pools: cluster}",
            ["pools       every InferencePool of the cluster, as they come and go", NO_CLAIMS],
        ),
        (
            "cluster: {discover_pools: namespace, namespace: n}",
            ["pools       every InferencePool of namespace n, as they come and go", NO_CLAIMS],
        ),
        (
            "cluster: {discover_pools: namespace}",
            [
                "pools       every InferencePool of namespace of this process, as they come and go",
                NO_CLAIMS,
            ],
        ),
        (
            """
pool: {kubernetes: {inference_pool: x, namespace: n}}
cluster: {leader_election: true, lease: {namespace: m}}
""",
            [
                "endpoints   from Kubernetes: InferencePool x",
                "ready       only the holder of Lease epp-n-x.llm-d.ai in namespace m",
            ],
        ),
    ],
)
def test_every_source_is_described(text, result):
    """The report names the sources of endpoints and the requests of each pool."""
    settings = read(text)
    values = list(check.describe_pools(settings))
    assert len(values) == len(result)
    for line, expected in zip(values, result, strict=True):
        assert line.startswith(expected)
