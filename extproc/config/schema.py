"""The JSON Schema of our configuration file, made from the settings and the catalogue."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from extproc.config import grammar, holding, policies, sources
from extproc.config import settings as sections
from extproc.dispatch import claims
from extproc.holding import allowance
from extproc.prefix import blocks
from extproc.scheduling import catalogue, defaults
from extproc.xds import traits

_FIELD = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def schema() -> dict[str, Any]:
    """The schema, with the reason of every default as its field's description.

    Kinds of plugins are listed as examples and not as the only values: plugin files add others.
    """
    (made,), parts = msgspec.json.schema_components(
        [sections.Settings], ref_template="#/$defs/{name}", schema_hook=_anything
    )
    for name, part in parts.items():
        struct = _struct(name)
        if struct is not None:
            _describe(part, struct)
    parts["Rules"]["properties"]["strategy"]["examples"] = list(defaults.profiles())
    parts["Scheduling"]["properties"]["strategy"]["examples"] = list(defaults.profiles())
    kinds = sorted({*catalogue.FILTERS, *catalogue.SCORERS, *catalogue.COSTS, *catalogue.PICKERS})
    for name, key in (("Plugin", "kind"), ("WeightedScorer", "kind"), ("NamedPlugin", "type")):
        parts[name]["properties"][key]["examples"] = kinds
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ExtProcConfig",
        **made,
        "$defs": parts,
    }


def text() -> str:
    """The schema as it is published."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


def _anything(wanted: type) -> dict[str, Any]:
    """Parameters of plugins are theirs to check."""
    if wanted is object:
        return {"description": "Whatever the plugin takes."}
    raise NotImplementedError


def _struct(name: str) -> type[msgspec.Struct] | None:
    """The section of that name, wherever it is defined."""
    homes = (sections, sources, policies, grammar, claims, blocks, traits, holding, allowance)
    return next((vars(home)[name] for home in homes if name in vars(home)), None)


def _describe(part: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Spread the Attributes of a docstring over the properties."""
    doc = inspect.getdoc(struct) or ""
    head, _, attributes = doc.partition("Attributes:\n")
    part["description"] = " ".join(head.split())
    told = {found[1]: " ".join(found[2].split()) for found in _FIELD.finditer(attributes)}
    for field in msgspec.structs.fields(struct):
        below = part["properties"][field.encode_name]
        if field.name in told:
            part["properties"][field.encode_name] = {"description": told[field.name], **below}
