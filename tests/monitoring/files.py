"""Files of dashboards and rules: `python -m tests.monitoring.files` writes them, a test compares.

They are files of the chart, from which the kustomize components take them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.monitoring import alerts, boards, grafana, recording_rules

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
        "spec": {"groups": groups()},
    }


def groups() -> list[dict[str, Any]]:
    """The groups of a rule file of Prometheus, and of a PrometheusRule."""
    records = [
        {"record": rule.record, "expr": rule.expr} for rule in recording_rules.RECORDING_RULES
    ]
    return [
        {"name": "extproc.records", "rules": records},
        {"name": "extproc.alerts", "rules": [_alert(alert) for alert in alerts.ALERTS]},
    ]


def _alert(alert: alerts.Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.for_,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": re.sub(r"\[(.*?)\]\(.*?\)", r"\1", alert.meaning),
            "runbook": f"{alerts.RUNBOOKS}#{alert.name.lower()}",
        },
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
