"""A table row about an upstream plugin type, and constructors by status."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

#: Converts parameters of an older type to those of a kind.
Translate = Callable[[Mapping[str, object]], Mapping[str, object]]

#: Of the prefix index; before 0.9 they were parameters of the scorer.
INDEX_PARAMETERS = (
    "autoTune",
    "blockSize",
    "blockSizeTokens",
    "hashBlockSize",
    "maxPrefixBlocksToMatch",
    "maxPrefixTokensToMatch",
    "lruCapacityPerServer",
)


class UpstreamType(msgspec.Struct, frozen=True, kw_only=True):
    """An upstream plugin type, and its treatment here.

    Attributes:
        name: Its `type` in a file.
        role: `filter`, `scorer`, `picker`, `handler`, `decider`, `producer`, `parser`, `source`,
            `extractor`, `detector`, `policy`, `admitter`, `discovery` or `hook`.
        status: `built`: our registry has a plugin of that kind with the same parameters.
            `deprecated`: still read, and `note` is the warning with the replacement.
            `implied`: our picker does its work without configuration, or does not need it;
            accepted, and `note` names the part that does it. `unsupported`: no part of ours does
            it; `note` describes the effect.
        kind: Its kind in the registry if it is built, or deprecated and built; else empty.
        instead: The upstream type that replaced a deprecated type, or a kind of ours that does the
            same if upstream has no successor; empty for other statuses.
        parameters: Parameters that are accepted and have no effect: all known parameters of an
            implied or unsupported type, and those of a built type that are no fields of its class.
        note: A sentence for readers of the configuration; empty if there is nothing to add.
        translate: Converts its parameters to those of its kind; None if they are the same.
    """

    name: str
    role: str
    status: str
    kind: str = ""
    instead: str = ""
    parameters: tuple[str, ...] = ()
    note: str = ""
    translate: Translate | None = None


def built(role: str, name: str, *parameters: str) -> UpstreamType:
    """Return the row of a type that our registry has under the same name."""
    return UpstreamType(name=name, role=role, status="built", kind=name, parameters=parameters)


def no_op(role: str, name: str, note: str, *parameters: str) -> UpstreamType:
    """Return the row of a type that needs no plugin here."""
    return UpstreamType(name=name, role=role, status="implied", note=note, parameters=parameters)


def unsupported(role: str, name: str, note: str, *parameters: str) -> UpstreamType:
    """Return the row of a type that has no counterpart here."""
    return UpstreamType(
        name=name, role=role, status="unsupported", note=note, parameters=parameters
    )


def deprecated(
    role: str,
    name: str,
    instead: str,
    *parameters: str,
    kind: str = "",
    note: str = "",
    translate: Translate | None = None,
) -> UpstreamType:
    """Return the row of a type with an old name; `instead` is the current name."""
    return UpstreamType(
        name=name,
        role=role,
        status="deprecated",
        kind=kind,
        instead=instead,
        parameters=parameters,
        note=note or f"{name} is deprecated: write {instead} instead",
        translate=translate,
    )
