"""A profile as it was written, before its plugins are made: what both grammars come to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import msgspec

from extproc.config import scheduling_schema, validation

#: The table of kinds a plugin is looked up in.
Role = Literal["filters", "scorers", "costs", "pickers"]


ROLES: tuple[Role, ...] = get_args(Role)


class PluginSpec(msgspec.Struct, frozen=True):
    """One plugin of a profile.

    Attributes:
        role: What it is there.
        plugin: Its kind and parameters.
        path: Where it stands in the file.
        params: What its parameters are called there.
        weight: Of a scorer.
    """

    role: Role
    plugin: scheduling_schema.PluginEntry
    path: validation.Path
    params: str
    weight: float = 1.0


class ProfileSpec(msgspec.Struct, frozen=True):
    """A profile.

    Attributes:
        name: What decisions call it.
        parts: In the order they run; without a picker, `picker` takes its place.
        path: Where the profile stands in the file.
        picker: Chooses where none is named.
    """

    name: str
    parts: tuple[PluginSpec, ...]
    path: validation.Path
    picker: scheduling_schema.PluginEntry

    def parts_of(self, role: Role) -> tuple[PluginSpec, ...]:
        """The parts of one role."""
        return tuple(part for part in self.parts if part.role == role)


def by_roles(entry: scheduling_schema.ProfileEntry, path: validation.Path) -> ProfileSpec:
    """The outline of a profile that lists its plugins by roles.

    Args:
        entry: The profile.
        path: Where it stands in the file.
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
