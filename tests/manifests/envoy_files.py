"""Envoy configurations of the overlays, made from the shipped ones.

`python -m tests.manifests.envoy_files` writes them; a test fails when they differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "envoy"
OVERLAYS = ROOT / "manifests/overlays"


def _body(name: str) -> str:
    """Text behind the opening comment of a shipped file."""
    text = (SHIPPED / name).read_text()
    opening = re.match(r"(#.*\n|\n)*", text)
    assert opening
    return text[opening.end() :]


def sidecar() -> str:
    """The picker in the same pod."""
    head = "# envoy/original-dst.yaml: the picker is in the same pod.\n\n"
    return head + _beside_collector(_body("original-dst.yaml"))


def separate() -> str:
    """The pickers behind their headless Service."""
    head = "# envoy/original-dst.yaml with the pickers' Service in place of loopback.\n\n"
    return head + _behind_service(_body("original-dst.yaml"), ports=1)


def over_xds() -> str:
    """The same, and the engines over xDS."""
    head = "# envoy/override-host-eds.yaml with the pickers' Service in place of loopback.\n\n"
    body = re.sub(r".*address: 127\.0\.0\.2, .*\n", "", _body("override-host-eds.yaml"))
    return head + _behind_service(body, ports=2)


def _behind_service(body: str, *, ports: int) -> str:
    """The pickers' ports under the name of their Service; Envoy's admin port stays where it is."""
    moved, count = re.subn(
        r"address: 127\.0\.0\.1, port_value: (9002|18000)",
        r"address: extproc, port_value: \1",
        body,
    )
    assert count == ports, "the pickers' address has moved"
    return _beside_collector(moved)


def _beside_collector(body: str) -> str:
    """The collector of traces under the name that llm-d gives its own."""
    loopback, name = (
        "address: 127.0.0.1, port_value: 4317",
        "address: otel-collector, port_value: 4317",
    )
    assert body.count(loopback) == 1
    return body.replace(loopback, name)


def with_traces(text: str) -> str:
    """A configuration with its block of traces, as its comment says."""
    changed = re.sub(r"(?m)^( *)#- ", r"\1", text)
    assert changed != text
    return changed


#: What each overlay's envoy.yaml is made by.
FILES: Mapping[str, Callable[[], str]] = {
    "envoy-sidecar": sidecar,
    "envoy": separate,
    "envoy-xds": over_xds,
}


def path(overlay: str) -> Path:
    """Path of the Envoy configuration of an overlay."""
    return OVERLAYS / overlay / "envoy.yaml"


if __name__ == "__main__":
    for name, make in FILES.items():
        path(name).write_text(make())
