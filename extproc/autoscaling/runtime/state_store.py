"""Stores the states of all loops beyond the process, in a ConfigMap or a file."""

from __future__ import annotations

import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from extproc.autoscaling.interface import Moment
from extproc.autoscaling.runtime.control_loop import LoopState
from extproc.autoscaling.runtime.scale_subresource import ScaleClient
from extproc.discovery.kubernetes import api_responses, objects, watch_plan

_log = logging.getLogger("extproc.server")

#: Key in the ConfigMap.
_KEY = "pools.json"


class StoredState(msgspec.Struct, frozen=True):
    """Content of the ConfigMap or file; JSON.

    Attributes:
        at: Monotonic seconds of the writer.
        time: Seconds since 1970 at the same moment: clocks of two processes have only that in
            common.
    """

    at: Moment
    time: Moment
    pools: Mapping[str, msgspec.Raw]


class StateStore(ABC):
    """Storage of the states of all loops.

    Args:
        title: Name of the place for messages.
        time: Seconds since 1970.
    """

    def __init__(
        self, title: str, *, clock: Callable[[], float], time: Callable[[], float]
    ) -> None:
        self._title = title
        self._clock = clock
        self._time = time
        self._logged = ""

    async def load(self) -> tuple[dict[str, LoopState], float] | None:
        """Load states by pool, and the lead of our clock in seconds; None if reading fails."""
        text = await self._read()
        if text is None:
            return None
        self._logged = ""
        states, lead_s, malformed = decode_states(text, self._clock(), self._time())
        if malformed:
            message = (
                f"autoscaling: {self._title}: expected what extproc saved, got malformed {malformed}; "
                "scaling starts without it, and the next save drops it"
            )
            _log.warning("%s%s", message, self.keep_copy())
        return states, lead_s

    async def save(self, pools: Mapping[str, LoopState]) -> None:
        """Write all states; a failed write is logged and left to the next save."""
        if await self._write(self._encode(pools)):
            self._logged = ""

    def _encode(self, pools: Mapping[str, LoopState]) -> str:
        return encode_states(pools, self._clock(), self._time())

    @abstractmethod
    async def _read(self) -> str | None:
        """Read the encoded states; those of no pool where nothing was saved, None if that fails."""

    @abstractmethod
    async def _write(self, text: str) -> bool:
        """Write the encoded states; returns whether that worked."""

    def keep_copy(self) -> str:
        """Keep the content from the next save; returns the end of a message."""
        return ""

    def _log_failure(self, action: str, reason: str) -> None:
        message = f"autoscaling: {self._title} cannot be {action}: {reason}"
        if message != self._logged:
            self._logged = message
            _log.warning("%s", message)


class FileStateStore(StateStore):
    """Stores states in a file of a single process."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float], time: Callable[[], float]
    ) -> None:
        super().__init__(str(path), clock=clock, time=time)
        self._path = path

    async def _read(self) -> str | None:
        try:
            return self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return self._encode({})
        except OSError as error:
            self._log_failure("read", str(error.strerror))
            return None

    async def _write(self, text: str) -> bool:
        """Replace the file at once, so that a kill leaves the last version."""
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            self._log_failure("written", str(error.strerror))
            return False
        return True

    def keep_copy(self) -> str:
        """See `StateStore`."""
        copy_path = self._path.with_name(f"{self._path.name}.broken")
        try:
            shutil.copyfile(self._path, copy_path)
        except OSError as error:
            return f"; {copy_path} cannot be written: {error.strerror}"
        return f"; {copy_path} keeps it"


class ConfigMapStateStore(StateStore):
    """Stores states in a ConfigMap."""

    def __init__(
        self,
        cluster: ScaleClient,
        *,
        namespace: str,
        name: str,
        clock: Callable[[], float],
        time: Callable[[], float],
    ) -> None:
        super().__init__(f"ConfigMap {namespace}/{name}", clock=clock, time=time)
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._denials = api_responses.Denials()
        self._root = watch_plan.api_path("", "v1", namespace, "configmaps")
        self._path = watch_plan.api_path("", "v1", namespace, "configmaps", name)

    async def _read(self) -> str | None:
        answer = await self._cluster.send("GET", self._path)
        is_denied = self._denials.is_missing("get", answer)
        if isinstance(answer, api_responses.ApiError):
            if answer.status == 404:
                return self._encode({})
            self._log_error("read", answer, "get" if is_denied else "")
            return None
        return parse_config_map(answer).get(_KEY, self._encode({}))

    async def _write(self, text: str) -> bool:
        answer = await self._cluster.send("PATCH", self._path, {"data": {_KEY: text}})
        verb = "patch"
        if isinstance(answer, api_responses.ApiError) and answer.status == 404:
            verb = "create"
            body = _build_config_map(self._namespace, self._name, {_KEY: text})
            answer = await self._cluster.send("POST", self._root, body)
        is_denied = self._denials.is_missing(verb, answer)
        if isinstance(answer, api_responses.ApiError):
            self._log_error("written", answer, verb if is_denied else "")
            return False
        return True

    def _log_error(self, action: str, error: api_responses.ApiError, verb: str) -> None:
        reason = f"{error.status or 'no answer'} {error.message}"
        if verb:
            reason += (
                "; add to a Role of the service account there: "
                f'apiGroups: [""], resources: ["configmaps"], verbs: ["{verb}"]'
            )
        self._log_failure(action, reason)


def encode_states(pools: Mapping[str, LoopState], now: float, time: float) -> str:
    """Encode states of all loops."""
    raw = {name: msgspec.Raw(msgspec.json.encode(state)) for name, state in pools.items()}
    return msgspec.json.encode(StoredState(now, time, raw)).decode()


def decode_states(text: str, now: float, time: float) -> tuple[dict[str, LoopState], float, str]:
    """Decode states, and the lead of our clock in seconds; malformed states are dropped and named."""
    states: dict[str, LoopState] = {}
    try:
        stored = msgspec.json.decode(text, type=StoredState)
    except objects.BROKEN:
        return states, 0.0, "content"
    malformed = []
    for name, raw in stored.pools.items():
        try:
            states[name] = msgspec.json.decode(raw, type=LoopState)
        except objects.BROKEN:
            malformed.append(repr(name))
    # A clock that was set back must not put observations into the future.
    lead_s = now - stored.at - max(0.0, time - stored.time)
    return states, lead_s, f"state of {', '.join(malformed)}" if malformed else ""


class _ConfigMap(msgspec.Struct, frozen=True):
    data: dict[str, str] | None = None


def _build_config_map(namespace: str, name: str, data: dict[str, str]) -> dict[str, Any]:
    """Build a ConfigMap with our labels."""
    labels = {"app.kubernetes.io/part-of": "extproc"}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "data": data,
    }


def parse_config_map(answer: bytes) -> dict[str, str]:
    """Data of a ConfigMap; empty for other bytes."""
    try:
        return msgspec.json.decode(answer, type=_ConfigMap).data or {}
    except objects.BROKEN:
        return {}
