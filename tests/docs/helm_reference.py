"""The reference of the chart's values, from its schema and its defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.docs import reference

CHART = Path(__file__).parents[2] / "manifests/chart"


def properties() -> Iterator[tuple[str, Mapping[str, Any], object]]:
    """All values: path, schema and default; objects come before what is in them."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    yield from _below("", schema, values)


def _below(
    path: str, schema: Mapping[str, Any], values: object
) -> Iterator[tuple[str, Mapping[str, Any], object]]:
    for name, part in schema.get("properties", {}).items():
        default = values.get(name) if isinstance(values, Mapping) else None
        yield f"{path}{name}", part, default
        yield from _below(f"{path}{name}.", part, default)
        yield from _below(f"{path}{name}[].", part.get("items", {}), None)


def block() -> str:
    """One row for each value."""
    rows = ["| value | type | default | meaning |", "|---|---|---|---|"]
    for path, part, default in properties():
        shown = "" if "properties" in part or default is None else f"`{json.dumps(default)}`"
        kind = (
            "one of " + reference.constraint(part) if "enum" in part else reference.constraint(part)
        )
        rows.append(
            f"| `{path}` | {kind} | {shown} | {reference.cell(part.get('description', ''))} |"
        )
    return "\n".join(rows)
