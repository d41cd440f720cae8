"""Converts the section `flowControl` of an upstream file to our section `flow_control`.

Upstream queues requests while its saturation detector reports saturation, in bands of priority, and
within a band by flow; here requests wait per pool under a single bound, strictly by priority, and
within a priority by tenant. Common settings are converted; a warning names every other one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from extproc.config import validation
from extproc.errors import ConfigError

#: The feature gate without which upstream ignores the section.
GATE: Final = "flowControl"

#: Seconds that a request waits without `defaultRequestTTL`. Upstream then waits as long as the
#: client does; Envoy's message_timeout takes no more than an hour.
_LONGEST_S: Final = 3600.0

#: Upstream policies by type, and the value of ours that does the same.
_FAIRNESS: Final = {
    "global-strict-fairness-policy": "none",
    "round-robin-fairness-policy": "round-robin",
}
_ORDER: Final = {
    "fcfs-ordering-policy": "fcfs",
    "edf-ordering-policy": "edf",
    "slo-deadline-ordering-policy": "slo",
}

_SECTION_KEYS: Final = (
    "maxBytes",
    "maxRequests",
    "defaultRequestTTL",
    "defaultPriorityBand",
    "priorityBands",
    "usageLimitPolicyPluginRef",
)
_BAND_KEYS: Final = (
    "priority",
    "maxBytes",
    "maxRequests",
    "fairnessPolicyRef",
    "orderingPolicyRef",
)

_UNIT_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_QUANTITY: Final = re.compile(
    r"\+?(\d{1,18}(?:\.\d{0,9})?|\.\d{1,9})(?:(m|k|M|G|T|P|E|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?"
)
_POWERS: Final = "kMGTPE"


class _Section:
    """Reads a mapping of the section; errors name its path.

    Args:
        keys: Its allowed keys.
        path: Its path in the file.

    Raises:
        ConfigError: It is no mapping, or has an unknown key.
    """

    def __init__(
        self, tree: object, keys: Sequence[str], *, path: validation.Path, where: str
    ) -> None:
        self.path = path
        self._where = where
        if not isinstance(tree, Mapping):
            raise self.wrong("", wanted="a mapping", got=tree, fix="write its keys below it")
        self._tree: Mapping[str, object] = tree
        for key in tree:
            if key not in keys:
                nearest = validation.closest_name(str(key), keys)
                fix = f"did you mean {nearest}?" if nearest else "remove it"
                raise self.wrong(str(key), wanted=f"one of {', '.join(keys)}", got=key, fix=fix)

    def get(self, key: str) -> object:
        """Return the value of a key; None if it is absent."""
        return self._tree.get(key)

    def quantity(self, key: str) -> int:
        """Return a Kubernetes quantity as a number, rounded up; 0 if it is absent.

        Raises:
            ConfigError: It is no quantity, or below 0.
        """
        written = self._tree.get(key)
        if written is None:
            return 0
        split = _QUANTITY.fullmatch(str(written).strip())
        if split is None or isinstance(written, bool):
            fix = "write 100, 1k, 500M or 1Gi"
            raise self.wrong(key, wanted="a quantity of 0 or more", got=written, fix=fix)
        number, suffix, exponent = split.groups()
        if suffix is None:
            factor = 10.0 ** int(exponent or 0)
        elif suffix == "m":
            factor = 1e-3
        else:
            base = 1024.0 if suffix.endswith("i") else 1000.0
            factor = base ** (1 + _POWERS.index(suffix[0].replace("K", "k")))
        return min(math.ceil(float(number) * factor), 2**63 - 1)

    def seconds(self, key: str) -> float:
        """Return a Go duration in seconds; 0 if it is absent.

        Raises:
            ConfigError: It is no duration, or below 0.
        """
        written = self._tree.get(key)
        if written in (None, 0, "0"):
            return 0.0
        parts = _DURATION_PART.findall(written) if isinstance(written, str) else []
        if not parts or "".join(number + unit for number, unit in parts) != written:
            fix = "write 30s, 1m30s or 500ms"
            raise self.wrong(key, wanted="a duration of 0 or more", got=written, fix=fix)
        return sum(float(number) * _UNIT_S[unit] for number, unit in parts)

    def wrong(self, key: str, *, wanted: str, got: object, fix: str) -> ConfigError:
        """Return an error about a key; an empty key means the section."""
        path = (*self.path, key) if key else self.path
        place = validation.location(self._where, path)
        return ConfigError(place, wanted=wanted, got=validation.show(got), fix=fix)


def section_of(
    tree: Mapping[str, object], *, where: str
) -> tuple[dict[str, object] | None, list[str]]:
    """Convert `flowControl` of an upstream file, and warn of settings without a counterpart.

    Args:
        where: Its name, for errors.

    Returns:
        The section `flow_control`, None without the feature gate (requests go to engines at once);
        and warnings.

    Raises:
        ConfigError: A value is no quantity or duration, a key or a policy is unknown.
    """
    gates = tree.get("featureGates")
    is_enabled = isinstance(gates, list) and GATE in gates
    written = tree.get("flowControl")
    warnings: list[str] = []
    if not is_enabled:
        if written:
            warnings.append(
                "flowControl has no effect without the feature gate, as upstream: requests go to "
                "engines at once; write featureGates: [flowControl]"
            )
        return None, warnings
    section = _Section(written or {}, _SECTION_KEYS, path=("flowControl",), where=where)
    bands = list(_bands(section, where=where))
    policy_type = _policy_types(tree)
    ttl_s = section.seconds("defaultRequestTTL")
    wait_s = min(ttl_s or _LONGEST_S, _LONGEST_S)
    if ttl_s > wait_s:
        warnings.append(
            f"flowControl.defaultRequestTTL: {ttl_s:g} s are longer than Envoy lets a request wait: "
            f"flow_control.timeout_s is {wait_s:g}"
        )
    ours: dict[str, object] = {
        "enabled": True,
        "timeout_s": wait_s,
        "empty_timeout_s": wait_s,
        "fairness": _policy("fairnessPolicyRef", _FAIRNESS, bands, policy_type, warnings),
        "order": _policy("orderingPolicyRef", _ORDER, bands, policy_type, warnings),
    }
    for key, name in (("maxRequests", "max_requests"), ("maxBytes", "max_bytes")):
        bound = section.quantity(key)
        if bound:
            ours[name] = bound
    warnings += _unmapped(section, bands, policy_type)
    return ours, warnings


def _bands(section: _Section, *, where: str) -> Iterator[_Section]:
    """Yield the default band, then those with a priority of their own."""
    default = section.get("defaultPriorityBand")
    path = (*section.path, "defaultPriorityBand")
    yield _Section(default or {}, _BAND_KEYS, path=path, where=where)
    written = section.get("priorityBands") or []
    if not isinstance(written, list):
        fix = "write one band per item"
        raise section.wrong("priorityBands", wanted="a list of bands", got=written, fix=fix)
    for at, band in enumerate(written):
        yield _Section(band, _BAND_KEYS, path=(*section.path, "priorityBands", at), where=where)


def _policy_types(tree: Mapping[str, object]) -> Callable[[str], str]:
    """Return a function from plugin name to type; a name without a plugin is itself a type."""
    plugins = tree.get("plugins")
    types = {
        str(plugin.get("name") or plugin.get("type")): str(plugin.get("type"))
        for plugin in (plugins if isinstance(plugins, list) else ())
        if isinstance(plugin, Mapping)
    }
    return lambda name: types.get(name, name)


def _policy(
    key: str,
    known: Mapping[str, str],
    bands: Sequence[_Section],
    policy_type: Callable[[str], str],
    warnings: list[str],
) -> str:
    """Convert the policy of priority 0, else of the default band; warn of bands that differ.

    Raises:
        ConfigError: There is no policy of that name.
    """
    usual = next(iter(known))
    chosen: dict[str, str] = {}
    for band in bands:
        name = band.get(key) or usual
        kind = policy_type(str(name))
        if kind not in known and kind not in _OTHER_POLICIES:
            fix = "name a plugin of this file, or its type"
            wanted = f"a policy such as {', '.join(known)}"
            raise band.wrong(key, wanted=wanted, got=name, fix=fix)
        chosen[validation.format_path(band.path)] = kind
    spot, kind = next(iter(chosen.items()))
    for band in bands[1:]:
        if band.get("priority") == 0:
            spot = validation.format_path(band.path)
            kind = chosen[spot]
    ours = "fairness" if known is _FAIRNESS else "order"
    mapped = known.get(kind) or known[usual]
    if kind not in known:
        warnings.append(
            f"{spot}.{key}: {kind} is not built: flow_control.{ours} is {mapped} in its place"
        )
    warnings += [
        f"{other}.{key}: {different} is not acted on: all priorities have one policy, "
        f"flow_control.{ours} {mapped}"
        for other, different in chosen.items()
        if different != kind
        and (other != validation.format_path(bands[0].path) or bands[0].get(key))
    ]
    return mapped


#: Upstream policies without a counterpart in flow control.
_OTHER_POLICIES: Final = frozenset({"program-aware-fairness"})


def _unmapped(
    section: _Section, bands: Sequence[_Section], policy_type: Callable[[str], str]
) -> Iterator[str]:
    """Warn of settings that flow control has no field for."""
    for band in bands:
        for key in ("maxRequests", "maxBytes"):
            if band.quantity(key):
                yield (
                    f"{validation.format_path(band.path)}.{key} is not acted on: all priorities share "
                    f"flowControl.{key}, and a full queue displaces the lowest priority first"
                )
    limit = section.get("usageLimitPolicyPluginRef")
    if limit:
        yield (
            f"flowControl.usageLimitPolicyPluginRef: {policy_type(str(limit))} is not acted on: "
            "priorities above 0 find an endpoint free for longer than others, as flow_control.busy_s says"
        )
