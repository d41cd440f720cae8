"""Rules that limit the requests a pool discovered in Kubernetes may match by annotations.

Annotations of an InferencePool, all optional, state a match as `pools[].match` does:
`extproc/hosts`, `extproc/paths` and `extproc/models` are lists with commas, `extproc/headers` is a
list of `name=value`. Anyone with write access to an InferencePool could take the requests of other
pools with them, so a match is in force only if a rule allows it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import msgspec

from extproc.config import validation
from extproc.routing import pool_match
from extproc.routing.pool_match import PoolMatch

#: Annotations of an InferencePool, by field of a claim.
ANNOTATIONS: Mapping[str, str] = {
    kind: f"extproc/{kind}" for kind in ("hosts", "paths", "headers", "models")
}

#: Conditions of one kind in a claim (count), and the length of each (characters). Every request is
#: held against all of them.
_MAX_CONDITIONS = 64
_MAX_LENGTH = 256


class MatchRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The widest match that annotations of some discovered pools may state.

    Attributes:
        pools: Patterns of `namespace/name` with `*` and `?`. No default: a rule trusts the authors
            of these InferencePools.
        hosts: Hosts that a claim may name, as in `pools.match`; it must name hosts, and each must
            be one of these or below one of them. `{namespace}` and `{name}` are those of the pool,
            here and in the other fields. None: a claim may name any host, or none.
        paths: Paths that a claim may name, by the same rule.
        headers: Headers with values that a claim must name. None: a claim may name any header, or
            none.
        models: Models that a claim may name, by the same rule as hosts.
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
        claim: The match in force; empty if there is none.
        refused: Reason why the annotations are ignored; empty if they are in force or absent.
    """

    claim: PoolMatch = PoolMatch()
    refused: str = ""


def grant_match(rules: Sequence[MatchRule], key: str, annotations: Mapping[str, str]) -> MatchGrant:
    """Check the annotations of a pool against the rules.

    A match wider than every rule is ignored entirely: without the excess condition it would be
    wider still.

    Args:
        rules: `cluster.claims` of the configuration.
        key: `namespace/name` of the pool.
        annotations: Annotations of its InferencePool.
    """
    listed = {kind: _words(annotations.get(name, "")) for kind, name in ANNOTATIONS.items()}
    if not any(listed.values()):
        return MatchGrant()
    unreadable = _unreadable(listed)
    if unreadable:
        return MatchGrant(refused=unreadable)
    pairs = (word.partition("=") for word in listed["headers"])
    claim = PoolMatch(
        hosts=tuple(host.lower() for host in listed["hosts"]),
        paths=tuple(listed["paths"]),
        models=tuple(listed["models"]),
        headers={name.strip().lower(): value.strip() for name, _, value in pairs},
    )
    limits = [rule.limit(key) for rule in rules if _fits(rule, key)]
    if any(pool_match.within(claim, limit) for limit in limits):
        return MatchGrant(claim)
    why = "reaches beyond what its rules allow" if limits else "has no rule"
    return MatchGrant(refused=f"{pool_match.describe(claim)} {why} in cluster.claims")


def describe_rules(rules: Sequence[MatchRule]) -> Iterator[str]:
    """Describe the rules, a line each for `extproc check`."""
    if not rules:
        yield "claims      none: annotations of InferencePools are ignored (cluster.claims)"
    for rule in rules:
        limit = PoolMatch(
            hosts=rule.hosts, paths=rule.paths, headers=rule.headers, models=rule.models
        )
        within = "anything" if limit.empty else pool_match.describe(limit)
        yield f"claims      of {', '.join(rule.pools)}, by annotations: {within}"


def _fits(rule: MatchRule, key: str) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in rule.pools)


def _unreadable(listed: Mapping[str, Sequence[str]]) -> str:
    """Return the first error in the annotations as text; empty if there is none."""
    for kind, words in listed.items():
        if len(words) > _MAX_CONDITIONS:
            return f"{ANNOTATIONS[kind]} has {len(words)} entries, above {_MAX_CONDITIONS}"
        if any(len(word) > _MAX_LENGTH for word in words):
            return f"{ANNOTATIONS[kind]} has an entry of more than {_MAX_LENGTH} characters"
    if not all("=" in word for word in listed["headers"]):
        return f"{ANNOTATIONS['headers']} is no list of name=value"
    return ""


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
