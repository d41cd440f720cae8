"""Envoy configurations of the overlays, made from the shipped ones.

`python -m tests.manifests.envoy_files` writes them; a test fails when they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "envoy/original-dst.yaml"
OVERLAYS = ROOT / "manifests/overlays"

_LOOPBACK = "address: 127.0.0.1, port_value: 9002"
_SERVICE = "address: extproc, port_value: 9002"

_SIDECAR = """\
# envoy/original-dst.yaml as it stands: the picker is in the same pod.
"""
_SEPARATE = """\
# envoy/original-dst.yaml with the picker's Service in place of loopback.
"""


def _body(text: str) -> str:
    """What follows the opening comment."""
    return text[text.index("\nadmin:") :]


def sidecar() -> str:
    """The picker in the same pod."""
    return _SIDECAR + _body(SHIPPED.read_text())


def separate() -> str:
    """The picker behind its headless Service."""
    body = _body(SHIPPED.read_text())
    assert body.count(_LOOPBACK) == 1, "the picker's address has moved"
    return _SEPARATE + body.replace(_LOOPBACK, _SERVICE)


#: What each overlay's envoy.yaml is made by.
FILES: Mapping[str, Callable[[], str]] = {"envoy-sidecar": sidecar, "envoy": separate}


def path(overlay: str) -> Path:
    """Where an overlay has its Envoy configuration."""
    return OVERLAYS / overlay / "envoy.yaml"


if __name__ == "__main__":
    for name, make in FILES.items():
        path(name).write_text(make())
