"""Generates the JSON Schema of our configuration file from the settings and the registry."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from extproc.config.settings import Settings
from extproc.scheduling import registry

_FIELD = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def schema() -> dict[str, Any]:
    """Return the schema; descriptions of fields come from the docstrings.

    Kinds of plugins are listed as examples and not as the only values: plugin files add others.
    """
    (root,), parts = msgspec.json.schema_components(
        [Settings], ref_template="#/$defs/{name}", schema_hook=_anything
    )
    structs: dict[type[msgspec.Struct], None] = {}
    _collect(msgspec.inspect.type_info(Settings), structs)
    for struct in structs:
        # msgspec adds the module to structs that share a name.
        full = f"{struct.__module__}.{struct.__qualname__}"
        _describe(parts[full if full in parts else struct.__name__], struct)
    parts["SchedulingRules"]["properties"]["strategy"]["examples"] = list(registry.profiles())
    parts["SchedulingSection"]["properties"]["strategy"]["examples"] = list(registry.profiles())
    kinds = sorted(
        {
            *(*registry.FILTERS, *registry.SCORERS, *registry.COSTS, *registry.PICKERS),
            *registry.DECIDERS,
        }
    )
    for name in ("PluginEntry", "WeightedScorer"):
        parts[name]["properties"]["kind"]["examples"] = kinds
    del parts["SchedulingSection"]["properties"]["_epp"]
    for name in ("EppPlugins", "EppProfile", "NamedPlugin", "PluginRef"):
        del parts[name]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ExtProcConfig",
        **root,
        "$defs": parts,
    }


def text() -> str:
    """Return the schema as published: JSON with an indent of 2."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


def _anything(wanted: type) -> dict[str, Any]:
    """Accept any parameters of plugins, which check them themselves.

    Raises:
        NotImplementedError: The type is unknown; msgspec then reports its name.
    """
    if wanted is object:
        return {"description": "Whatever the plugin takes."}
    raise NotImplementedError


def _collect(info: object, structs: dict[type[msgspec.Struct], None]) -> None:
    """Collect every struct that a type refers to, in order."""
    match info:
        case msgspec.inspect.StructType(cls=struct):
            if struct not in structs:
                structs[struct] = None
                for field in info.fields:
                    _collect(field.type, structs)
        case msgspec.inspect.UnionType(types=types):
            for member in types:
                _collect(member, structs)
        case msgspec.inspect.CollectionType(item_type=item):
            _collect(item, structs)
        case msgspec.inspect.DictType(value_type=value):
            _collect(value, structs)
        case msgspec.inspect.Metadata(type=inner):
            _collect(inner, structs)


def _describe(part: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Copy `Attributes` of the docstrings of a class and its bases to descriptions of properties."""
    part["description"] = " ".join(
        (inspect.getdoc(struct) or "").partition("Attributes:\n")[0].split()
    )
    descriptions: dict[str, str] = {}
    for cls in reversed(struct.__mro__):
        attributes = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
        descriptions |= {
            entry[1]: " ".join(entry[2].split()) for entry in _FIELD.finditer(attributes)
        }
    for field in msgspec.structs.fields(struct):
        below = part["properties"][field.encode_name]
        if field.name in descriptions:
            part["properties"][field.encode_name] = {
                "description": descriptions[field.name],
                **below,
            }
