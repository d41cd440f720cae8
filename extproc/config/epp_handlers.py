"""Finds the profiles of an EndpointPickerConfig that route, by the handlers of its profiles.

Upstream, some handlers run several profiles for a request, one for each engine that takes part. Here
one engine does all of it; a header may name the profile that picks it. A handler that needs several is
refused, as is a screener that keeps requests to engines by a header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from extproc.config import validation
from extproc.config.pool_sections import EppPlugins, EppProfile, NamedPlugin, PluginRef
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling.framework import UpstreamParameters

_NOT_SPLIT = "prefill, decode and encode are not split here"

#: Keys that lead to a parameter.
_Path = tuple[str, ...]

#: Handlers that choose among profiles: type to the parameters that name the one that routes (the first
#: that is there counts), its name where none does, and what is missing here of handlers that use several
#: profiles; else empty.
_HANDLERS: Mapping[str, tuple[tuple[_Path, ...], str, str]] = {
    "disagg-profile-handler": (
        (("profiles", "decode"), ("decodeProfile",)),
        "decode",
        _NOT_SPLIT,
    ),
    "pd-profile-handler": ((("decodeProfile",),), "decode", _NOT_SPLIT),
    "header-profile-handler": ((("defaultProfile",),), "decode", ""),
    "data-parallel-profile-handler": ((), "decode", ""),
    "slo-aware-profile-handler": ((), "default", ""),
    "predicted-latency-profile-handler": ((), "predicted-latency-no-routing", ""),
}

#: Type of the plugin that keeps requests to endpoints whose label equals a header, such as their
#: revision.
_SCREENER: Final = "disaggregatedset-rollout-screener"

#: Words of `stageOrder`, in lower case without hyphens and underscores, and whether prefill comes first.
_STAGE_ORDERS: Mapping[str, bool] = {
    **dict.fromkeys(("", "decode", "decodefirst"), False),
    **dict.fromkeys(("prefill", "prefillfirst"), True),
}


#: Handler that runs the profile that a header of the request names.
_BY_HEADER = "header-profile-handler"


class _HeaderChoice(UpstreamParameters, frozen=True):
    """Parameters of `header-profile-handler`."""

    header_name: str = ""
    default_profile: str = ""


class _StageProfiles(UpstreamParameters, frozen=True):
    decode: str = ""
    prefill: str = ""
    encode: str = ""


class _StageDeciders(UpstreamParameters, frozen=True):
    prefill: str = ""
    encode: str = ""


class _Stages(UpstreamParameters, frozen=True):
    """Parameters of `disagg-profile-handler`."""

    stage_order: str = ""
    profiles: _StageProfiles = _StageProfiles()
    deciders: _StageDeciders = _StageDeciders()

    @property
    def has_decider(self) -> bool:
        return bool(self.deciders.prefill or self.deciders.encode)


class _FlatStages(UpstreamParameters, frozen=True):
    """The same parameters as earlier releases name them; upstream refuses both forms at once."""

    stage_order: str = ""
    decode_profile: str = ""
    prefill_profile: str = ""
    encode_profile: str = ""
    prefill_decider_plugin_name: str = ""
    encode_decider_plugin_name: str = ""
    decider_plugin_name: str = ""

    @property
    def has_decider(self) -> bool:
        return bool(
            self.prefill_decider_plugin_name
            or self.encode_decider_plugin_name
            or self.decider_plugin_name
        )


class _HeaderSelector(UpstreamParameters, frozen=True, kw_only=True):
    name: str = ""
    header_name: str
    label_key: str
    mode: Literal["strict", "prefer"]


class _Screener(UpstreamParameters, frozen=True):
    header_selectors: tuple[_HeaderSelector, ...] | None = None


def check_supported(scheduling: EppPlugins, file: Place) -> None:
    """Reject plugins that split requests over several engines, or keep them to some by a header.

    Raises:
        ConfigError: The file has such a plugin, which is not supported here.
    """
    profiles = [profile.name for profile in scheduling.scheduling_profiles]
    for index, plugin in enumerate(scheduling.plugins):
        if plugin.type == _SCREENER:
            _check_selectors(plugin, file / "plugins" / index / "parameters")
        _, _, missing = _HANDLERS.get(plugin.type, ((), "", ""))
        if (
            missing
            and len(profiles) > 1
            and _uses_others(plugin, file / "plugins" / index / "parameters")
        ):
            others = ", ".join(name for name in profiles if name != _decoding(plugin))
            raise ConfigError(
                file / "plugins" / index / "type",
                wanted="one endpoint for a request",
                got=f"{plugin.type} with profiles {', '.join(profiles)}: "
                f"{missing}, so engines of {others} would idle",
                fix="route to engines that do all of it with one profile, or accept that engines "
                f"of {_decoding(plugin)} do all of it with --allow-unsupported "
                "(scheduling.allow_unsupported)",
            )


def _check_selectors(screener: NamedPlugin, place: Place) -> None:
    """Reject selectors that upstream enforces; those of the mode `prefer` exclude no endpoint."""
    parameters = {"headerSelectors": screener.parameters.get("headerSelectors")}
    selectors = validation.to_struct(parameters, _Screener, where=place).header_selectors or ()
    for at, selector in enumerate(selectors):
        if selector.mode != "prefer":
            raise ConfigError(
                place / "headerSelectors" / at,
                wanted="no strict selector",
                got=f"{_SCREENER} with the header {selector.header_name}, which is not read here, so "
                f"requests would reach endpoints with another {selector.label_key}",
                fix="give each value a pool that matches the header, in pools of an ExtProcConfig, or "
                "accept that all endpoints get all requests with --allow-unsupported "
                "(scheduling.allow_unsupported)",
            )


def find_profile_header(scheduling: EppPlugins, file: Place) -> str:
    """Return the header that names the profile of a request, in lower case; empty for none.

    As upstream, nothing is chosen where there is a single profile.

    Raises:
        ConfigError: The parameters of the handler cannot be read.
    """
    if len(scheduling.scheduling_profiles) < 2:
        return ""
    handlers = ((at, p) for at, p in enumerate(scheduling.plugins) if p.type in _HANDLERS)
    at, handler = next(handlers, (0, None))
    if handler is None or handler.type != _BY_HEADER:
        return ""
    place = file / "plugins" / at / "parameters"
    chosen = validation.to_struct(handler.parameters, _HeaderChoice, where=place)
    return chosen.header_name.strip().lower() or "epp-profile"


def find_profile(scheduling: EppPlugins, file: Place, *, name: str = "") -> tuple[EppProfile, int]:
    """Return the profile that picks the serving endpoint, and its index.

    Args:
        name: Name of the profile; empty for the one that the handler names.

    Raises:
        ConfigError: It is not clear which one does, as where two have one name.
    """
    profiles = scheduling.scheduling_profiles
    if not profiles:
        refs = tuple(
            PluginRef(plugin_ref=plugin.name or plugin.type) for plugin in scheduling.plugins
        )
        return EppProfile(name="default", plugins=refs), 0
    if len(profiles) == 1:
        return profiles[0], 0
    names = [profile.name for profile in profiles]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise ConfigError(
            file / "schedulingProfiles",
            wanted="names that differ",
            got=f"{twice!r} twice",
            fix="rename or remove one",
        )
    wanted = name or next(
        (_decoding(plugin) for plugin in scheduling.plugins if plugin.type in _HANDLERS), ""
    )
    for at, profile in enumerate(profiles):
        if profile.name == wanted:
            return profile, at
    raise ConfigError(
        file / "schedulingProfiles",
        wanted=f"the profile {wanted}" if wanted else "one profile, or a handler that names one",
        got=", ".join(names),
        fix="keep the profile that picks the serving endpoint",
    )


def _decoding(handler: NamedPlugin) -> str:
    """Return the name of a handler's decode profile; other stages are not picked here."""
    paths, name, _ = _HANDLERS[handler.type]
    return next(filter(None, [_find_text(handler, path) for path in paths]), name)


def _uses_others(handler: NamedPlugin, place: Place) -> bool:
    """True if a handler may run other profiles than the one that routes.

    Upstream, a stage without a decider never runs; in the order `prefill-first`, prefill needs none.

    Raises:
        ConfigError: Upstream refuses the parameters.
    """
    if handler.type != "disagg-profile-handler":
        return True
    keys = handler.parameters.keys()
    flat = {field.encode_name for field in msgspec.structs.fields(_FlatStages)} - {"stageOrder"}
    is_flat = bool(flat & keys) and not {"profiles", "deciders"} & keys
    stages: _Stages | _FlatStages
    if is_flat:
        stages = validation.to_struct(handler.parameters, _FlatStages, where=place)
    else:
        stages = validation.to_struct(handler.parameters, _Stages, where=place)
    order = stages.stage_order.lower().replace("-", "").replace("_", "")
    if order not in _STAGE_ORDERS:
        raise ConfigError(
            place / "stageOrder",
            wanted="decode-first or prefill-first",
            got=validation.show(stages.stage_order),
            fix="write decode-first, which is the default",
        )
    return stages.has_decider or _STAGE_ORDERS[order]


def _find_text(plugin: NamedPlugin, path: _Path) -> str:
    """Return the text of a parameter without blanks around it; empty for none."""
    value: object = plugin.parameters
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value.strip() if isinstance(value, str) else ""
