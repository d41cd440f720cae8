"""Plugin types of the upstream EPP, and their treatment here, as `epp_plugin_types.yaml` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

import msgspec
import yaml

from extproc.discovery.yaml_loader import YAML_LOADER


class BoundParameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A parameter of an older filter that became a condition of `utilization-filter`.

    Attributes:
        parameter: The older parameter, the bound.
        default: Its default, in the unit of the metric; None if upstream had none.
    """

    metric: str
    parameter: str
    default: float | None = None


class IgnoredParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters that change what upstream does, and have no effect here.

    Attributes:
        defaults: Their names, and values that upstream has by default in its releases.
        note: What happens instead, for the warning about other values.
    """

    defaults: Mapping[str, tuple[object, ...]]
    note: str


#: No parameters that are ignored.
_NONE_IGNORED = IgnoredParameters(defaults={}, note="")


class UpstreamType(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An upstream plugin type, and its treatment here.

    Attributes:
        role: `filter`, `scorer`, `picker`, `handler`, `decider`, `producer`, `parser`, `source`,
            `extractor`, `detector`, `policy`, `admitter`, `discovery` or `hook`.
        status: `built`: our registry has a plugin of that kind with the same parameters.
            `deprecated`: still read, and `note` is the warning with the replacement.
            `no-op`: our picker does its work without configuration, or does not need it; accepted,
            and `note` names the part that does it. `unsupported`: no part of ours does it; `note`
            describes the effect.
        name: Its `type` in a file.
        kind: Its kind in the registry if it is built, or deprecated and built; else empty.
        instead: The upstream type that replaced a deprecated type, or a kind of ours that does the
            same if upstream has no successor; empty for other statuses.
        parameters: Parameters that are accepted without a warning, as they are converted, or their
            effect is the same or that of the type: all other known parameters of a no-op or
            unsupported type, and those of a built type that are no fields of its class.
        ignored: Parameters that are accepted with a warning, unless they have upstream's default.
        default_unless_positive: Parameters whose default is used, here and upstream, where the value
            is 0 or less.
        default_unless_share: The same, where the value is not within 0 to 1.
        refuses_any: True if upstream reads the parameters of a type that has none, and refuses any;
            it leaves those of all other types without parameters unread.
        note: A sentence for readers of the configuration; empty if there is nothing to add.
        rename: Older names of parameters to those of the kind.
        condition: The parameter that became a condition; None for none.
    """

    role: str
    status: Literal["built", "deprecated", "no-op", "unsupported"] = "built"
    name: str = ""
    kind: str = ""
    instead: str = ""
    parameters: tuple[str, ...] = ()
    ignored: IgnoredParameters = _NONE_IGNORED
    default_unless_positive: tuple[str, ...] = ()
    default_unless_share: tuple[str, ...] = ()
    refuses_any: bool = False
    note: str = ""
    rename: Mapping[str, str] = {}
    condition: BoundParameter | None = None

    @property
    def is_unread(self) -> bool:
        """True for a type without effect whose parameters upstream does not read either."""
        known = self.parameters or self.ignored.defaults
        return not (self.kind or known or self.refuses_any)

    def convert_parameters(self, written: Mapping[str, object]) -> Mapping[str, object]:
        """Return the parameters as the kind has them, without those that have no effect."""
        params = {
            self.rename.get(name, name): value
            for name, value in written.items()
            if name not in self.parameters
            and name not in self.ignored.defaults
            and not self._is_default(name, value)
        }
        bound = self.condition
        if bound is None:
            return params
        condition: dict[str, object] = {"metric": bound.metric}
        value = params.pop(bound.parameter, None)
        if value is None:
            value = bound.default
        if value is not None:
            condition["maxValue"] = value
        return {"conditions": [condition], **params}

    def _is_default(self, name: str, value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        if name in self.default_unless_share:
            return not 0 <= value <= 1
        return name in self.default_unless_positive and value <= 0


@cache
def plugin_types() -> Mapping[str, UpstreamType]:
    """Return the rows by upstream name, in the order of the file, which is read once."""
    text = resources.files("extproc.config").joinpath("epp_plugin_types.yaml").read_text("utf-8")
    tree = yaml.load(text, YAML_LOADER)  # noqa: S506 - both are safe loaders
    rows = msgspec.convert(tree, dict[str, UpstreamType])
    return MappingProxyType({name: _completed(name, row) for name, row in rows.items()})


def _completed(name: str, row: UpstreamType) -> UpstreamType:
    """The row with its name, and the kind and the note that follow from it."""
    kind, note = row.kind, row.note
    if row.status == "built":
        kind = kind or name
    elif row.status == "deprecated":
        note = note or f"{name} is deprecated: write {row.instead} instead"
    return msgspec.structs.replace(row, name=name, kind=kind, note=note)
