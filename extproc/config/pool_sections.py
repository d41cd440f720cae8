"""Schema of the sections `scheduling`, `pool`, `pools` and `cluster`, and of profiles to be built."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, get_args

import msgspec

from extproc.config import validation
from extproc.config.autoscaling import ScalingSection
from extproc.config.pool_annotations import MatchRule
from extproc.discovery.kubernetes.settings import MAX_PORTS
from extproc.election import ElectionSettings
from extproc.endpoint import LabelExpression
from extproc.flow_control.priority_band import Priority
from extproc.pool import inference_policy
from extproc.routing import pool_match
from extproc.scheduling.framework import UpstreamParameters
from extproc.scheduling.kv_cache_source import KvCacheSource
from extproc.scheduling.load_bounds import SaturationRules

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

    NULL_IS_ABSENT: ClassVar[bool] = True

    type: validation.Name
    name: str = ""
    parameters: Mapping[str, object] = {}

    @property
    def reference(self) -> str:
        """The name by which others refer to it."""
        return self.name or self.type


class PluginRef(UpstreamParameters, frozen=True, kw_only=True):
    """A plugin's part in a profile.

    Attributes:
        plugin_ref: Its name. No default: it says what the entry is.
        weight: Factor of a scorer's score; null is 1, as upstream.
    """

    plugin_ref: validation.Name
    weight: Annotated[float, msgspec.Meta(ge=0)] | None = None


class EppProfile(UpstreamParameters, frozen=True, kw_only=True):
    """A profile of an EndpointPickerConfig, which refers to plugins.

    Attributes:
        name: Shown in decisions. No default: handlers choose by it.
        plugins: Filters in order, scorers with weights, at most one picker.
    """

    name: validation.Name
    plugins: tuple[PluginRef, ...] = ()


class EppPlugins(UpstreamParameters, frozen=True, kw_only=True):
    """Scheduling of an EndpointPickerConfig.

    Attributes:
        plugins: Plugins that profiles refer to; at least one.
        scheduling_profiles: Which of the plugins make a profile, and their weights. None: all of
            them, in order.
    """

    plugins: tuple[NamedPlugin, ...]
    scheduling_profiles: tuple[EppProfile, ...] = ()

    def find_plugins(
        self, types: Collection[str], file: validation.Place
    ) -> Iterator[tuple[NamedPlugin, validation.Place]]:
        """Yield the plugins of some types with the places of their parameters."""
        for index, plugin in enumerate(self.plugins):
            if plugin.type in types:
                yield plugin, file / "plugins" / index / "parameters"


class SchedulingRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scheduling rules of a model, or of all; a profile comes before a strategy.

    Attributes:
        strategy: Name of a predefined profile. `adaptive` estimates seconds from learned engine
            speeds, so it has no weights to tune.
        goal: What `adaptive` prefers where it cannot have both. `first-token`: only seconds until first
            tokens count, of the request and of others. `balanced`: those weigh most, and seconds after
            the first token decide between endpoints that are close. `throughput`: an early end of whole
            answers, seconds after the first token count ten times as much. Profiles without the cost
            `estimated-time` have none.
        profile: Profile that lists its plugins by roles. Null: the strategy.
    """

    strategy: validation.Name = "adaptive"
    goal: Literal["first-token", "balanced", "throughput"] = "balanced"
    profile: ProfileEntry | None = None


class ShadowRules(SchedulingRules, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scheduling rules of a shadow: its choices are compared with those that count, and dropped.

    Attributes:
        sample_ratio: Share of routed requests that it looks at (0..1). 0.1: a decision of the shadow
            costs as much CPU as one that counts.
    """

    sample_ratio: validation.Share = 0.1


class StageRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choice of the endpoint that does a stage of a request in place of the serving one.

    Attributes:
        profile: Profile that chooses it. No default: only filters by a label, such as `prefill-filter`,
            keep it to endpoints of the stage.
        decider: Plugin that says for each request whether another endpoint does the stage. Null:
            `estimated-time-pd-decider` for prefill, `always-disagg-multimodal-decider` for encode.
    """

    profile: ProfileEntry
    decider: PluginEntry | None = None


class DisaggregationRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Stages that other endpoints may do, for a sidecar at the serving endpoint that asks them.

    Attributes:
        prefill: Computes the prompt; the address goes to the sidecar in `x-prefiller-host-port`. Null:
            the serving endpoint does.
        encode: Encodes images, videos and audio; addresses in `x-encoder-hosts-ports`. Null: the
            endpoint that computes the prompt does.
    """

    prefill: StageRules | None = None
    encode: StageRules | None = None

    @property
    def by_name(self) -> dict[str, StageRules]:
        """The rules that there are, by the name of the stage."""
        rules = msgspec.structs.asdict(self)
        return {name: rule for name, rule in rules.items() if rule is not None}


class SchedulingSection(SchedulingRules, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choice of the endpoint for a request.

    Attributes:
        models: Rules for single models, by the model name in the request after rewrites; for
            `model_adapter`, by the model. None: all models have the same rules.
        shadow: Second strategy or profile that decides on a sample of the routed requests, after they
            were answered, for comparison only; requests of models with rules of their own are not
            looked at. Null: none.
        disaggregation: Prefill and encode on other endpoints than the serving one, for models without
            rules of their own; an EndpointPickerConfig says it with `disagg-profile-handler`. Null: the
            serving endpoint computes everything.
        kv_cache_source: Name an engine that has more of the prompt cached than the one that computes it,
            in `x-kv-cache-source-host-port`, for a sidecar that pulls the KV cache from there; an
            EndpointPickerConfig says it with `p2p-source-producer`. Null, because engines need a tier of
            their KV cache that others can read.
        saturation: Detectors that say when requests with a priority below 0 are refused, whatever the
            profile; an EndpointPickerConfig says it with `saturationDetector`. Null: while every endpoint
            is saturated by a detector among the filters of the profile, or without one by 5 waiting
            requests or 0.8 of its KV cache, upstream's thresholds. `flow_control.usage_limit` compares
            the mean of these detectors too.
        allow_unsupported: Accept plugins of an EndpointPickerConfig that keep requests to some
            endpoints by a header, such as those of a revision. False: the deployment would seem to
            work while endpoints get requests that are not for them.
        fallbacks: Further endpoints that Envoy tries if the chosen one fails (count). 0, because
            only a data plane with an override-host policy can use them.
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
    disaggregation: DisaggregationRules | None = None
    kv_cache_source: KvCacheSource | None = None
    saturation: SaturationRules | None = None
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
        place: Its place in the file.
        params: The key of its parameters in the file.
        weight: Factor of a scorer's score; unused for other roles.
    """

    role: Role
    plugin: PluginEntry
    place: validation.Place
    params: str
    weight: float = 1.0


class ProfileSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A profile before its plugins are built, whatever file it comes from.

    Attributes:
        name: Name in decisions.
        parts: Plugins in the order they run; without a picker, `max-score-picker` is added.
        place: Place of the profile in the file.
    """

    name: str
    parts: tuple[PluginSpec, ...]
    place: validation.Place

    def parts_of(self, role: Role) -> tuple[PluginSpec, ...]:
        """Return the parts of a role, in order."""
        return tuple(part for part in self.parts if part.role == role)


#: A port number of an engine (TCP).
EnginePort = Annotated[int, msgspec.Meta(ge=1, le=65535)]


Weight = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class RewriteTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that replaces the requested model.

    Attributes:
        model: Name to write into the body, a base model or an adapter. No default.
        weight: Weight among the targets. Null: if no target has a weight, all are drawn with equal
            probability; otherwise a target without a weight is never drawn.
    """

    model: validation.BoundedName
    weight: Weight | None = None


class RewriteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A rewrite of requested models to targets.

    Attributes:
        models: Exact names in requests. None: every name that no other rewrite lists.
        targets: Models to draw from, at least one.
    """

    models: tuple[validation.BoundedName, ...] = ()
    targets: Annotated[tuple[RewriteTarget, ...], msgspec.Meta(min_length=1)]


def build_policy(
    objectives: Mapping[str, int], rewrites: Sequence[RewriteEntry]
) -> inference_policy.InferencePolicy:
    """Build the policy of a pool from its sections."""
    if not (objectives or rewrites):
        return inference_policy.EMPTY_POLICY
    rules = msgspec.convert(
        rewrites, tuple[inference_policy.RewriteRule, ...], from_attributes=True
    )
    return inference_policy.InferencePolicy(objectives, rules)


def describe_policy(
    objectives: Mapping[str, int], rewrites: Sequence[RewriteEntry]
) -> Iterator[str]:
    """Describe the sections, a line each for `extproc check`."""
    if objectives:
        ranked = sorted(objectives.items(), key=lambda pair: (-pair[1], pair[0]))
        yield "objectives  " + ", ".join(f"{name} {priority}" for name, priority in ranked)
    head = "rewrites    "
    for rewrite in rewrites:
        targets = ", ".join(
            target.model if target.weight is None else f"{target.model} ({target.weight})"
            for target in rewrite.targets
        )
        yield f"{head}{', '.join(rewrite.models) or 'every other model'} to {targets}"
        head = " " * len(head)


def warnings(rewrites: Sequence[RewriteEntry], where: str) -> Iterator[str]:
    """Warn of rewrites that are valid and probably a mistake.

    Args:
        where: Where they stand, such as `pool.rewrites`.
    """
    first: dict[str, int] = {}
    for at, rewrite in enumerate(rewrites):
        for model in rewrite.models or ("",):
            before = first.setdefault(model, at)
            if before != at:
                named = model or "every other model"
                yield f"{where}[{at}] is never used for {named}: {where}[{before}] comes first"
        weights = [target.weight for target in rewrite.targets]
        unweighted = [target.model for target in rewrite.targets if target.weight is None]
        if sum(weight or 0 for weight in weights) and unweighted:
            yield f"{where}[{at}] never draws {', '.join(unweighted)}: others have a weight"
        elif 0 in weights and not any(weights):
            yield f"{where}[{at}] has only weights of 0: its targets are drawn alike"


class EndpointEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An endpoint in the configuration.

    Attributes:
        address: `ip:port`, `[ipv6]:port` or `hostname:port`; a name stands for every address it
            resolves to. No default: an endpoint is its address.
        name: Display name; empty takes the address.
        labels: Labels for filters and scorers, such as hardware, zone or role. None.
    """

    address: validation.Name
    name: str = ""
    labels: Mapping[str, str] = {}


class KubernetesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The endpoints of a pool in a Kubernetes cluster: exactly one of the first three fields.

    Attributes:
        inference_pool: Name of an InferencePool, whose selector and target ports are used.
        selector: Labels that pods must have, for clusters without the CRD. None.
        selector_expressions: Further conditions on labels of pods, with or without `selector`. None.
        service: Name of a Service whose EndpointSlices are used; labels of pods are then unknown.
            Empty for none.
        namespace: Namespace of these objects. Empty: the one this process runs in, from the
            environment variable NAMESPACE or the service account, else `default`.
        group: API group of the InferencePool. `inference.networking.k8s.io` is v1; the older
            `inference.networking.x-k8s.io` is v1alpha2.
        ports: Ports of the pods that the selector matches, each an endpoint of its own. None: pods
            name their port in the annotation `model-pod-port`, as those of KubeAI do.
        port: Name of the port of the Service, or its number on the pods. Empty: its only port.
    """

    inference_pool: str = ""
    selector: Mapping[validation.Name, str] = {}
    selector_expressions: tuple[LabelExpression, ...] = ()
    service: str = ""
    namespace: str = ""
    group: Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"] = (
        "inference.networking.k8s.io"
    )
    ports: Annotated[tuple[EnginePort, ...], msgspec.Meta(max_length=MAX_PORTS)] = ()
    port: str = ""


class PoolSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Source of a pool's endpoints: a list, a file that is watched, or Kubernetes.

    Attributes:
        name: Label of the pool in metrics and logs. Empty: a single pool needs no label.
        endpoints: Addresses, or entries with name and labels. None.
        endpoints_file: YAML or JSON file with the same list under `endpoints`, watched for
            changes; empty for none.
        kubernetes: Objects of a cluster to watch; null for none. At most one of the three sources
            is used.
        dns_refresh_s: Seconds between lookups of host names. 30 is the usual lifetime of a record
            in a cluster.
        objectives: Priority by objective, the name in `x-llm-d-inference-objective`. Requests below
            0 are rejected at saturation, as `scheduling.saturation` says. None: every request has
            priority 0.
        rewrites: Models that replace the requested model, by weight: aliases and canaries. None:
            engines receive the client's model name.
        autoscaling: Scaling of the engines of the pool. Null: others decide how many there are.
    """

    name: str = ""
    endpoints: tuple[validation.Name | EndpointEntry, ...] = ()
    endpoints_file: str = ""
    kubernetes: KubernetesSection | None = None
    dns_refresh_s: validation.PositiveSeconds = 30.0
    objectives: Mapping[validation.BoundedName, Priority] = {}
    rewrites: tuple[RewriteEntry, ...] = ()
    autoscaling: ScalingSection | None = None


class PoolSection(PoolSource, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A pool of several in a process.

    Attributes:
        name: Label of the pool in metrics, logs and decisions. No default: it identifies the pool.
        match: Conditions on requests for the pool. None: it takes requests for models that its
            endpoints list, requests that the subset hint of the data plane directs to them, and
            those that no other pool takes.
        scheduling: Scheduling rules of the pool. Null: the section `scheduling` at the top level.
    """

    name: validation.Name
    match: pool_match.PoolMatch = pool_match.PoolMatch()
    scheduling: SchedulingSection | None = None


class ClusterSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Access to the Kubernetes API server, and discovery settings of the process.

    Attributes:
        kubeconfig: Path of a kubeconfig file. Empty: the service account of the pod if there is
            one, else the file in KUBECONFIG, else the usual path.
        context: Context in that file; empty for its current one.
        discover_pools: Serve every InferencePool of a `namespace`, or of the `cluster`, as a pool
            of its own, besides those of the file. `none`: only those of the file.
        namespace: For `discover_pools: namespace`. Empty: the one this process runs in.
        match_rules: Rules for the matches that such pools state in annotations of their InferencePools;
            a match outside of all rules is ignored. None: write access to an InferencePool does not
            suffice to take requests that another pool serves.
        policies: Follow InferenceObjectives and InferenceModelRewrites in the namespaces of
            InferencePools. True; it takes rights to read them, and does nothing without the CRDs.
        leader_election: Be ready only while this replica holds a Lease, as in the high-availability
            mode of the upstream EPP. False: every replica picks, and a gateway may use any of them.
        lease: Name and times of the Lease; each field has the reason of its default.
    """

    kubeconfig: str = ""
    context: str = ""
    discover_pools: Literal["none", "namespace", "cluster"] = "none"
    namespace: str = ""
    match_rules: tuple[MatchRule, ...] = ()
    policies: bool = True
    leader_election: bool = False
    lease: ElectionSettings = ElectionSettings()
