"""Stores the states of all loops beyond the process, in a ConfigMap or a file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from extproc.autoscaling.runtime import scale_objects
from extproc.autoscaling.runtime.control_loop import LoopState
from extproc.autoscaling.runtime.scale_subresource import ScaleClient
from extproc.discovery.kubernetes import api_responses

_log = logging.getLogger("extproc.server")

#: Key in the ConfigMap.
_KEY = "pools.json"


#: Seconds on a clock: up to the year 9999.
_Moment = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class StoredState(msgspec.Struct, frozen=True):
    """Content of the ConfigMap or file; JSON.

    Attributes:
        at: Monotonic seconds of the writer.
        time: Seconds since 1970 at the same moment: clocks of two processes have only that in
            common.
    """

    at: _Moment
    time: _Moment
    pools: Mapping[str, msgspec.Raw]


class StateStore(Protocol):
    """Storage of the states of all loops."""

    async def load(self) -> tuple[dict[str, LoopState], float] | None:
        """Load states by pool, and the lead of our clock in seconds; None if reading fails."""

    async def save(self, pools: Mapping[str, LoopState]) -> None:
        """Write all states; a failed write is logged and left to the next save."""


class FileStateStore:
    """Stores states in a file of a single process.

    Args:
        time: Seconds since 1970.
    """

    def __init__(
        self, path: Path, *, clock: Callable[[], float], time: Callable[[], float]
    ) -> None:
        self._path = path
        self._clock = clock
        self._time = time
        self._logged = ""

    async def load(self) -> tuple[dict[str, LoopState], float] | None:
        """See `StateStore`."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return {}, 0.0
        except OSError as error:
            self._log_failure("read", error)
            return None
        return decode_states(text, self._clock(), self._time())

    async def save(self, pools: Mapping[str, LoopState]) -> None:
        """See `StateStore`: the file is replaced at once, so a kill leaves the last version."""
        text = encode_states(pools, self._clock(), self._time())
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(self._path)
        except OSError as error:
            self._log_failure("written", error)
        else:
            self._logged = ""

    def _log_failure(self, action: str, error: OSError) -> None:
        message = f"autoscaling: {self._path} cannot be {action}: {error.strerror}"
        if message != self._logged:
            self._logged = message
            _log.warning("%s", message)


class ConfigMapStateStore:
    """Stores states in a ConfigMap.

    Args:
        time: Seconds since 1970.
    """

    def __init__(
        self,
        cluster: ScaleClient,
        *,
        namespace: str,
        name: str,
        clock: Callable[[], float],
        time: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._name = name
        self._clock = clock
        self._time = time
        self._logged = ""
        self._denials = api_responses.Denials()
        self._root = scale_objects.namespaced_path("", "v1", namespace, "configmaps")
        self._path = scale_objects.namespaced_path("", "v1", namespace, "configmaps", name)

    async def load(self) -> tuple[dict[str, LoopState], float] | None:
        """See `StateStore`."""
        answer = await self._cluster.send("GET", self._path)
        missing = self._denials.is_missing("get", answer)
        if isinstance(answer, api_responses.ApiError):
            if answer.status == 404:
                return {}, 0.0
            self._log_failure("read", answer, "get" if missing else "")
            return None
        self._logged = ""
        return decode_states(
            scale_objects.parse_config_map(answer).get(_KEY, ""), self._clock(), self._time()
        )

    async def save(self, pools: Mapping[str, LoopState]) -> None:
        """See `StateStore`."""
        text = encode_states(pools, self._clock(), self._time())
        answer = await self._cluster.send("PATCH", self._path, {"data": {_KEY: text}})
        verb = "patch"
        if isinstance(answer, api_responses.ApiError) and answer.status == 404:
            verb = "create"
            body = scale_objects.build_config_map(self._namespace, self._name, {_KEY: text})
            answer = await self._cluster.send("POST", self._root, body)
        missing = self._denials.is_missing(verb, answer)
        if isinstance(answer, api_responses.ApiError):
            self._log_failure("written", answer, verb if missing else "")
        else:
            self._logged = ""

    def _log_failure(self, action: str, error: api_responses.ApiError, verb: str) -> None:
        message = (
            f"autoscaling: ConfigMap {self._namespace}/{self._name} cannot be {action}: "
            f"{error.status or 'no answer'} {error.message}"
        )
        if verb:
            message += (
                "; add to a Role of the service account there: "
                f'apiGroups: [""], resources: ["configmaps"], verbs: ["{verb}"]'
            )
        if message != self._logged:
            self._logged = message
            _log.warning("%s", message)


def encode_states(pools: Mapping[str, LoopState], now: float, time: float) -> str:
    """Encode states of all loops."""
    raw = {name: msgspec.Raw(msgspec.json.encode(state)) for name, state in pools.items()}
    return msgspec.json.encode(StoredState(now, time, raw)).decode()


def decode_states(text: str, now: float, time: float) -> tuple[dict[str, LoopState], float]:
    """Decode states, and the lead of our clock in seconds; malformed states are dropped."""
    states: dict[str, LoopState] = {}
    try:
        stored = msgspec.json.decode(text or "{}", type=StoredState)
    except scale_objects.DECODE_FAILURES:
        return states, 0.0
    for name, raw in stored.pools.items():
        try:
            states[name] = msgspec.json.decode(raw, type=LoopState)
        except scale_objects.DECODE_FAILURES:
            continue
    # A clock that was set back must not put observations into the future.
    return states, now - stored.at - max(0.0, time - stored.time)
