"""Parses YAML and JSON to trees, and rejects what is valid there and no configuration."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Hashable, Iterator

import yaml

from extproc.config import validation
from extproc.discovery.yaml_loader import YAML_FAILURES, LoaderLimits
from extproc.errors import ConfigError

#: Levels a tree may have; the deepest setting stands at seven.
_MAX_DEPTH = 20

#: Values a tree may have (count), as often as anchors repeat them: a few lines of YAML can mean
#: billions.
_MAX_VALUES = 500_000


def parse_tree(text: str, *, where: str) -> object:
    """Parse YAML or JSON to mappings, lists and scalars.

    Raises:
        ConfigError: It is neither, has a duplicate key, or is more than one document.
    """
    trees = parse_documents(text, where=where)
    if len(trees) > 1:
        raise ConfigError(
            where, wanted="one document", got=str(len(trees)), fix="keep what stands before ---"
        )
    return trees[0] if trees else None


def parse_documents(text: str, *, where: str) -> list[object]:
    """Parse the documents of a text, without empty ones, as templates leave them."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return [
                json.loads(text, object_pairs_hook=lambda pairs: _reject_duplicates(pairs, where))
            ]
        except (ValueError, RecursionError):
            pass  # a flow mapping of YAML begins the same way; what is neither, YAML will say
    try:
        # This looks for characters that YAML does not have.
        loader = _Loader(text, where=where)
        try:
            trees = []
            while loader.check_data():  # type: ignore[no-untyped-call]  # the stub has no types
                trees.append(loader.get_data())
            return [tree for tree in trees if tree is not None]
        finally:
            loader.dispose()
    except YAML_FAILURES as error:
        raise _syntax_error(error, where) from None


def check_tree(tree: object, place: validation.Place) -> None:
    """Reject .inf, .nan, half surrogate pairs, recursive mappings and trees that are too large.

    All of them are valid YAML.

    Raises:
        ConfigError: It has one of them.
    """
    _check_subtree(tree, place, itertools.count())


def _check_subtree(tree: object, place: validation.Place, counter: Iterator[int]) -> None:
    if next(counter) > _MAX_VALUES:
        raise ConfigError(
            place.file,
            wanted=f"at most {_MAX_VALUES} values",
            got="more",
            fix="anchors refer to anchors; write the values out",
        )
    if len(place.path) > _MAX_DEPTH:
        raise ConfigError(
            place.file,
            wanted=f"at most {_MAX_DEPTH} levels",
            got=f"more, below {validation.format_path(place.path[:3])}",
            fix="an anchor refers to what it stands in; write the value out",
        )
    if isinstance(tree, dict):
        for key, value in tree.items():
            _check_text(str(key), place)
            _check_subtree(value, place / str(key), counter)
    elif isinstance(tree, list):
        for at, value in enumerate(tree):
            _check_subtree(value, place / at, counter)
    elif isinstance(tree, str):
        _check_text(tree, place)
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise ConfigError(
            place,
            wanted="a finite number",
            got=str(tree),
            fix="write a number; a very large one is as good as infinity",
        )


def _check_text(text: str, place: validation.Place) -> None:
    """Reject half of a surrogate pair, which neither metrics nor JSON nor protobuf can have."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            place,
            wanted="text of Unicode characters",
            got=f"half of a surrogate pair, \\u{ord(text[error.start]):x}",
            fix="write the character itself",
        ) from None


def _duplicate_key_error(where: str, key: object, line: str) -> ConfigError:
    return ConfigError(
        where,
        wanted="every key once in its mapping",
        got=f"{key} twice{line}",
        fix="keep one; the other would be lost without a word",
    )


def _reject_duplicates(pairs: list[tuple[str, object]], where: str) -> dict[str, object]:
    tree: dict[str, object] = {}
    for key, value in pairs:
        if key in tree:
            raise _duplicate_key_error(where, key, "")
        tree[key] = value
    return tree


def _syntax_error(error: Exception, where: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    spot = f"{where}, line {mark.line + 1}, column {mark.column + 1}" if mark else where
    problem = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
    problem = problem or type(error).__name__
    return ConfigError(spot, wanted="YAML or JSON", got=problem, fix="correct the syntax there")


class _Loader(LoaderLimits, yaml.SafeLoader):
    """Safe YAML loader that rejects duplicate keys."""

    def __init__(self, text: str, *, where: str) -> None:
        super().__init__(text)
        self.where = where

    def construct_mapping(
        self,
        node: yaml.MappingNode,
        deep: bool = False,  # noqa: FBT001, FBT002 - PyYAML's signature, called by position
    ) -> dict[Hashable, object]:
        """Build a mapping; PyYAML would silently keep the last of equal keys."""
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in keys:
                line = f" (again in line {key.start_mark.line + 1})"
                raise _duplicate_key_error(self.where, key.value, line)
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)
