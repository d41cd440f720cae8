"""Files of dashboards and rules: `python -m tests.monitoring.files` writes them, a test compares.

They are files of the chart, from which the kustomize components take them too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.monitoring import alerts, boards, grafana

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "manifests/chart/files"

_LABELS = {"app.kubernetes.io/name": "extproc"}


class _BlockDumper(yaml.SafeDumper):
    """Writes text of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _text)


def rule() -> dict[str, Any]:
    """The PrometheusRule."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "extproc", "labels": dict(_LABELS)},
        "spec": {"groups": alerts.groups()},
    }


def texts() -> Mapping[Path, str]:
    """Paths of all files to their contents."""
    opening = "# Made by `python -m tests.monitoring.files`.\n"
    result = {FOLDER / "alerts/prometheusrule.yaml": opening + dumped(rule())}
    for board in boards.BOARDS:
        text = json.dumps(grafana.model(board), indent=1, ensure_ascii=False)
        result[FOLDER / "dashboards" / f"{board.uid}.json"] = text + "\n"
    return result


def dumped(document: Any) -> str:
    """A document as YAML."""
    return yaml.dump(
        document, Dumper=_BlockDumper, sort_keys=False, width=10_000, allow_unicode=True
    )


if __name__ == "__main__":
    for path, text in texts().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
