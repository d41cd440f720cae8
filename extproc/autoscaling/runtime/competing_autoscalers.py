"""Finds other autoscalers of a target: HorizontalPodAutoscalers and ScaledObjects.

Two autoscalers of an object undo each other's work, so what is not known counts as there. A list
that fails changes nothing of what was known.
"""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec

from extproc.autoscaling.runtime import scale_objects
from extproc.config.autoscaling import ScaleTarget
from extproc.discovery.kubernetes import api_errors

_log = logging.getLogger("extproc.server")

#: Seconds between two lists: people create and delete autoscalers.
_INTERVAL_S = 60.0

#: Seconds until a list that failed is tried again: at first, doubling, and at most.
_RETRY_S, _RETRY_MOST_S = 1.0, 10.0

#: Refusals in a row (count) after which 403 means that the right is missing, and 404 that the kind
#: was uninstalled. An API server that has just started answers both for a moment.
_FINAL_REFUSALS = api_errors.FINAL_DENIALS


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


class ScaleApi(Protocol):
    """Client of the API server, such as `scale_subresource.ScaleClient`."""

    async def send(
        self, method: str, path: str, body: scale_objects.Object | None = None
    ) -> bytes | api_errors.ApiError:
        """Send a request."""


class _Known:
    """Result of listing a kind: names of autoscalers, None before the first list."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = None
        self.refused = 0
        self.status = 0
        self.warned = False


class CompetingAutoscalers:
    """Lists other autoscalers of a target.

    Args:
        target: The object, with everything filled in.
    """

    def __init__(self, target: ScaleTarget, api: ScaleApi) -> None:
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
        path = scale_objects.namespaced_path(
            kind.group, kind.version, self._target.namespace, kind.plural
        )
        answer = await self._api.send("GET", path)
        if not isinstance(answer, api_errors.ApiError):
            names = scale_objects.rivals(answer, self._target)
            if names is not None:
                known.names, known.refused, known.warned = names, 0, False
                return True
            answer = api_errors.ApiError(0, "the list cannot be read")
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
                scale_objects.title(self._target),
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
                f"{scale_objects.title(self._target)} still counts as scaled by {known.names[0]}"
                if known.names
                else f"an autoscaler of {scale_objects.title(self._target)} among them works against us",
                kind.group,
                kind.plural,
            )
        known.names = known.names or ()
