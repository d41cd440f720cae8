"""Schema of the `scheduling` section, and of profiles before their plugins are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec

from extproc.config import validation

#: The table of kinds a plugin is looked up in.
Role = Literal["filters", "scorers", "costs", "pickers"]

ROLES: tuple[Role, ...] = get_args(Role)


class PluginEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A filter or the picker.

    Attributes:
        kind: Kind of the plugin; `extproc check --plugins` lists all. No default: it identifies
            the plugin.
        params: Parameters of the plugin. None: its defaults.
    """

    kind: validation.Name
    params: Mapping[str, object] = {}


class WeightedScorer(PluginEntry, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scorer and its weight.

    Attributes:
        weight: Factor of the score (0..1) in the total. 1: scorers count equally by default.
    """

    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0


#: The picker of a profile without one.
MAX_SCORE = PluginEntry(kind="max-score-picker")


class ProfileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scheduling profile written out.

    Attributes:
        name: Name in decisions and metrics. `custom` distinguishes it from the named strategies.
        filters: Filters in the order they run. None: every endpoint may serve.
        scorers: Scorers with weights. None: the picker alone decides.
        picker: Picker by totals. `max-score-picker` follows the weights.
        cost: Cost model in place of the sum of scores. Null: the scorers count.
    """

    name: validation.Name = "custom"
    filters: tuple[PluginEntry, ...] = ()
    scorers: tuple[WeightedScorer, ...] = ()
    picker: PluginEntry = MAX_SCORE
    cost: PluginEntry | None = None


class NamedPlugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plugin of an EndpointPickerConfig, which its profiles refer to.

    Attributes:
        type: Its kind, ours or upstream's. No default: it says what the entry is.
        name: Name in profiles; empty takes the type.
        parameters: Its parameters; none takes the defaults of the plugin.
    """

    type: validation.Name
    name: str = ""
    parameters: Mapping[str, object] = {}


class PluginRef(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """A plugin's part in a profile.

    Attributes:
        plugin_ref: Its name. No default: it says what the entry is.
        weight: Factor of a scorer's score; null is 1, as upstream.
    """

    plugin_ref: validation.Name
    weight: Annotated[float, msgspec.Meta(ge=0)] | None = None


class EppProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A profile of an EndpointPickerConfig, which refers to plugins.

    Attributes:
        name: Shown in decisions. No default: handlers choose by it.
        plugins: Filters in order, scorers with weights, at most one picker.
    """

    name: validation.Name
    plugins: tuple[PluginRef, ...] = ()


class EppPlugins(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="camel"
):
    """Scheduling of an EndpointPickerConfig.

    Attributes:
        plugins: Plugins that profiles refer to; at least one.
        scheduling_profiles: Which of the plugins make a profile, and their weights. None: all of
            them, in order.
    """

    plugins: tuple[NamedPlugin, ...]
    scheduling_profiles: tuple[EppProfile, ...] = ()


class SchedulingRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scheduling rules of a model, or of all; a profile comes before a strategy.

    Attributes:
        strategy: Name of a predefined profile. `adaptive` estimates seconds from learned engine
            speeds, so it has no weights to tune.
        profile: Profile that lists its plugins by roles. Null: the strategy.
    """

    strategy: validation.Name = "adaptive"
    profile: ProfileEntry | None = None


class ShadowRules(SchedulingRules, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scheduling rules of a shadow: its choices are compared with those that count, and dropped.

    Attributes:
        sample_ratio: Share of routed requests that it looks at (0..1). 0.1: a decision of the shadow
            costs as much CPU as one that counts.
    """

    sample_ratio: validation.Share = 0.1


class SchedulingSection(SchedulingRules, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choice of the endpoint for a request.

    Attributes:
        models: Rules for single models, by the model name in the request; for `model_adapter`, by
            the model. None: all models have the same rules.
        shadow: Second strategy or profile that decides on a sample of the routed requests, after they
            were answered, for comparison only; requests of models with rules of their own are not
            looked at. Null: none.
        allow_unsupported: Accept plugins of an EndpointPickerConfig that split requests over
            several engines, such as separate prefill engines. False: the deployment would seem to
            work while those engines are idle.
        fallbacks: Fallback endpoints named after the chosen endpoint (count). 0, because only a
            data plane with an override-host policy can use them.
        respect_subset: Choose only among the endpoints that a gateway allows (EPP protocol 004,
            subset hint). True, because other endpoints were not allowed to serve the request.
        unknown_model: Treatment of a request for a model that no endpoint lists, once all endpoints
            have listed their models: `pass` routes it as if all served it, `reject` answers 404
            with the known names. `pass`, as upstream: engines answer 404 themselves, and some serve
            names that they do not list.
        kubeai_names: Read `model_adapter` as KubeAI does: the base model before an underscore, its
            adapter behind it, where an endpoint lists both and none the complete name. The body's
            `model` becomes the adapter's name. True, because such a name serves nothing otherwise.
        plugin_files: Python files with further plugins, relative to the configuration file. None,
            because their code runs in this process.
        plugin_budget_ms: Longest call of an external plugin (milliseconds). After 3 overruns in 10
            calls the plugin is bypassed for 30 s. 2 are several decisions of built-in plugins over
            100 endpoints, and every stream waits that long.
        epp: Plugins of an EndpointPickerConfig, which come before the strategy. Null in a file of
            ours.
    """

    models: Mapping[str, SchedulingRules] = {}
    shadow: ShadowRules | None = None
    allow_unsupported: bool = False
    fallbacks: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    respect_subset: bool = True
    unknown_model: Literal["pass", "reject"] = "pass"
    kubeai_names: bool = True
    plugin_files: tuple[validation.Name, ...] = ()
    plugin_budget_ms: validation.PositiveMilliseconds = 2.0
    epp: EppPlugins | None = msgspec.field(name="_epp", default=None)


class PluginSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plugin of a profile.

    Attributes:
        role: The table of its kind.
        plugin: Its kind and parameters.
        path: Its path in the file.
        params: The key of its parameters in the file.
        weight: Factor of a scorer's score; unused for other roles.
    """

    role: Role
    plugin: PluginEntry
    path: validation.Path
    params: str
    weight: float = 1.0


class ProfileSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A profile before its plugins are built, whatever file it comes from.

    Attributes:
        name: Name in decisions.
        parts: Plugins in the order they run; without a picker, `max-score-picker` is added.
        path: Path of the profile in the file.
    """

    name: str
    parts: tuple[PluginSpec, ...]
    path: validation.Path

    def parts_of(self, role: Role) -> tuple[PluginSpec, ...]:
        """Return the parts of a role, in order."""
        return tuple(part for part in self.parts if part.role == role)
