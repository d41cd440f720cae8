"""Schema of the `scheduling` section, and of profiles before their plugins are built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec

from extproc.config import constraints, validation

#: The table of kinds a plugin is looked up in.
Role = Literal["filters", "scorers", "costs", "pickers"]

ROLES: tuple[Role, ...] = get_args(Role)


class PluginEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A filter or the picker.

    Attributes:
        kind: Its name in the catalogue; `extproc check` lists them. No default: it says what the
            entry is.
        params: Its parameters; none takes the defaults of the plugin, each of which is explained
            there.
    """

    kind: constraints.Name
    params: Mapping[str, object] = {}


class WeightedScorer(PluginEntry, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scorer and its weight.

    Attributes:
        weight: Factor of its score (0..1) in the total. 1: scorers are equal by default.
    """

    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0


#: The picker of a profile without one.
MAX_SCORE = PluginEntry(kind="max-score-picker")


class ProfileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A scheduling profile written out.

    Attributes:
        name: Shown in decisions. `custom` tells it from the named strategies.
        filters: In the order they run. None: every endpoint may serve.
        scorers: Each with its weight. None: then the picker alone decides.
        picker: Chooses by totals. `max-score-picker` does what the weights say.
        cost: A cost model in place of the scorers' sum. None: the weights say what counts.
    """

    name: constraints.Name = "custom"
    filters: tuple[PluginEntry, ...] = ()
    scorers: tuple[WeightedScorer, ...] = ()
    picker: PluginEntry = MAX_SCORE
    cost: PluginEntry | None = None


class NamedPlugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plugin of an EndpointPickerConfig, which its profiles refer to.

    Attributes:
        type: Its kind, ours or upstream's. No default: it says what the entry is.
        name: What profiles call it; empty takes the type.
        parameters: Its parameters; none takes the defaults of the plugin.
    """

    type: constraints.Name
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

    plugin_ref: constraints.Name
    weight: Annotated[float, msgspec.Meta(ge=0)] | None = None


class EppProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A profile of an EndpointPickerConfig, which refers to plugins.

    Attributes:
        name: Shown in decisions. No default: handlers choose by it.
        plugins: Filters in order, scorers with weights, at most one picker.
    """

    name: constraints.Name
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
        strategy: One word for a whole profile. `adaptive` estimates seconds from what it learns,
            so it has no weights to tune.
        profile: A profile written out by roles; null takes the strategy.
    """

    strategy: constraints.Name = "adaptive"
    profile: ProfileEntry | None = None


class SchedulingSection(SchedulingRules, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choice of the endpoint for a request.

    Attributes:
        models: Rules of single models, by the name in the request; of `model_adapter`, by the
            model. None: all are routed alike.
        allow_unsupported: Go on where plugins of an EndpointPickerConfig ask for what is missing
            here and a deployment is built around, such as prefill engines of their own. False: it would look as if it
            worked, with engines that idle.
        fallbacks: Further endpoints named after the chosen one (count). 0, because only a data
            plane with an override-host policy can use them.
        respect_subset: Keep to the endpoints a gateway allows (EPP protocol 004, subset hint). True,
            because ignoring it sends requests where they were not allowed.
        unknown_model: What becomes of a request for a model that no endpoint lists, once all of
            them have listed theirs: `pass` routes it as if all served it, `reject` answers 404 with
            the names there are. `pass`, as upstream: engines answer 404 themselves, and some serve
            names they do not list.
        kubeai_names: Read `model_adapter` as KubeAI does: the base model before an underscore, its
            adapter behind it, where an endpoint lists both and none the whole name. The body's
            `model` becomes the adapter's name. True, because such a name serves nothing otherwise.
        plugin_files: Python files whose plugins may be named, relative to the configuration file.
            None, because their code runs in this process.
        plugin_budget_ms: Milliseconds one call of a plugin of others may take; after 3 overruns in
            10 calls it is left out for 30 s. 2 are several decisions of built-in plugins over 100
            endpoints, and every stream waits that long.
        epp: Plugins of an EndpointPickerConfig, before the strategy; null in our own file.
    """

    models: Mapping[str, SchedulingRules] = {}
    allow_unsupported: bool = False
    fallbacks: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    respect_subset: bool = True
    unknown_model: Literal["pass", "reject"] = "pass"
    kubeai_names: bool = True
    plugin_files: tuple[constraints.Name, ...] = ()
    plugin_budget_ms: constraints.PositiveMilliseconds = 2.0
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
