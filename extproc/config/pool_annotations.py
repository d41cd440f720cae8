"""Annotations of InferencePools that discovery finds: matches and scaling, within rules.

All annotations are optional. `extproc/hosts`, `extproc/paths` and `extproc/models` are lists with
commas, `extproc/headers` is a list of `name=value`; together they state a match as `pools[].match`
does. Anyone with write access to an InferencePool could take the requests of other pools with them,
so a match is in force only if a rule allows it.

- `extproc/scale-target`: `NAME`, `KIND/NAME` or `GROUP/VERSION/KIND/NAME` of an object in the
  namespace of the pool, or `none` for a pool that is not scaled. A kind without a known plural is
  taken to be written `GROUP/VERSION/RESOURCE/KIND/NAME`.
- `extproc/scale-min`, `extproc/scale-max`: replicas, up to the `max` of the rule. A pool with a
  `max` of 0 is not scaled.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec

from extproc.config import autoscaling, validation
from extproc.config.autoscaling import ScaleTarget, ScalingRule, ScalingSection
from extproc.errors import ConfigError
from extproc.routing import pool_match
from extproc.routing.pool_match import PoolMatch

#: Annotations of an InferencePool, by field of `PoolMatch`.
MATCH_ANNOTATIONS: Mapping[str, str] = {
    kind: f"extproc/{kind}" for kind in ("hosts", "paths", "headers", "models")
}

#: Conditions of one kind in a match (count), and the length of each (characters). Every request is
#: held against all of them.
_MAX_CONDITIONS = 64
_MAX_LENGTH = 256

#: Longest part of a match that its rejection repeats (characters).
_MAX_SHOWN = 200


class MatchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The widest match that annotations of some discovered pools may state.

    Attributes:
        pools: Patterns of `namespace/name` with `*` and `?`. No default: a rule trusts the authors
            of these InferencePools.
        hosts: Hosts that a match may name, as in `pools.match`; it must name hosts, and each must
            be one of these or below one of them. `{namespace}` and `{name}` are those of the pool,
            here and in the other fields. None: a match may name any host, or none.
        paths: Paths that a match may name, by the same rule.
        headers: Headers with values that a match must name. None: a match may name any header, or
            none.
        models: Models that a match may name, by the same rule as hosts.
    """

    pools: Annotated[tuple[validation.Name, ...], msgspec.Meta(min_length=1)]
    hosts: tuple[validation.Name, ...] = ()
    paths: tuple[validation.Name, ...] = ()
    headers: Mapping[str, str] = {}
    models: tuple[validation.Name, ...] = ()

    def limit(self, key: str) -> PoolMatch:
        """Return the widest match of a pool, its namespace and name filled in.

        Args:
            key: `namespace/name` of the pool.
        """
        namespace, _, name = key.partition("/")

        def filled(text: str) -> str:
            return text.replace("{namespace}", namespace).replace("{name}", name)

        return PoolMatch(
            hosts=tuple(filled(host).lower() for host in self.hosts),
            paths=tuple(filled(path) for path in self.paths),
            headers={key.lower(): filled(value) for key, value in self.headers.items()},
            models=tuple(filled(model) for model in self.models),
        )


class MatchGrant(msgspec.Struct, frozen=True):
    """The result of a pool's annotations.

    Attributes:
        match: The match in force; empty if there is none.
        rejection: Reason why the annotations are ignored; empty if they are in force or absent.
    """

    match: PoolMatch = PoolMatch()
    rejection: str = ""


def grant_match(rules: Sequence[MatchRule], key: str, annotations: Mapping[str, str]) -> MatchGrant:
    """Check the annotations of a pool against the rules.

    A match wider than every rule is ignored entirely: without the excess condition it would be
    wider still.

    Args:
        rules: `cluster.match_rules` of the configuration.
        key: `namespace/name` of the pool.
    """
    listed = {kind: _words(annotations.get(name, "")) for kind, name in MATCH_ANNOTATIONS.items()}
    if not any(listed.values()):
        return MatchGrant()
    unreadable = _unreadable(listed)
    if unreadable:
        return MatchGrant(rejection=unreadable)
    pairs = (word.partition("=") for word in listed["headers"])
    match = PoolMatch(
        hosts=tuple(host.lower() for host in listed["hosts"]),
        paths=tuple(listed["paths"]),
        models=tuple(listed["models"]),
        headers={name.strip().lower(): value.strip() for name, _, value in pairs},
    )
    limits = [rule.limit(key) for rule in rules if _fits(rule, key)]
    if any(pool_match.is_within(match, limit) for limit in limits):
        return MatchGrant(match)
    reason = "reaches beyond what its rules allow" if limits else "has no rule"
    described = pool_match.describe(match)
    if len(described) > _MAX_SHOWN:
        described = f"{described[:_MAX_SHOWN]}..."
    return MatchGrant(rejection=f"{described} {reason} in cluster.match_rules")


def describe_match_rules(rules: Sequence[MatchRule]) -> Iterator[str]:
    """Describe the rules, a line each for `extproc check`."""
    if not rules:
        yield "match rules none: annotations of InferencePools are ignored (cluster.match_rules)"
    for rule in rules:
        limit = msgspec.convert(rule, PoolMatch, from_attributes=True)
        within = "anything" if limit.is_empty else pool_match.describe(limit)
        yield f"match rules of {', '.join(rule.pools)}, by annotations: {within}"


def _fits(rule: MatchRule | ScalingRule, key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in rule.pools)


def _unreadable(listed: Mapping[str, Sequence[str]]) -> str:
    """Return the first error in the annotations as text; empty if there is none."""
    for kind, words in listed.items():
        if len(words) > _MAX_CONDITIONS:
            return f"{MATCH_ANNOTATIONS[kind]} has {len(words)} entries, above {_MAX_CONDITIONS}"
        if any(len(word) > _MAX_LENGTH for word in words):
            return f"{MATCH_ANNOTATIONS[kind]} has an entry of more than {_MAX_LENGTH} characters"
    if not all("=" in word for word in listed["headers"]):
        return f"{MATCH_ANNOTATIONS['headers']} is no list of name=value"
    return ""


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


#: Placeholder for the pool's name in the name of a target.
NAME = "{name}"

#: Annotations of an InferencePool.
TARGET, MIN, MAX = "extproc/scale-target", "extproc/scale-min", "extproc/scale-max"

#: The value of `TARGET` of a pool that is left alone.
_NONE = "none"

#: The longest number that is read; no pool has more replicas.
_MOST_DIGITS = 6


def resolve_scaling(
    rules: Sequence[ScalingRule], key: str, annotations: Mapping[str, str]
) -> ScalingSection | None:
    """Resolve the scaling section of a discovered pool.

    Args:
        rules: `autoscaling.discovered_pools` of the configuration; the first match counts.
        key: `namespace/name` of the pool.

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
    place = validation.Place(f"annotation of {key}")
    most = min(rule.max, _count(overrides, MAX, rule.max, place))
    if not most:
        return None
    least = min(_count(overrides, MIN, rule.min, place), most)
    namespace, _, name = key.rpartition("/")
    target = _target(rule, overrides.get(TARGET, "").strip(), name, place / TARGET)
    if target is not None:
        target = msgspec.structs.replace(target, namespace=namespace).filled
        autoscaling.check_target(target, place / TARGET)
    section = msgspec.convert(rule, ScalingSection, from_attributes=True)
    return msgspec.structs.replace(section, min=least, max=most, target=target)


def check_scaling_rule(rule: ScalingRule, place: validation.Place) -> None:
    """Reject a rule that contradicts itself.

    Raises:
        ConfigError: The bounds are the wrong way round, there is no such policy or parameter, or
            the target cannot be found.
    """
    if rule.target is not None and rule.target.namespace:
        raise ConfigError(
            place / "target" / "namespace",
            wanted="no namespace: the pool's own is meant",
            got=rule.target.namespace,
            fix="remove it",
        )
    section = msgspec.convert(rule, ScalingSection, from_attributes=True)
    if section.target is not None:
        section = msgspec.structs.replace(section, target=_named(section.target, "name"))
    autoscaling.check_section(section, place)


def describe_scaling_rule(rule: ScalingRule) -> Iterator[str]:
    """Describe a rule, one line for `extproc check`."""
    acts = "others act on the number, from /metrics or KEDA's scaler"
    if rule.target is not None:
        acts = f"patches {rule.target.filled.resource}/scale of {rule.target.name}"
    if rule.annotations:
        acts += f", or as annotation {TARGET} says"
    yield f"replicas    of {', '.join(rule.pools)}: {rule.min} to {rule.max} by {rule.policy}; {acts}"


def _named(target: ScaleTarget, name: str) -> ScaleTarget:
    return msgspec.structs.replace(target, name=target.name.replace(NAME, name))


def _count(
    overrides: Mapping[str, str], annotation: str, usual: int, place: validation.Place
) -> int:
    text = overrides.get(annotation, "").strip()
    if not text:
        return usual
    if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
        return int(text)
    raise ConfigError(
        place / annotation,
        wanted="a number of replicas",
        got=autoscaling.quote_value(text),
        fix="write a number, or remove the annotation",
    )


def _target(rule: ScalingRule, text: str, name: str, place: validation.Place) -> ScaleTarget | None:
    if not text:
        return None if rule.target is None else _named(rule.target, name)
    target = _read(text.split("/"))
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
        case (group, version, resource, kind, name):
            pass
        case _:
            return None
    return ScaleTarget(kind=kind, name=name, group=group, version=version, resource=resource)
