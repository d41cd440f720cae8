from __future__ import annotations

import pytest

from extproc.cli import check_pools
from extproc.config import loader

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"


NO_CLAIMS = "claims      none: annotations of InferencePools are ignored"


@pytest.mark.parametrize(
    ("text", "told"),
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
                "            pool a comes first where both claim a request",
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
def test_every_source_is_described(text, told):
    """Where endpoints come from and which requests go there, for people."""
    settings = loader.settings(loader.parse(HEAD + text, where="f"))
    found = list(check_pools.lines(settings))
    assert len(found) == len(told)
    for line, expected in zip(found, told, strict=True):
        assert line.startswith(expected)
