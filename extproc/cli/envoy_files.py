"""The Envoy configurations that this package ships: in the wheel, or in `envoy/` of a checkout."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from extproc.errors import ConfigError

_SUFFIX = ".yaml"


def folder() -> Path:
    """The folder that holds them."""
    package = Path(str(resources.files("extproc")))
    in_wheel = package / "envoy_files"
    return in_wheel if in_wheel.is_dir() else package.parent / "envoy"


def names() -> Sequence[str]:
    """Names of the shipped configurations, without the suffix of their files, sorted."""
    return sorted(path.stem for path in folder().glob(f"*{_SUFFIX}"))


def find(name: str, *, where: str) -> Path:
    """The file of a shipped configuration, or any other file.

    Args:
        name: A shipped name, or the path of a file.
        where: The flag that names it, for errors.

    Raises:
        ConfigError: Neither is there.
    """
    if name in names():
        return folder() / f"{name}{_SUFFIX}"
    path = Path(name)
    if path.is_file():
        return path
    raise ConfigError(
        where,
        wanted=f"{', '.join(names())} or a file",
        got=repr(name),
        fix="`extproc envoy-config` lists the shipped configurations",
    )
