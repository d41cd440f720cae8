"""kustomize and helm: where they are, and what they render."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support import programs

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "manifests"
CHART = MANIFESTS / "chart"

#: Where `make kubetools` puts them.
BUILT = ROOT / ".cache/tools"

#: What a helm of our own making would not know: which Kubernetes it renders for.
KUBERNETES = "1.30.0"

_RENDER_S = 300.0

Document = dict[str, Any]


#: The C reader, where there is one: it is ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def find(name: str) -> str | None:
    """A tool on the PATH or built by us."""
    return shutil.which(name, path=f"{BUILT}{os.pathsep}{os.environ.get('PATH', '')}")


def need(*names: str) -> Sequence[str]:
    """The first of these tools that is there; skips, or fails where they are required."""
    for name in names:
        result = find(name.partition(" ")[0])
        if result:
            return (result, *name.split()[1:])
    raise programs.missing(
        f"needs {' or '.join(names)}: make kubetools", "EXTPROC_REQUIRE_KUBETOOLS"
    )


@functools.cache
def kustomized(folder: Path) -> Sequence[Document]:
    """Objects that kustomize renders from a folder."""
    command = need("kustomize build", "kubectl kustomize")
    return documents(_run([*command, str(folder)]))


def warnings(folder: Path) -> str:
    """Warnings of kustomize about a folder."""
    command = [*need("kustomize build", "kubectl kustomize"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RENDER_S, check=True)
    return done.stderr


def refusal(folder: Path) -> str:
    """The reason for which kustomize renders nothing from a folder."""
    command = [*need("kustomize build", "kubectl kustomize"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RENDER_S, check=False)
    assert done.returncode != 0, done.stdout
    return done.stderr


@functools.cache
def charted(*arguments: str, release: str = "release") -> Sequence[Document]:
    """Objects that the chart renders with these arguments of `helm template`."""
    return documents(_run(template(*arguments, release=release)))


def charted_refusal(*arguments: str) -> str:
    """Message of helm about values that it must refuse."""
    done = subprocess.run(
        template(*arguments), capture_output=True, text=True, timeout=_RENDER_S, check=False
    )
    assert done.returncode != 0, done.stdout
    return done.stderr


def template(*arguments: str, release: str = "release") -> Sequence[str]:
    """The command that renders the chart."""
    where = (release, str(CHART), "--namespace", "models", "--kube-version", KUBERNETES)
    return [*need("helm template"), *where, *arguments]


def documents(text: str) -> Sequence[Document]:
    """All documents of a YAML text that are not empty."""
    return [item for item in yaml.load_all(text, _LOADER) if item]


def loaded(text: str) -> Any:
    """The one document of a YAML text."""
    return yaml.load(text, _LOADER)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_RENDER_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
