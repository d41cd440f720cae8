"""Finds the profiles of an EndpointPickerConfig that route, by the handlers of its profiles.

A header may name the profile, or several profiles choose endpoints for the stages of a request. A
screener that keeps requests to engines by a header is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import msgspec

from extproc.config import epp_plugin_types, validation
from extproc.config.pool_sections import EppPlugins, EppProfile, NamedPlugin, PluginRef
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling.framework import UpstreamParameters

#: Keys that lead to a parameter.
_Path = tuple[str, ...]

#: Handlers that choose among profiles: type to the parameters that name the one that routes (the first
#: that is there counts), and its name where none does.
_HANDLERS: Mapping[str, tuple[tuple[_Path, ...], str]] = {
    "disagg-profile-handler": ((("profiles", "decode"), ("decodeProfile",)), "decode"),
    "pd-profile-handler": ((("decodeProfile",),), "decode"),
    "header-profile-handler": ((("defaultProfile",),), "decode"),
    "data-parallel-profile-handler": ((), "decode"),
    "slo-aware-profile-handler": ((), "default"),
    "predicted-latency-profile-handler": ((), "predicted-latency-no-routing"),
}

#: Handlers that split requests over the endpoints of several profiles.
_SPLITTING: Final = ("disagg-profile-handler", "pd-profile-handler")

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


class _StageNames(UpstreamParameters, frozen=True):
    """Names by stage: of profiles, or of deciders."""

    decode: str = ""
    prefill: str = ""
    encode: str = ""


class _Deciders(UpstreamParameters, frozen=True):
    prefill: str = ""
    encode: str = ""


class _Stages(UpstreamParameters, frozen=True):
    """Parameters of `disagg-profile-handler`."""

    stage_order: str = ""
    profiles: _StageNames = _StageNames()
    deciders: _Deciders = _Deciders()


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
    def nested(self) -> _Stages:
        """The parameters in the newer form."""
        return _Stages(
            self.stage_order,
            _StageNames(self.decode_profile, self.prefill_profile, self.encode_profile),
            _Deciders(
                self.prefill_decider_plugin_name or self.decider_plugin_name,
                self.encode_decider_plugin_name,
            ),
        )


class StageSource(msgspec.Struct, frozen=True):
    """A stage of requests, as a handler describes it.

    Attributes:
        profile: Name of the profile that chooses the endpoint.
        decider: The decider; None where another endpoint always does the stage.
        place: Place of the decider, or of the handler without one.
    """

    profile: str
    decider: NamedPlugin | None
    place: Place


class _HeaderSelector(UpstreamParameters, frozen=True, kw_only=True):
    name: str = ""
    header_name: str
    label_key: str
    mode: Literal["strict", "prefer"]


class _Screener(UpstreamParameters, frozen=True):
    header_selectors: tuple[_HeaderSelector, ...] | None = None


def check_supported(scheduling: EppPlugins, file: Place) -> None:
    """Reject plugins that keep requests to some endpoints by a header.

    Raises:
        ConfigError: The file has such a plugin, which is not supported here.
    """
    for screener, place in scheduling.find_plugins({_SCREENER}, file):
        _check_selectors(screener, place)


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


def check_handlers(scheduling: EppPlugins, file: Place) -> None:
    """Reject several handlers of profiles, as upstream does: each would act here.

    Raises:
        ConfigError: The file has more than one.
    """
    rows = epp_plugin_types.plugin_types()
    types = {name for name, row in rows.items() if row.role == "handler"}
    handlers = [(at, p.type) for at, p in enumerate(scheduling.plugins) if p.type in types]
    if len(handlers) > 1:
        (_, first), (at, second), *_ = handlers
        raise ConfigError(
            file / "plugins" / at / "type",
            wanted="one profile handler",
            got=f"{first} and {second}",
            fix="remove one",
        )


def find_profile_header(scheduling: EppPlugins, file: Place) -> str:
    """Return the header that names the profile of a request, in lower case; empty for none.

    As upstream, nothing is chosen where there is a single profile.

    Raises:
        ConfigError: The parameters of the handler cannot be read.
    """
    if len(scheduling.scheduling_profiles) < 2:
        return ""
    handler, place = next(scheduling.find_plugins(_HANDLERS, file), (None, file))
    if handler is None or handler.type != _BY_HEADER:
        return ""
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
        refs = tuple(PluginRef(plugin_ref=plugin.reference) for plugin in scheduling.plugins)
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


def find_stages(scheduling: EppPlugins, file: Place) -> Mapping[str, StageSource]:
    """Return the stages of requests that other endpoints may do: `prefill`, `encode` or both.

    As upstream, a stage without a decider never runs, nor one whose profile does not exist; in the
    order `prefill-first`, prefill needs no decider.

    Raises:
        ConfigError: Upstream refuses the parameters of the handler.
    """
    names = {profile.name for profile in scheduling.scheduling_profiles}
    return {
        stage: source
        for stage, source in _read_sources(scheduling, file).items()
        if source.profile in names
    }


def warn_of_missing_profiles(scheduling: EppPlugins) -> Iterator[str]:
    """Warn of stages with a decider, and without the profile that would choose the endpoint."""
    names = {profile.name for profile in scheduling.scheduling_profiles}
    for stage, source in _read_sources(scheduling, Place("")).items():
        if source.profile not in names and source.decider is not None:
            yield (
                f"plugin {source.decider.reference} decides nothing: there is no "
                f"profile {source.profile}, so the serving endpoint does {stage} itself"
            )


def _read_sources(scheduling: EppPlugins, file: Place) -> Mapping[str, StageSource]:
    handlers = [(at, p) for at, p in enumerate(scheduling.plugins) if p.type in _SPLITTING]
    if not handlers:
        return {}
    at, handler = handlers[0]
    place = file / "plugins" / at / "parameters"
    stages = _read_stages(handler, place)
    sources: dict[str, StageSource] = {}
    for stage, decider in msgspec.structs.asdict(stages.deciders).items():
        profile = getattr(stages.profiles, stage) or stage
        if decider:
            number, plugin = _find_decider(scheduling, decider, place)
            sources[stage] = StageSource(profile, plugin, file / "plugins" / number)
        elif stage == "prefill" and _STAGE_ORDERS[_fold(stages.stage_order)]:
            sources[stage] = StageSource(profile, None, file / "plugins" / at)
    return sources


def _find_decider(scheduling: EppPlugins, name: str, place: Place) -> tuple[int, NamedPlugin]:
    for at, plugin in enumerate(scheduling.plugins):
        if plugin.reference == name:
            return at, plugin
    names = [plugin.reference for plugin in scheduling.plugins]
    raise ConfigError(
        place,
        wanted="a decider among the plugins of the file",
        got=name,
        fix=validation.suggest(name, names, "add it to plugins"),
    )


def _decoding(handler: NamedPlugin) -> str:
    """Return the name of the profile that picks the serving endpoint."""
    paths, name = _HANDLERS[handler.type]
    return next(filter(None, [_find_text(handler, path) for path in paths]), name)


def _read_stages(handler: NamedPlugin, place: Place) -> _Stages:
    """Read the parameters of a handler that splits requests."""
    if handler.type == "pd-profile-handler":
        names = ("decodeProfile", "prefillProfile", "deciderPluginName")
        written = {key: handler.parameters[key] for key in names if key in handler.parameters}
        flat = validation.to_struct(written, _FlatStages, where=place)
        decider = flat.decider_plugin_name or "prefix-based-pd-decider"
        return msgspec.structs.replace(flat.nested, deciders=_Deciders(decider))
    keys = handler.parameters.keys()
    flat_keys = {field.encode_name for field in msgspec.structs.fields(_FlatStages)}
    if (flat_keys - {"stageOrder"}) & keys and not {"profiles", "deciders"} & keys:
        stages = validation.to_struct(handler.parameters, _FlatStages, where=place).nested
    else:
        stages = validation.to_struct(handler.parameters, _Stages, where=place)
    order = _fold(stages.stage_order)
    if order not in _STAGE_ORDERS:
        raise ConfigError(
            place / "stageOrder",
            wanted="decode-first or prefill-first",
            got=validation.show(stages.stage_order),
            fix="write decode-first, which is the default",
        )
    if _STAGE_ORDERS[order] and stages.deciders.prefill:
        raise ConfigError(
            place / "stageOrder",
            wanted="decode-first where a decider is named for prefill",
            got=validation.show(stages.stage_order),
            fix="remove the decider, which upstream refuses there, or write decode-first",
        )
    return stages


def _fold(order: str) -> str:
    return order.lower().replace("-", "").replace("_", "")


def _find_text(plugin: NamedPlugin, path: _Path) -> str:
    """Return the text of a parameter without blanks around it; empty for none."""
    value: object = plugin.parameters
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value.strip() if isinstance(value, str) else ""
