"""Specification of a profile before its plugins are built, common to both grammars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from extproc.config import scheduling_schema, validation

#: The table of kinds a plugin is looked up in.
Role = Literal["filters", "scorers", "costs", "pickers"]


ROLES: tuple[Role, ...] = get_args(Role)


class PluginSpec(msgspec.Struct, frozen=True):
    """A plugin of a profile.

    Attributes:
        role: The table of its kind.
        plugin: Its kind and parameters.
        path: Its path in the file.
        params: The key of its parameters in the file.
        weight: Factor of a scorer's score; unused for other roles.
    """

    role: Role
    plugin: scheduling_schema.PluginEntry
    path: validation.Path
    params: str
    weight: float = 1.0


class ProfileSpec(msgspec.Struct, frozen=True):
    """A profile before its plugins are built.

    Attributes:
        name: Name in decisions.
        parts: Plugins in the order they run; without a picker, `picker` is added.
        path: Path of the profile in the file.
        picker: The default picker.
    """

    name: str
    parts: tuple[PluginSpec, ...]
    path: validation.Path
    picker: scheduling_schema.PluginEntry

    def parts_of(self, role: Role) -> tuple[PluginSpec, ...]:
        """Return the parts of a role, in order."""
        return tuple(part for part in self.parts if part.role == role)


def by_roles(entry: scheduling_schema.ProfileEntry, path: validation.Path) -> ProfileSpec:
    """Return the specification of a profile that lists its plugins by roles.

    Args:
        entry: The profile.
        path: Its path in the file.
    """
    return ProfileSpec(entry.name, tuple(_parts(entry, path)), path, entry.picker)


def _parts(entry: scheduling_schema.ProfileEntry, path: validation.Path) -> Iterator[PluginSpec]:
    for at, keep in enumerate(entry.filters):
        yield PluginSpec("filters", keep, (*path, "filters", at), "params")
    for at, scorer in enumerate(entry.scorers):
        spot = (*path, "scorers", at)
        yield PluginSpec("scorers", scorer, spot, "params", scorer.weight)
    if entry.cost is not None:
        yield PluginSpec("costs", entry.cost, (*path, "cost"), "params")
    yield PluginSpec("pickers", entry.picker, (*path, "picker"), "params")
