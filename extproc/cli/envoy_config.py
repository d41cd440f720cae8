"""`extproc envoy-config`: list the shipped Envoy configurations, or print one.

extproc envoy-config override-host-eds > envoy.yaml
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from extproc.config import loader
from extproc.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="the configuration to print")


def run(args: argparse.Namespace) -> int:
    """List or print; returns the exit status.

    Raises:
        ConfigError: No configuration has the name, or the file of this name cannot be read.
    """
    if args.name is not None:
        print(loader.read_text(find(args.name, where="NAME")), end="")
        return 0
    shipped = names()
    width = max(map(len, shipped), default=0)
    for name in shipped:
        print(f"{name:<{width}}  {_title(find(name, where='NAME'))}")
    return 0


def _title(path: Path) -> str:
    """The first line of a configuration, which is a comment."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ").rstrip(".")


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
