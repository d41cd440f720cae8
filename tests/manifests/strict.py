"""What is wrong with a Kubernetes object, without a cluster.

Built-in kinds are held against the published JSON Schemas of Kubernetes, unknown keys included.
Kinds of others are held against `foreign`, which knows the keys that we use and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.manifests import foreign

#: The oldest Kubernetes that the manifests are for (a preStop hook that sleeps), and the newest
#: whose schemas we have.
OLDEST = "1.30"
NEWEST = kubernetes_validate.latest_version().rpartition(".")[0]


def problems(document: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with an object; nothing when it is right."""
    name = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
    # The schemas take null for everything; nobody writes it on purpose.
    yield from (f"{name}: {where} is empty" for where in _empty(document, ""))
    theirs = foreign.SCHEMAS.get((document["apiVersion"], document["kind"]))
    if theirs is not None:
        found = jsonschema.Draft202012Validator(theirs).iter_errors(document)
        for error in found:
            yield f"{name}: {error.json_path}: {error.message}"
        return
    for version in (OLDEST, NEWEST):
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{name} in {version}: {'.'.join(map(str, error.path))}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{name}: nobody knows {document['apiVersion']} in {version}"


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
