"""Counts the objects that a value keeps alive, for tests of memory that is given back."""

from __future__ import annotations

import gc
import types

_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


def count_reachable(root: object) -> int:
    """Objects reachable from `root`, each once; classes, modules and functions lead no further."""
    reached: dict[int, object] = {}
    pending = [root]
    while pending:
        value = pending.pop()
        if id(value) in reached or isinstance(value, _SHARED):
            continue
        reached[id(value)] = value
        pending += gc.get_referents(value)
    return len(reached)
