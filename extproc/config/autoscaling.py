"""The autoscaling sections: bounds, policy and scale target of a pool, and of the process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import msgspec

from extproc.autoscaling import demand_estimator, policies
from extproc.autoscaling.interface import ReplicaBounds, ScalingPolicy
from extproc.config import validation
from extproc.errors import ConfigError

#: Scale targets by kind: API group, version and resource.
KINDS: Mapping[str, tuple[str, str, str]] = {
    "Deployment": ("apps", "v1", "deployments"),
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "ReplicaSet": ("apps", "v1", "replicasets"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
    "Model": ("kubeai.org", "v1", "models"),
}

#: Placeholders for the port in an engine's command, and for the replica count in `exec`.
PORT, REPLICAS = "{port}", "{replicas}"

#: Fields of a target become segments of a request path, so each has the form that Kubernetes
#: allows it: pattern, longest length, and the form for people.
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_FORMS: Mapping[str, tuple[re.Pattern[str], int, str]] = {
    "kind": (re.compile("[A-Za-z][A-Za-z0-9]*"), 63, "a kind, such as Deployment"),
    "name": (
        re.compile(rf"{_LABEL}(\.{_LABEL})*"),
        253,
        "a name as objects of Kubernetes have: a-z, 0-9, - and .",
    ),
    "namespace": (re.compile(_LABEL), 63, "a namespace: a-z, 0-9 and -"),
    "group": (re.compile(rf"{_LABEL}(\.{_LABEL})*"), 253, "an API group, such as apps"),
    "version": (re.compile("v[0-9a-z]+"), 63, "an API version, such as v1"),
    "resource": (re.compile(_LABEL), 63, "a plural name as in URLs, such as deployments"),
}

#: Longest part of a wrong value that an error repeats (characters).
_MOST_SHOWN = 100


class ScaleTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An object of Kubernetes with a `scale` subresource.

    Attributes:
        kind: Kind of the object. Deployment is the usual one. Deployment, StatefulSet, ReplicaSet,
            LeaderWorkerSet and KubeAI's Model are known; other kinds need group, version and
            resource.
        name: Name of the object. No default: there is no usual name.
        namespace: Namespace of the object. Empty: the one this process runs in.
        group: API group. Empty: that of the kind.
        version: API version. Empty: that of the kind.
        resource: Plural name in URLs. Empty: that of the kind.
    """

    name: validation.Name
    kind: validation.Name = "Deployment"
    namespace: str = ""
    group: str = ""
    version: str = ""
    resource: str = ""

    @property
    def filled(self) -> ScaleTarget:
        """The target with empty fields replaced by those of its kind."""
        group, version, resource = KINDS.get(self.kind, ("", "", ""))
        return msgspec.structs.replace(
            self,
            group=self.group or group,
            version=self.version or version,
            resource=self.resource or resource,
        )

    def located(self, namespace: str) -> ScaleTarget:
        """Return the filled target, in `namespace` where it names none."""
        filled = self.filled
        return filled if filled.namespace else msgspec.structs.replace(filled, namespace=namespace)

    @property
    def path(self) -> tuple[str, str, str, str]:
        """Group, resource, namespace and name, equal for the same object in all API versions."""
        filled = self.filled
        return filled.group, filled.resource, filled.namespace, filled.name


class LaunchSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engines as child processes, on a machine without Kubernetes.

    They end with this process, also when it is killed: an unused engine must not occupy a GPU. For
    engines that must outlive extproc, let `exec` call the process manager that runs them.

    Attributes:
        command: Program and arguments of an engine; `{port}` in an argument is replaced by a free
            port of the host. Without `{port}`, the engine prints its address. No default: there is
            no usual engine.
        host: IP address of the endpoints. 127.0.0.1: children are on this machine.
        listening: Text before `ip:port` in the line that an engine without `{port}` prints.
            "listening on " is what `extproc engine` prints. `host` replaces `0.0.0.0`, `[::]` and
            names such as `localhost`.
        health: HTTP path that answers 200 once an engine can serve. /health is the path of vLLM and
            SGLang.
        start_s: Seconds until an engine that does not answer is ended and another one started. 600:
            large models take minutes to load.
        drain_s: Seconds that an engine that is being removed may take for its open requests; it
            receives no new ones. 300 is the longest response that most data planes allow.
        stop_s: Seconds between SIGTERM and SIGKILL. 10: engines free their GPUs within a few
            seconds.
    """

    command: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    host: str = "127.0.0.1"
    listening: validation.Name = "listening on "
    health: Annotated[str, msgspec.Meta(pattern="^/")] = "/health"
    start_s: validation.PositiveSeconds = 600.0
    drain_s: validation.Seconds = 300.0
    stop_s: validation.Seconds = 10.0


class BoundedScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replica bounds and scaling policy.

    Attributes:
        policy: Scaling policy: `adaptive` from work and learned speed; `queue-depth` and `kubeai`
            from thresholds. `adaptive`: it needs no threshold that fits one model only.
        params: Parameters of the policy; each has the reason of its default.
        min: Lowest number of replicas. 0: an unused model costs nothing. It needs `flow_control`;
            otherwise the first request after a pause is rejected.
        max: Highest number of replicas. 1: more replicas cost money, which is your decision.
        meter: Measurement of demand; each field has the reason of its default.
    """

    policy: str = policies.DEFAULT
    params: Mapping[str, Any] = {}
    min: validation.Count = 0
    max: validation.Positive = 1
    meter: demand_estimator.EstimatorSettings = demand_estimator.EstimatorSettings()


class ScalingSection(BoundedScaling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replica bounds and scaling policy of a pool; at most one of `target`, `launch` and `exec`.

    Without any of them the desired count is only published, on /metrics and to KEDA.

    Attributes:
        target: Object whose `scale` subresource is patched, by the replica that holds the Lease of
            `cluster.lease`. Null for none.
        launch: Engines that extproc starts and ends itself; they are the pool's endpoints. Null for
            none.
        exec: Program and arguments that are run when the number changes; `{replicas}` is replaced
            by the number. None.
        exec_s: Time limit of that program (seconds). 60: APIs of clouds are slow.
    """

    target: ScaleTarget | None = None
    launch: LaunchSection | None = None
    exec: tuple[validation.Name, ...] = ()
    exec_s: validation.PositiveSeconds = 60.0

    @property
    def bounds(self) -> ReplicaBounds:
        """`min` and `max` as the scaler takes them."""
        return ReplicaBounds(min=self.min, max=self.max)

    def policy_instance(self, where: object) -> ScalingPolicy:
        """Build the policy; `where` is the place in the file, for errors.

        Raises:
            ConfigError: There is no such policy or parameter.
        """
        return policies.make_policy(self.policy, self.params, where=str(where))


class ScalingRule(BoundedScaling, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scaling of pools discovered in Kubernetes; annotations may refine it.

    Annotations, which docs/guides/autoscaling describes, may change `min` and lower `max`: the author
    of an InferencePool does not decide alone what replicas cost.

    Attributes:
        pools: Patterns of `namespace/name` with `*` and `?`; the first rule that matches counts.
            All pools by default.
        target: Object whose `scale` subresource is patched, unless an annotation overrides it.
            `{name}` in its name is that of the pool, and it is always in the namespace of the pool.
            Null: the object that an annotation names; without an annotation, the number is only
            published, on /metrics and to KEDA.
        annotations: Read the annotations of the InferencePool. True. With False, write access to an
            InferencePool does not suffice to choose the object that is scaled.
    """

    pools: Annotated[tuple[validation.Name, ...], msgspec.Meta(min_length=1)] = ("*",)
    target: ScaleTarget | None = None
    annotations: bool = True


class KedaSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The external scaler that KEDA polls and streams from.

    Attributes:
        enabled: Serve the external scaler. False: without KEDA it has no client.
        port: TCP port; 0 picks a free one. 9005 is next to the other ports.
        tls: Serve with the certificate of the ext_proc port. False, as KEDA connects unless
            `enableTLS` says otherwise.
    """

    enabled: bool = False
    port: validation.Port = 9005
    tls: bool = False


class AutoscalingSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Autoscaling settings shared by all pools: replicas of extproc, saved state, KEDA.

    Attributes:
        peers: The other replicas of extproc, whose requests count as well, as `peer_sync.peers`. None:
            those of `peer_sync.peers`, so it is only needed without them.
        peer_timeout_s: Time limit of a request to a peer (seconds). 1 is far above what it takes.
        state: Name of the ConfigMap, in the namespace of this process, for learned speeds and
            observed demand, so that a restart changes nothing. It is used only where Kubernetes
            objects are scaled, by a target. Empty: after a restart nothing is scaled down for one
            window. `extproc-autoscaling` is the name that the shipped manifests grant. Deployments
            that share a ConfigMap overwrite each other's state: further ones in a namespace need
            names, and the rights for these.
        state_file: File for the same, in place of the ConfigMap, for a process without a cluster or
            without a target; each process has its own. Its folder must exist. Empty: none.
        save_s: Seconds between two writes of the state, besides those at changes. 30: a crash loses
            a fraction of a window.
        discovered_pools: Rules for the pools of `cluster.discover_pools`. None: such pools are not
            scaled, because nothing limits their cost.
        keda: The external scaler; each field has the reason of its default.
    """

    peers: tuple[validation.Name, ...] = ()
    peer_timeout_s: validation.PositiveSeconds = 1.0
    state: str = "extproc-autoscaling"
    state_file: str = ""
    save_s: validation.PositiveSeconds = 30.0
    discovered_pools: tuple[ScalingRule, ...] = ()
    keda: KedaSection = KedaSection()


class ActuatorType(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the table of actuators.

    Attributes:
        key: Field of `ScalingSection` that selects and configures it; empty for the actuator of a
            section without such a field.
        implementation: `module:Class`, imported when a pool is scaled; it implements
            `autoscaling.runtime.actuator.Actuator`.
        describe: Returns what it does with a section, for `extproc check`.
        check: Rejects a section that it cannot work with.
        scales_kubernetes: True if it changes Kubernetes objects, which only the holder of the
            Lease may do.
    """

    key: str
    implementation: str
    describe: Callable[[ScalingSection], str]
    check: Callable[[ScalingSection, validation.Place], None] = lambda _, __: None
    scales_kubernetes: bool = False


def actuator_type(section: ScalingSection) -> ActuatorType:
    """Return the actuator of a section."""
    return next(row for row in ACTUATORS if not row.key or getattr(section, row.key))


def check_section(wanted: ScalingSection, place: validation.Place) -> None:
    """Reject a section that contradicts itself.

    Raises:
        ConfigError: The bounds are the wrong way round, several things act, there is no such policy
            or parameter, or it is unknown where the target is.
    """
    if wanted.min > wanted.max:
        raise ConfigError(
            place / "min",
            wanted=f"at most max ({wanted.max})",
            got=str(wanted.min),
            fix="swap them",
        )
    keys = [row.key for row in ACTUATORS if row.key]
    acting = [key for key in keys if getattr(wanted, key)]
    if len(acting) > 1:
        raise ConfigError(
            place,
            wanted=f"one of {', '.join(keys[:-1])} and {keys[-1]}",
            got=" and ".join(acting),
            fix="keep the one that is to act",
        )
    wanted.policy_instance(place)
    actuator_type(wanted).check(wanted, place)


def describe_section(wanted: ScalingSection) -> Iterator[str]:
    """Describe a section, one line for `extproc check`."""
    action = actuator_type(wanted).describe(wanted)
    yield f"replicas    {wanted.min} to {wanted.max} by {wanted.policy}; {action}"


def check_target(target: ScaleTarget, place: validation.Place) -> None:
    """Reject a target of an unknown kind, or with a field that is no valid path segment.

    Raises:
        ConfigError: Its kind is not known, or a field does not have the form that Kubernetes
            allows it.
    """
    filled = target.filled
    if not (filled.version and filled.resource):
        raise ConfigError(
            place / "kind",
            wanted=f"one of {', '.join(KINDS)}, or group, version and resource",
            got=quote_value(target.kind),
            fix="say where its scale is: /apis/GROUP/VERSION/namespaces/.../RESOURCE/NAME/scale",
        )
    for field, (form, longest, wanted) in _FORMS.items():
        text = getattr(filled, field)
        if text and not (len(text) <= longest and form.fullmatch(text)):
            raise ConfigError(
                place / field,
                wanted=f"{wanted}; at most {longest} characters",
                got=quote_value(text),
                fix=f"correct the {field}",
            )
    usual = _kind_of(filled)
    if usual not in {"", filled.kind}:
        # Other autoscalers of an object are recognized by its kind.
        raise ConfigError(
            place / "kind",
            wanted=f"{usual}, which is the kind of {filled.resource} of {filled.group}",
            got=quote_value(filled.kind),
            fix="correct the kind or the resource",
        )


def quote_value(text: str) -> str:
    """Quote a wrong value for an error, cut to `_MOST_SHOWN` characters."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}...")


def _kind_of(target: ScaleTarget) -> str:
    """Return the known kind of a group and a resource; empty if there is none."""
    place = (target.group, target.resource)
    return next(
        (kind for kind, (group, _, plural) in KINDS.items() if (group, plural) == place), ""
    )


def _check_scale_target(section: ScalingSection, place: validation.Place) -> None:
    if section.target is not None:
        check_target(section.target, place / "target")


def _describe_scale_target(section: ScalingSection) -> str:
    if section.target is None:
        return ""
    target = section.target.filled
    place = f" in namespace {target.namespace}" if target.namespace else ""
    return f"patches {target.resource}/scale of {target.name}{place}, by the holder of a Lease"


def _check_command(section: ScalingSection, place: validation.Place) -> None:
    if not any(REPLICAS in word for word in section.exec):
        raise ConfigError(
            place / "exec",
            wanted=f"an argument with {REPLICAS}",
            got=f"none of {len(section.exec)}",  # its words may hold a password
            fix="say where the number goes",
        )


#: Every actuator. The last row stands for sections without any of the keys.
ACTUATORS: tuple[ActuatorType, ...] = (
    ActuatorType(
        key="target",
        implementation="extproc.autoscaling.runtime.scale_subresource:ScaleSubresourceActuator",
        describe=_describe_scale_target,
        check=_check_scale_target,
        scales_kubernetes=True,
    ),
    ActuatorType(
        key="launch",
        implementation="extproc.autoscaling.runtime.process_actuator:ProcessActuator",
        describe=lambda _: "starts and ends engines",
    ),
    ActuatorType(
        key="exec",
        implementation="extproc.autoscaling.runtime.actuator:ExecActuator",
        describe=lambda section: f"runs {' '.join(section.exec)}",
        check=_check_command,
    ),
    ActuatorType(
        key="",
        implementation="extproc.autoscaling.runtime.actuator:AdvisoryActuator",
        describe=lambda _: "others act on the number, from /metrics or KEDA's scaler",
    ),
)
