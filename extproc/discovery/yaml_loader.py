"""Loader of YAML and JSON that is fast, and safe on any bytes."""

from __future__ import annotations

import yaml

#: Collections within each other that a file may have (count); an endpoint's labels are the fourth.
_MAX_NESTING = 100

#: Keys that `<<` may copy from other mappings, all together (count).
_MAX_MERGED = 1_000_000

#: Characters of a number; `1:1:1` is one with base 60, whose parts take quadratic time.
_MAX_NUMBER_LENGTH = 1000

_MERGE = "tag:yaml.org,2002:merge"
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class LoaderLimits:
    """Part of a loader that refuses what would take all memory or time, or the stack of the C loader."""

    _nesting = 0
    _merged = 0

    def descend_resolver(self, _parent: object, _index: object) -> None:
        """Count a node that begins; no path of ours resolves tags."""
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise yaml.YAMLError(f"more than {_MAX_NESTING} levels of nesting")

    def ascend_resolver(self) -> None:
        """Count a node that ends."""
        self._nesting -= 1

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        """Read a scalar that becomes a number, or any other."""
        if node.tag in _NUMBERS and len(node.value) > _MAX_NUMBER_LENGTH:
            problem = f"a number of more than {_MAX_NUMBER_LENGTH} characters"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
        return super().construct_scalar(node)  # type: ignore[misc, no-any-return]  # of the loader

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace `<<` by what it names; mappings that merge each other may mean billions of keys."""
        for key, value in node.value:
            if key.tag != _MERGE:
                continue
            for part in value.value if isinstance(value, yaml.SequenceNode) else (value,):
                if isinstance(part, yaml.MappingNode):
                    self.flatten_mapping(part)
                    self._merged += len(part.value)
                if self._merged > _MAX_MERGED:
                    raise yaml.YAMLError(f"more than {_MAX_MERGED} keys by <<")
        super().flatten_mapping(node)  # type: ignore[misc]  # of the loader


#: The C loader reads a list of 10,000 endpoints some ten times faster; not every wheel has it.
YAML_LOADER: type[yaml.SafeLoader] = type(
    "YamlLoader", (LoaderLimits, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), {}
)

#: What the safe loaders raise: their own errors, and bare ones on tagged nonsense (`!!int ""`) and
#: dates that cannot be. The loader of the configuration goes by the same list.
YAML_FAILURES = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
