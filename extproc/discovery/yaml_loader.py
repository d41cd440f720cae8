"""Loader of YAML and JSON that is fast, and safe on any bytes."""

from __future__ import annotations

import yaml

#: Collections within each other that a file may have (count); an endpoint's labels are the fourth.
_MAX_NESTING = 100


class _NestingLimit:
    """Part of a loader that refuses deep nesting: the C loader would overflow the stack."""

    _nesting = 0

    def descend_resolver(self, _parent: object, _index: object) -> None:
        """Count a node that begins; no path of ours resolves tags."""
        self._nesting += 1
        if self._nesting > _MAX_NESTING:
            raise yaml.YAMLError(f"more than {_MAX_NESTING} levels of nesting")

    def ascend_resolver(self) -> None:
        """Count a node that ends."""
        self._nesting -= 1


#: The C loader reads a list of 10,000 endpoints some ten times faster; not every wheel has it.
YAML_LOADER: type[yaml.SafeLoader] = type(
    "YamlLoader", (_NestingLimit, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), {}
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
