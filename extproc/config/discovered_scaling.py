"""Scaling of pools discovered in Kubernetes, by rules and annotations.

Annotations of an InferencePool, all optional:

- `extproc/scale-target`: `NAME`, `KIND/NAME` or `GROUP/VERSION/KIND/NAME` of an object in the
  namespace of the pool, or `none` for a pool that is not scaled. A kind without a known plural is
  taken to be written `GROUP/VERSION/RESOURCE/KIND/NAME`.
- `extproc/scale-min`, `extproc/scale-max`: replicas, up to the `max` of the rule. A pool with a
  `max` of 0 is not scaled.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from extproc.config import autoscaling
from extproc.config.autoscaling import ScaleTarget, ScalingRule, ScalingSection
from extproc.errors import ConfigError

#: Placeholder for the pool's name in the name of a target.
NAME = "{name}"

#: Annotations of an InferencePool.
TARGET, MIN, MAX = "extproc/scale-target", "extproc/scale-min", "extproc/scale-max"

#: The value of `TARGET` of a pool that is left alone.
_NONE = "none"

#: The longest number that is read; nobody has more replicas.
_MOST_DIGITS = 6


def resolve_scaling(
    rules: Sequence[ScalingRule], key: str, annotations: Mapping[str, str]
) -> ScalingSection | None:
    """Resolve the scaling section of a discovered pool.

    Args:
        rules: `autoscaling.discovered_pools` of the configuration; the first match counts.
        key: `namespace/name` of the pool.
        annotations: Annotations of its InferencePool.

    Returns:
        None if the pool is not scaled.

    Raises:
        ConfigError: An annotation cannot be read, or names no object of the pool's namespace.
    """
    rule = next((candidate for candidate in rules if _fits(candidate, key)), None)
    if rule is None:
        return None
    overrides = annotations if rule.annotations else {}
    if overrides.get(TARGET, "").strip() == _NONE:
        return None
    where = f"annotation of {key}"
    most = min(rule.max, _count(overrides, MAX, rule.max, where))
    if not most:
        return None
    least = min(_count(overrides, MIN, rule.min, where), most)
    namespace, _, name = key.rpartition("/")
    wanted = ScalingSection(
        policy=rule.policy,
        params=rule.params,
        min=least,
        max=most,
        meter=rule.meter,
        target=_target(rule, overrides.get(TARGET, "").strip(), name, where),
    )
    if wanted.target is not None:
        placed = msgspec.structs.replace(wanted.target, namespace=namespace).filled
        autoscaling.check_target(placed, f"{where}: {TARGET}")
        wanted = msgspec.structs.replace(wanted, target=placed)
    return wanted


def check_rule(rule: ScalingRule, *, where: str) -> None:
    """Reject a rule that contradicts itself.

    Args:
        where: The file and path it came from, for errors.

    Raises:
        ConfigError: The bounds are the wrong way round, there is no such policy or parameter, or
            the target cannot be found.
    """
    if rule.target is not None and rule.target.namespace:
        raise ConfigError(
            f"{where}.target.namespace",
            wanted="no namespace: the pool's own is meant",
            got=rule.target.namespace,
            fix="remove it",
        )
    target = None if rule.target is None else _named(rule.target, "name")
    wanted = ScalingSection(
        policy=rule.policy, params=rule.params, min=rule.min, max=rule.max, target=target
    )
    autoscaling.check_section(wanted, where=where)


def describe_rule(rule: ScalingRule) -> Iterator[str]:
    """Describe a rule, one line for `extproc check`."""
    acts = "others act on the number, from /metrics or KEDA's scaler"
    if rule.target is not None:
        acts = f"patches {rule.target.filled.resource}/scale of {rule.target.name}"
    if rule.annotations:
        acts += f", or as annotation {TARGET} says"
    yield f"replicas    of {', '.join(rule.pools)}: {rule.min} to {rule.max} by {rule.policy}; {acts}"


def _fits(rule: ScalingRule, key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in rule.pools)


def _named(target: ScaleTarget, name: str) -> ScaleTarget:
    return msgspec.structs.replace(target, name=target.name.replace(NAME, name))


def _count(overrides: Mapping[str, str], annotation: str, usual: int, where: str) -> int:
    text = overrides.get(annotation, "").strip()
    if not text:
        return usual
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    raise ConfigError(
        f"{where}: {annotation}",
        wanted="a number of replicas",
        got=autoscaling.quote_value(text),
        fix="write a number, or remove the annotation",
    )


def _target(rule: ScalingRule, text: str, name: str, where: str) -> ScaleTarget | None:
    if not text:
        return None if rule.target is None else _named(rule.target, name)
    target = _read(text.split("/"))
    place = f"{where}: {TARGET}"
    if target is None:
        raise ConfigError(
            place,
            wanted="NAME, KIND/NAME, GROUP/VERSION/KIND/NAME or GROUP/VERSION/RESOURCE/KIND/NAME",
            got=autoscaling.quote_value(text),
            fix="write it like apps/v1/Deployment/vllm",
        )
    return target


def _read(words: Sequence[str]) -> ScaleTarget | None:
    """Build a target from the segments of an annotation; None if their number is wrong."""
    if not all(words):
        return None
    match words:
        case (name,):
            return ScaleTarget(name=name)
        case (kind, name):
            return ScaleTarget(kind=kind, name=name)
        case (group, version, kind, name):
            # Of a known kind in another group or version only the plural is known.
            resource = autoscaling.KINDS.get(kind, ("", "", ""))[2]
            return ScaleTarget(
                kind=kind, name=name, group=group, version=version, resource=resource
            )
        case (group, version, resource, kind, name):
            return ScaleTarget(
                kind=kind, name=name, group=group, version=version, resource=resource
            )
        case _:
            return None
