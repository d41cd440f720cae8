"""What a row about one upstream plugin type says, and short ways to write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

#: Makes parameters of a kind of those that an older type has.
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
    """One plugin type.

    Attributes:
        name: Its `type` in a file.
        role: What it is: `filter`, `scorer`, `picker`, `handler`, `decider`, `producer`, `parser`,
            `source`, `extractor`, `detector`, `policy`, `admitter`, `discovery` or `hook`.
        status: `built`: our catalogue has a plugin of that kind with the same parameters.
            `deprecated`: still read, and `note` is the warning that says what to write instead.
            `no_op`: our picker does it without being told, or does not need it; accepted, and
            `note` says what of ours does it. `unsupported`: nothing of ours does it; `note` says
            what happens in its place.
        kind: Its kind in the catalogue when it is built, or deprecated and built; else empty.
        instead: The upstream type that replaced a deprecated one, or a kind of ours that does the
            same where upstream has none left; empty for the others.
        parameters: Parameters that are accepted and have no effect: all that an implied or
            unsupported type is known to have, and those of a built type that are no fields of its
            class, which are to be taken out before it is made.
        note: One sentence for whoever reads the configuration; empty when there is nothing to say.
        translate: What makes parameters of its kind of its own; None where they are the same.
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
    """A type whose plugin we have."""
    return UpstreamType(name=name, role=role, status="built", kind=name, parameters=parameters)


def no_op(role: str, name: str, note: str, *parameters: str) -> UpstreamType:
    """A type whose work is done anyway."""
    return UpstreamType(name=name, role=role, status="implied", note=note, parameters=parameters)


def unsupported(role: str, name: str, note: str, *parameters: str) -> UpstreamType:
    """A type whose work nobody does."""
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
    """A type with an old name."""
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
