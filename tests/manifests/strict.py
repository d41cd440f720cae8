"""Faults of a Kubernetes object, found without a cluster.

Built-in kinds are held against the published JSON Schemas of Kubernetes, unknown keys included.
Kinds of others are held against `foreign`, which knows the keys that we use and no more.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.manifests import foreign

#: The oldest Kubernetes that the manifests are for (a preStop hook that sleeps), and the newest
#: whose schemas we have.
OLDEST = "1.30"
NEWEST = kubernetes_validate.latest_version().rpartition(".")[0]


def problems(document: Mapping[str, Any]) -> Sequence[str]:
    """Faults of an object; empty for a valid one."""
    return _problems(json.dumps(document, sort_keys=True))


@functools.cache
def _problems(text: str) -> Sequence[str]:
    """The same, once for each object: overlays have most of theirs in common."""
    document = json.loads(text)
    name = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
    # The schemas take null for everything, which is never meant.
    result = [f"{where} is empty" for where in _empty(document, "")]
    theirs = foreign.SCHEMAS.get((document["apiVersion"], document["kind"]))
    if theirs is not None:
        errors = jsonschema.Draft202012Validator(theirs).iter_errors(document)
        result += [f"{error.json_path}: {error.message}" for error in errors]
    else:
        result += [
            kubernete
            for version in (OLDEST, NEWEST)
            for kubernete in _of_kubernetes(document, version)
        ]
    return [f"{name}: {item}" for item in result]


def _of_kubernetes(document: Mapping[str, Any], version: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{'.'.join(map(str, error.path))}: {error.message}, in {version}"
    except kubernetes_validate.SchemaNotFoundError:
        yield f"unknown: {document['apiVersion']}, in {version}"


def _empty(value: object, where: str) -> Iterator[str]:
    if value is None:
        yield where
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _empty(inner, f"{where}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _empty(inner, f"{where}[{index}]")


class OneOfEach(yaml.SafeLoader):
    """A reader that refuses a key that stands twice: the others keep the last one silently."""


def _mapping(loader: OneOfEach, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value]
    twice = {key for key in keys if keys.count(key) > 1}
    if twice:
        raise yaml.constructor.ConstructorError(
            None, None, f"keys stand twice: {sorted(twice)}", node.start_mark
        )
    return loader.construct_mapping(node, deep=True)


OneOfEach.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
