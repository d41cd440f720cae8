"""Index of the models that endpoints serve, as engines listed them.

One `ModelIndex` stands for as long as neither the endpoints nor their lists change, which is much
longer than a snapshot: what is worked out for a name is looked up from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import msgspec

from extproc.endpoint import Endpoint, ServedModels

#: Answers remembered (count), so that adapters times base models cannot grow without end.
_MOST_KEPT: Final = 16_384

#: Characters of a `model_adapter` name that is looked at: two names of the longest kind.
_LONGEST_ALIAS: Final = 1025


class ModelMatch(msgspec.Struct, frozen=True, gc=False):
    """Endpoints of a pool that may serve a request, and the others.

    Attributes:
        positions: Of those that list the name or whose list is unknown, ascending.
        others: Those whose list lacks it.
    """

    positions: tuple[int, ...]
    others: tuple[Endpoint, ...]


class Alias(msgspec.Struct, frozen=True, gc=False):
    """Base model and adapter that one combined name stands for."""

    base: str
    adapter: str


class ModelIndex:
    """Endpoints that serve a model or adapter name.

    Args:
        listed: The endpoints in pool order, each with the names it listed; None for unknown.
    """

    def __init__(self, listed: Sequence[tuple[Endpoint, ServedModels | None]] = ()) -> None:
        self._listed = listed
        self._known: dict[str | tuple[str, str], ModelMatch | None] = {"": None}
        self._aliases: dict[str, Alias] = {}

    def match(self, model: str, adapter: str = "") -> ModelMatch | None:
        """Split the endpoints by their ability to serve a request.

        An adapter that no engine lists says nothing, because engines that take it in a field of its
        own need not list it: then the model decides.

        Args:
            model: What the request names; empty for a request that names nothing.
            adapter: The adapter, where it is named apart from the model.

        Returns:
            None when every endpoint may.
        """
        try:
            return self._known[(model, adapter) if adapter else model]
        except KeyError:
            return self._work_out(model, adapter)

    def parse_kubeai_name(self, name: str) -> Alias | None:
        """Read a name as KubeAI's `model_adapter` (docs/spec/prior-systems.md#adapter-names).

        It is one if no engine lists it as it stands, and an engine lists the part before an underscore
        as a base model and the part behind it as an adapter; the first such underscore counts.

        Args:
            name: What a request names.
        """
        alias = self._aliases.get(name)
        if alias is not None:
            return alias
        if "_" not in name or len(name) > _LONGEST_ALIAS or name in self.names:
            return None
        at = name.find("_")
        while at > 0:
            base, adapter = name[:at], name[at + 1 :]
            if base in self.bases and any(
                _lists(served, base, adapter) for _, served in self._listed
            ):
                alias = Alias(base, adapter)
                if len(self._aliases) < _MOST_KEPT:
                    self._aliases[name] = alias
                return alias
            at = name.find("_", at + 1)
        return None

    def parse_sglang_name(self, name: str) -> Alias | None:
        """Read a name as SGLang's `model:adapter`, which engines of that kind take as it is.

        It is one if no engine lists it as it stands, and the part before the first colon is a base
        model; SGLang need not list its adapters.

        Args:
            name: What a request names.
        """
        base, colon, adapter = name.partition(":")
        if not colon or base not in self.bases or name in self.names:
            return None
        return Alias(base, adapter)

    @cached_property
    def bases(self) -> frozenset[str]:
        """Every base model any endpoint lists."""
        return frozenset().union(
            *(served.bases for _, served in self._listed if served is not None)
        )

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name any endpoint lists."""
        return self.bases.union(
            *(served.adapters for _, served in self._listed if served is not None)
        )

    @cached_property
    def _unlisted(self) -> ModelMatch | None:
        """Match for a name that no engine lists: endpoints without a list, or all of them."""
        return self._split([served is None for _, served in self._listed])

    def _work_out(self, model: str, adapter: str) -> ModelMatch | None:
        if adapter:
            listing = [_lists(served, model, adapter) for _, served in self._listed]
            if not any(listing):
                return self.match(model)
        elif model in self.names:
            listing = [served is not None and model in served for _, served in self._listed]
        else:
            return self._unlisted
        pairs = zip(self._listed, listing, strict=True)
        match = self._split([lists or served is None for (_, served), lists in pairs])
        if len(self._known) < _MOST_KEPT:
            self._known[(model, adapter) if adapter else model] = match
        return match

    def _split(self, may: Sequence[bool]) -> ModelMatch | None:
        if all(may):
            return None
        return ModelMatch(
            positions=tuple([at for at, yes in enumerate(may) if yes]),
            others=tuple(
                [endpoint for (endpoint, _), yes in zip(self._listed, may, strict=True) if not yes]
            ),
        )


def _lists(models: ServedModels | None, model: str, adapter: str) -> bool:
    """True if an engine lists an adapter, and the base model where the request names it."""
    return (
        models is not None and adapter in models.adapters and (not model or model in models.bases)
    )
