"""Bodies that an EndpointPickerConfig leaves unparsed, through a real Envoy."""

from __future__ import annotations

import hashlib

import pytest

from tests.e2e import http1, installation

PATH = "/v1/chat/completions"

CONFIG = (
    "{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig, "
    "plugins: [{type: queue-scorer}, {type: passthrough-parser}], "
    "requestHandler: {parsers: [{pluginRef: passthrough-parser}]}}"
)

#: A body above the size that is parsed on the event loop, too.
BODIES = [b'{"model": ', bytes(range(256)), b"[" * 2_000_000]


@pytest.fixture(scope="module")
def place(live, served, binary):
    arguments = ["--config-text", CONFIG]
    with live.holding(
        installation.installed(served.address, arguments=arguments, binary=binary)
    ) as item:
        yield item


@pytest.mark.parametrize("body", BODIES, ids=["broken", "binary", "large"])
async def test_034_unparsed_bodies_arrive_unchanged(place, served, body):
    """Any body is routed on a path of a known API, and a dry run takes it too."""
    answer = await http1.ask(place.port, PATH, body, headers=[("x-engine-echo", "sha256")])
    assert answer.json() == {
        "by": served.address,
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    explained = await http1.ask(
        place.pages, "/debug/explain", body, headers=[("x-explain-path", PATH)]
    )
    assert explained.json()["request"]["api"] == "opaque"
