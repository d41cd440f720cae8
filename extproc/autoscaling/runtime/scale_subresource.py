"""Scales a Kubernetes object by its scale subresource; detects other autoscalers of it.

Two autoscalers of an object (HorizontalPodAutoscalers, ScaledObjects) undo each other's work, so
what is not known counts as there. A list that fails changes nothing of what was known.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import re
from collections.abc import Callable
from typing import Any, Self

import msgspec

from extproc.autoscaling.interface import ScalingDecision
from extproc.autoscaling.runtime.actuator import Actuator, ActuatorContext, ActuatorError
from extproc.config.autoscaling import ScaleTarget, ScalingSection
from extproc.discovery.kubernetes import api_responses, objects, watch_plan
from extproc.discovery.kubernetes.request_client import ApiRequestClient
from extproc.discovery.kubernetes.settings import KubernetesSettings
from extproc.server.pool_runtime import PoolRuntime
from extproc.supervision import Supervisor

_log = logging.getLogger("extproc.server")

#: Seconds one request may take at most, and as a share of what the election leaves: a leader stops
#: `duration_s - renew_s` before another can begin, and its requests must be over by then.
_TIMEOUT_S, _TIMEOUT_SHARE = 4.0, 0.8

#: Events that may wait to be written (count).
_MAX_QUEUED_EVENTS = 16


#: Media type of a PATCH: fields in it replace those of the object. Custom resources take it as well
#: as built-in ones.
MERGE = "application/merge-patch+json"

#: End of the message with status 500 about a custom resource that states no replicas; only a change
#: of its scale succeeds. It may have no default, and GitOps leaves a scaled field out.
_UNSET_REPLICAS = re.compile('the spec replicas field "[^"]*" does not exist$')

#: How to grant Events, for the end of a message.
_EVENTS_ROLE = (
    '; add to a Role of the service account there: apiGroups: [""], resources: ["events"], '
    'verbs: ["create"]'
)

#: Longest text of an Event (Kubernetes API, `message` of events.k8s.io).
_MAX_NOTE_LENGTH = 1024


class _ScaleSpec(msgspec.Struct, frozen=True):
    replicas: int = 0


class _Scale(msgspec.Struct, frozen=True):
    spec: _ScaleSpec = _ScaleSpec()


class _ScaleTargetRef(msgspec.Struct, frozen=True):
    kind: str = "Deployment"
    name: str = ""


class _HorizontalAutoscalerSpec(msgspec.Struct, frozen=True):
    scaleTargetRef: _ScaleTargetRef = _ScaleTargetRef()  # noqa: N815 - Kubernetes' spelling


class _ObjectMetadata(msgspec.Struct, frozen=True):
    name: str = ""
    uid: str = ""


class _HorizontalAutoscaler(msgspec.Struct, frozen=True):
    metadata: _ObjectMetadata = _ObjectMetadata()
    spec: _HorizontalAutoscalerSpec = _HorizontalAutoscalerSpec()


class _HorizontalAutoscalers(msgspec.Struct, frozen=True):
    items: tuple[_HorizontalAutoscaler, ...] | None


def target_path(target: ScaleTarget) -> str:
    """API path of the target."""
    return watch_plan.api_path(
        target.group, target.version, target.namespace, target.resource, target.name
    )


def format_target(target: ScaleTarget) -> str:
    """Name of the target for messages."""
    return f"{target.kind} {target.namespace}/{target.name}"


def parse_replicas(answer: bytes) -> int | None:
    """Replicas in the spec of a Scale; None for other bytes."""
    try:
        return msgspec.json.decode(answer, type=_Scale).spec.replicas
    except objects.BROKEN:
        return None


def parse_competing_autoscalers(answer: bytes, target: ScaleTarget) -> tuple[str, ...] | None:
    """Names of the autoscalers in a list that scale the target; None for other bytes."""
    try:
        listed = msgspec.json.decode(answer, type=_HorizontalAutoscalers).items or ()
    except objects.BROKEN:
        return None
    return tuple(
        rival.metadata.name
        for rival in listed
        if (rival.spec.scaleTargetRef.kind or "Deployment", rival.spec.scaleTargetRef.name)
        == (target.kind, target.name)
    )


def build_event(
    target: ScaleTarget,
    *,
    reason: str,
    note: str,
    warning: bool,
    at: dt.datetime,
    reporter: str,
) -> dict[str, Any]:
    """Build an Event about the target.

    Args:
        reason: A single word in CamelCase.
    """
    when = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{target.name}.", "namespace": target.namespace},
        "involvedObject": {
            "apiVersion": f"{target.group}/{target.version}" if target.group else target.version,
            "kind": target.kind,
            "name": target.name,
            "namespace": target.namespace,
        },
        "reason": reason,
        "message": note[:_MAX_NOTE_LENGTH],
        "type": "Warning" if warning else "Normal",
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
        "source": {"component": "extproc", "host": reporter},
        "reportingComponent": "extproc",
        "reportingInstance": reporter,
    }


class ScaleClient(ApiRequestClient):
    """Client of the API server for all scale targets of this process.

    Args:
        handover_s: Seconds between the end of a leader and the beginning of another one.
    """

    def __init__(self, settings: KubernetesSettings, identity: str, handover_s: float) -> None:
        super().__init__(settings)
        self.identity = identity
        self._timeout_s = min(_TIMEOUT_S, _TIMEOUT_SHARE * handover_s)
        self._warned = False

    async def send(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> bytes | api_responses.ApiError:
        """Send a request; once more with fresh credentials where they had expired.

        A change is not sent again after the time limit: another replica may lead by then. Loading
        credentials may take longer, and completes for the next request.
        """
        kind = MERGE if method == "PATCH" else "application/json"
        answer: bytes | api_responses.ApiError = api_responses.ApiError(0, "not asked")
        half_s, now_s = self._timeout_s / 2.0, asyncio.get_running_loop().time
        last_s = now_s() + self._timeout_s
        for _ in range(2):
            left_s = half_s if method == "GET" else min(half_s, last_s - now_s())
            if left_s <= 0.0:
                break
            answer = await self.send_once(method, path, body, seconds=left_s, kind=kind)
            if not isinstance(answer, api_responses.ApiError) or not answer.credentials_expired:
                break
        return answer

    async def write_event(
        self, target: ScaleTarget, reason: str, note: str, *, warning: bool = False
    ) -> None:
        """Write an Event; only the first failure is logged, and no write is repeated."""
        body = build_event(
            target,
            reason=reason,
            note=note,
            warning=warning,
            at=dt.datetime.now(dt.UTC),
            reporter=self.identity,
        )
        path = watch_plan.api_path("", "v1", target.namespace, "events")
        answer = await self.send("POST", path, body)
        if isinstance(answer, api_responses.ApiError) and not self._warned:
            self._warned = True
            _log.warning(
                "autoscaling: no Event can be written in %s: %s %s%s",
                target.namespace,
                answer.status or "no answer",
                answer.message,
                _EVENTS_ROLE if answer.status == 403 else "",
            )


class ScaleSubresourceActuator(Actuator):
    """Scales a target while this replica leads and no other autoscaler does.

    Args:
        supervisor: Counts exceptions; None creates a new supervisor.
    """

    scales = True

    def __init__(
        self,
        target: ScaleTarget,
        scale_client: ScaleClient,
        is_leader: Callable[[], bool],
        supervisor: Supervisor | None = None,
    ) -> None:
        self._target = target
        self._scale_client = scale_client
        self._is_leader = is_leader
        self._supervisor = supervisor or Supervisor()
        self._path = target_path(target)
        self._autoscaler_lister = AutoscalerLister(target, scale_client)
        #: Reason why this process does not scale, until the leader wrote an Event about it.
        self._pause_reason = ""
        self._denials = api_responses.Denials()
        self._events: asyncio.Queue[tuple[str, str, bool]] = asyncio.Queue(_MAX_QUEUED_EVENTS)

    @classmethod
    def from_settings(
        cls, scaling: ScalingSection, pool: PoolRuntime, context: ActuatorContext
    ) -> Self:
        """See `Actuator`; raises ValueError without a `target` or an API server."""
        del pool
        if scaling.target is None or context.cluster is None:
            raise ValueError("expected a section with target and an API server, got none")
        target = scaling.target.located(context.namespace)
        return cls(target, context.cluster, context.is_leader, context.supervisor)

    @property
    def can_scale(self) -> bool:
        """True if this replica leads and every list showed no other autoscaler."""
        return self._is_leader() and self._autoscaler_lister.names == ()

    async def current_replicas(self, available: int) -> int | ActuatorError:
        """See `Actuator`; `available` counts where the target states no replicas."""
        if self._pause_reason and self._is_leader():
            self._record("StandsDown", self._pause_reason, warning=True)
            self._pause_reason = ""
        answer = await self._scale_client.send("GET", f"{self._path}/scale")
        is_denied = self._denials.is_missing("get", answer)
        if isinstance(answer, api_responses.ApiError):
            if answer.status == 500 and _UNSET_REPLICAS.search(answer.message):
                return available
            return ActuatorError(self._error_text("read", answer, "get" if is_denied else ""))
        spec = parse_replicas(answer)
        return ActuatorError(f"the scale of {self._title} cannot be read") if spec is None else spec

    async def scale(self, desired: ScalingDecision, spec: int) -> ActuatorError | None:
        """See `Actuator`."""
        answer = await self._scale_client.send(
            "PATCH", f"{self._path}/scale", {"spec": {"replicas": desired.replicas}}
        )
        is_denied = self._denials.is_missing("patch", answer)
        if isinstance(answer, api_responses.ApiError):
            return ActuatorError(self._error_text("changed", answer, "patch" if is_denied else ""))
        note = f"from {spec} to {desired.replicas} replicas, {desired.reason}"
        note += f": {desired.explanation}" if desired.explanation else ""
        self._record("Scaled", note)
        return None

    async def run(self) -> None:
        """Watch for other autoscalers and write Events, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write_events(), name=f"events of {self._title}")
            while True:
                pause_s = await self.update_competing_autoscalers()
                await asyncio.sleep(pause_s)

    async def update_competing_autoscalers(self) -> float:
        """Look for other autoscalers of the target; returns seconds until the next look."""
        before = self._autoscaler_lister.names
        pause_s = await self._autoscaler_lister.update()
        now = self._autoscaler_lister.names
        if now and now != before:
            names = " and ".join(now)
            _log.warning("autoscaling: %s scales %s: we do not", names, self._title)
            self._pause_reason = f"{names} scales it: extproc does not"
        elif before and not now:
            self._pause_reason = ""
            _log.info("autoscaling: no other autoscaler of %s is left: we scale it", self._title)
        return pause_s

    def _record(self, reason: str, note: str, *, warning: bool = False) -> None:
        """Write an Event soon; dropped while too many wait."""
        if not self._events.full():
            self._events.put_nowait((reason, note, warning))

    async def _write_events(self) -> None:
        while True:
            reason, note, warning = await self._events.get()
            event = self._scale_client.write_event(self._target, reason, note, warning=warning)
            # What it raises must not begin the look for others anew.
            await self._supervisor.attempt(
                "autoscaling", event, instance=f"event about {self._title}"
            )

    @property
    def _title(self) -> str:
        return format_target(self._target)

    def _error_text(self, action: str, error: api_responses.ApiError, verb: str) -> str:
        """Message of a refusal; with the missing right where `verb` names it."""
        text = f"the scale of {self._title} cannot be {action}: {error.status or 'no answer'} "
        text += error.message
        if verb:
            text += (
                f'; add to a Role of the service account there: apiGroups: ["{self._target.group}"], '
                f'resources: ["{self._target.resource}/scale"], verbs: ["{verb}"]'
            )
        return text


#: Seconds between two lists: people create and delete autoscalers.
_INTERVAL_S = 60.0

#: Seconds until a list that failed is tried again: at first, doubling, and at most.
_RETRY_S, _RETRY_MOST_S = 1.0, 10.0

#: Refusals in a row (count) after which 403 means that the right is missing, and 404 that the kind
#: was uninstalled. An API server that has just started answers both for a moment.
_FINAL_REFUSALS = api_responses.FINAL_DENIALS


class AutoscalerKind(msgspec.Struct, frozen=True):
    """Kind of an autoscaler: API group, version, plural name and kind."""

    group: str
    version: str
    plural: str
    kind: str


KINDS = (
    AutoscalerKind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
    AutoscalerKind("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject"),
)


class _Known(msgspec.Struct):
    """Result of listing a kind: names of autoscalers, None before the first list."""

    names: tuple[str, ...] | None = None
    refused: int = 0
    status: int = 0
    warned: bool = False


class AutoscalerLister:
    """Lists other autoscalers of a target."""

    def __init__(self, target: ScaleTarget, api: ScaleClient) -> None:
        self._target = target
        self._api = api
        self._known = {kind: _Known() for kind in KINDS}
        self._retries = 0

    @property
    def names(self) -> tuple[str, ...] | None:
        """Kind and name of all, such as `ScaledObject vllm`; None until every kind was listed."""
        names: list[str] = []
        for kind, known in self._known.items():
            if known.names is None:
                return None
            names += [f"{kind.kind} {name}" for name in known.names]
        return tuple(names)

    async def update(self) -> float:
        """List every kind once; returns seconds until the next time."""
        settled = [await self._list(kind, known) for kind, known in self._known.items()]
        if all(settled):
            self._retries = 0
            return _INTERVAL_S
        pause_s = min(_RETRY_MOST_S, _RETRY_S * 2.0 ** min(self._retries, 8))
        self._retries += 1
        return pause_s

    async def _list(self, kind: AutoscalerKind, known: _Known) -> bool:
        """List a kind; returns True if the result can stay for a while."""
        path = watch_plan.api_path(kind.group, kind.version, self._target.namespace, kind.plural)
        answer = await self._api.send("GET", path)
        if not isinstance(answer, api_responses.ApiError):
            names = parse_competing_autoscalers(answer, self._target)
            if names is not None:
                known.names, known.refused, known.warned = names, 0, False
                return True
            answer = api_responses.ApiError(0, "the list cannot be read")
        known.refused = known.refused + 1 if known.status == answer.status else 1
        known.status = answer.status
        final = known.refused >= _FINAL_REFUSALS
        if answer.status == 404 and (final or not known.names):
            known.names = ()
            return True
        if answer.status == 403 and final:
            self._forbidden(kind, known)
            return True
        if known.names is None and not known.warned:
            known.warned = True
            _log.warning(
                "autoscaling: %s is not scaled until %s in %s were listed: %s %s",
                format_target(self._target),
                kind.plural,
                self._target.namespace,
                answer.status or "no answer",
                answer.message,
            )
        return False

    def _forbidden(self, kind: AutoscalerKind, known: _Known) -> None:
        """Log a missing right once, and keep the last known autoscalers."""
        if known.refused == _FINAL_REFUSALS:
            _log.warning(
                "autoscaling: no right to list %s in %s: %s; add to a Role of the service account "
                'there: apiGroups: ["%s"], resources: ["%s"], verbs: ["list"]',
                kind.plural,
                self._target.namespace,
                f"{format_target(self._target)} still counts as scaled by {known.names[0]}"
                if known.names
                else f"an autoscaler of {format_target(self._target)} among them works against us",
                kind.group,
                kind.plural,
            )
        known.names = known.names or ()
