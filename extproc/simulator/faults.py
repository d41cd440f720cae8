"""Fault injection: the grammar of faults and the faults armed at the moment.

`KIND[=VALUE][,rate=R][,count=N][,for=SECONDS]`, the same in a flag, in a request header and in the
admin body. `rate` is the share of requests hit (default all), `count` ends the fault after so many
hits, `for` after so much time. What happens to the engine as a whole takes `for` alone, and a
header takes what happens to one request.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping

import msgspec

from extproc import errors

#: What happens to one request, and whether the kind takes a value.
REQUEST_KINDS: Mapping[str, bool] = {
    "status": True,  # answer this HTTP status with an error body
    "reset": False,  # reset the connection before any answer
    "reset-after": True,  # stream so many tokens, then reset
    "hang": False,  # read the request, never answer
    "stall-after": True,  # stream so many tokens, then nothing more
    "sse-error": False,  # answer 200, then an error event and [DONE]
    "delay": True,  # wait so many seconds first
}
#: What happens to the metrics page.
METRICS_KINDS: Mapping[str, bool] = {
    "metrics-freeze": False,  # the same page for ever
    "metrics-garble": False,  # not Prometheus text
    "metrics-empty": False,  # 200 with nothing in it
    "metrics-slow": True,  # after so many seconds
    "metrics-status": True,  # this HTTP status
}
#: What happens to the engine as a whole.
ENGINE_KINDS: Mapping[str, bool] = {
    "not-ready": False,  # /health and every request answer 503
    "slow": True,  # every step takes so many times longer
}
#: What happens to a batch of KV events.
KV_EVENT_KINDS: Mapping[str, bool] = {
    "kv-drop": False,  # not published; only a replay has it
    "kv-garble": False,  # published as bytes that are no batch
}
_KINDS = {**REQUEST_KINDS, **METRICS_KINDS, **ENGINE_KINDS, **KV_EVENT_KINDS}


class Fault(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        kind: A key of the tables above.
        value: Its number; 0 for kinds without one.
        rate: Share of hits, 0..1.
        count: Hits before it ends; None means no end.
        for_s: Seconds before it ends; infinity means no end.
    """

    kind: str
    value: float = 0.0
    rate: float = 1.0
    count: int | None = None
    for_s: float = math.inf

    def __str__(self) -> str:
        parts = [f"{self.kind}={self.value:g}" if _KINDS[self.kind] else self.kind]
        parts += [f"rate={self.rate:g}"] if self.rate < 1 else []
        parts += [f"count={self.count}"] if self.count is not None else []
        parts += [f"for={self.for_s:g}"] if self.for_s < math.inf else []
        return ",".join(parts)


def parse(text: str, kinds: Mapping[str, bool] = _KINDS) -> Fault:
    """Parse a fault.

    Args:
        kinds: Kinds that are taken, of the tables above.

    Raises:
        errors.ConfigError: It is not one.
    """
    head, *options = text.split(",")
    kind, _, value = head.partition("=")
    if kinds.get(kind) is not bool(value):
        raise _bad(text, kinds)
    try:
        pairs = dict(option.split("=", 1) for option in options)
        fault = Fault(
            kind,
            float(value or 0),
            float(pairs.pop("rate", 1.0)),
            int(pairs.pop("count")) if "count" in pairs else None,
            float(pairs.pop("for", math.inf)),
        )
    except ValueError:
        raise _bad(text, kinds) from None
    if pairs or not (0 <= fault.value < math.inf and 0 <= fault.rate <= 1 and fault.for_s >= 0):
        raise _bad(text, kinds)
    if (fault.count or 0) < 0:
        raise _bad(text, kinds)
    if fault.kind in ENGINE_KINDS and (fault.rate < 1 or fault.count is not None):
        raise _bad(text, kinds)
    if fault.kind.endswith("status") and not 200 <= fault.value <= 599:
        raise _bad(text, kinds)
    if fault.kind == "slow" and fault.value < 1:
        raise _bad(text, kinds)
    return fault


def _bad(text: str, kinds: Mapping[str, bool]) -> errors.ConfigError:
    listed = " ".join(f"{kind}=N" if valued else kind for kind, valued in kinds.items())
    return errors.ConfigError(
        "fault",
        wanted=f"KIND[=VALUE][,rate=0..1][,count=N][,for=SECONDS] with one of {listed}, and no rate "
        f"and count for {' and '.join(ENGINE_KINDS)}",
        got=repr(text),
        fix="name one kind, with a value where it takes one",
    )


class _Armed:
    """Armed fault with its deadline and remaining count."""

    __slots__ = ("fault", "left", "until")

    def __init__(self, fault: Fault, now: float) -> None:
        self.fault = fault
        self.left = math.inf if fault.count is None else fault.count
        self.until = now + fault.for_s


class Faults:
    """The armed faults of one engine. Mutable; one owner."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._armed: list[_Armed] = []
        self.hits = 0

    def arm(self, faults: Iterable[Fault], now: float) -> None:
        """Add faults; their time runs from `now`, monotonic seconds."""
        self._armed += [_Armed(fault, now) for fault in faults]

    def clear(self) -> None:
        """Disarm all."""
        self._armed.clear()

    def armed(self, now: float) -> list[Fault]:
        """Faults armed at `now`."""
        self._armed = [armed for armed in self._armed if armed.left > 0 and armed.until > now]
        return [armed.fault for armed in self._armed]

    def hit(self, kinds: Mapping[str, bool], now: float) -> Fault | None:
        """The first armed fault of these kinds that hits now; uses up one of its count."""
        for armed in self._armed:
            fault = armed.fault
            if fault.kind not in kinds or armed.left <= 0 or armed.until <= now:
                continue
            if fault.rate < 1 and self._rng.random() >= fault.rate:
                continue
            armed.left -= 1
            self.hits += 1
            return fault
        return None

    def ready(self, now: float) -> bool:
        """True unless a `not-ready` fault is armed."""
        return not any(
            armed.fault.kind == "not-ready" and armed.until > now for armed in self._armed
        )

    def slowdown(self, now: float) -> float:
        """Factor on the duration of steps, at least 1."""
        factor = 1.0
        for armed in self._armed:
            if armed.fault.kind == "slow" and armed.until > now:
                factor *= armed.fault.value
        return factor
