"""Finding things in rendered objects, and asking our own code about them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from extproc.cli import flags
from extproc.config.settings import Settings
from tests.manifests.tools import Document

#: The container that is the picker.
PICKER = "extproc"

#: The namespace that its pod would run in.
NAMESPACE = "models"


def of_kind(documents: Sequence[Document], kind: str, name: str = "") -> list[Document]:
    """All objects of a kind, or the one with that name."""
    return [
        document
        for document in documents
        if document["kind"] == kind and (not name or document["metadata"]["name"] == name)
    ]


def only(documents: Sequence[Document], kind: str, name: str = "") -> Document:
    """The one object of a kind."""
    (item,) = of_kind(documents, kind, name)
    return item


def pods(documents: Sequence[Document]) -> Iterator[Document]:
    """The pod specs of all Deployments."""
    for item in of_kind(documents, "Deployment"):
        yield item["spec"]["template"]["spec"]


def pickers(documents: Sequence[Document]) -> Iterator[tuple[Document, Document]]:
    """Pod spec and container of every picker."""
    for pod in pods(documents):
        for container in pod["containers"]:
            if container["name"] == PICKER:
                yield pod, container


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """The arguments of a picker's container, as our own program reads them."""
    command, *rest = arguments
    assert command == "serve"
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    flags.add(parser)
    known, unknown = parser.parse_known_args(rest)
    assert not unknown, unknown
    return known


def resolved(documents: Sequence[Document], pod: Document, container: Document) -> Settings:
    """The settings a picker would run with: its arguments and the file that they name.

    Nothing may be worth a warning.
    """
    arguments = parsed([word.replace("$(NAMESPACE)", NAMESPACE) for word in container["args"]])
    if arguments.config_file:
        arguments.config_text = mounted(documents, pod, container, arguments.config_file)
        arguments.config_file = None
    result = flags.resolve(arguments)
    assert not result.warnings, result.warnings
    return result.settings


def mounted(documents: Sequence[Document], pod: Document, container: Document, path: str) -> str:
    """The text of a file that a ConfigMap brings into a container."""
    folder, name = Path(path).parent, Path(path).name
    (mount,) = [item for item in container["volumeMounts"] if Path(item["mountPath"]) == folder]
    (volume,) = [entry for entry in pod["volumes"] if entry["name"] == mount["name"]]
    text: str = only(documents, "ConfigMap", volume["configMap"]["name"])["data"][name]
    return text


def ports(container: Document) -> dict[str, int]:
    """A container's ports by name."""
    return {item["name"]: item["containerPort"] for item in container.get("ports", ())}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """True if a label selector matches these labels; `matchLabels` only."""
    wanted = selector.get("matchLabels", {})
    assert set(selector) <= {"matchLabels"}, selector
    return all(labels.get(key) == value for key, value in wanted.items())


def are_peers_allowed(policy: Document, port: int) -> bool:
    """True if a NetworkPolicy lets its own pods connect to each other on a port."""
    themselves = {"podSelector": policy["podSelector"]}
    return all(
        any(
            themselves in rule.get(end, ()) and {"port": port, "protocol": "TCP"} in rule["ports"]
            for rule in policy[way]
        )
        for way, end in (("ingress", "from"), ("egress", "to"))
    )
