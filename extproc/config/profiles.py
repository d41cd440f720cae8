"""A word or a list of plugins to a scheduling profile, and whether its signals exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from extproc.config import ecosystem, extensions, grammar, strict, trees
from extproc.config import settings as sections
from extproc.errors import ConfigError
from extproc.scheduling import catalogue, defaults, guard, tree
from extproc.scheduling.plugins import Filter, Plugin, Signal
from extproc.scheduling.profile import Profile

Found = TypeVar("Found", bound=Plugin)

_SCHEDULING: strict.Path = ("scheduling",)

#: What has to be switched on for a signal that is not always there.
_SCRAPED = "set scrape.enabled to true"
_PROVIDED_BY: Mapping[Signal, str] = {
    Signal.WAITING: _SCRAPED,
    Signal.RUNNING: _SCRAPED,
    Signal.KV_USAGE: _SCRAPED,
    Signal.ADAPTERS: _SCRAPED,
    Signal.PREFIX: "set prefix.capacity_blocks above 0",
}


def resolve(
    settings: sections.Settings, *, where: str, guards: guard.Guards | None = None
) -> Profile:
    """The profile that settings mean.

    Args:
        settings: All of them: whether a signal exists is decided in several sections.
        where: The file or flags they came from, for errors.
        guards: Clock and counters for plugins of others; None leaves these bare, which is for
            looking at a profile and not for routing.

    Raises:
        ConfigError: An unknown strategy, kind or parameter, a plugin that needs a signal nobody
            provides, or a plugin file that cannot be used.
    """
    return resolve_all(settings, where=where, guards=guards)[0]


def resolve_all(
    settings: sections.Settings, *, where: str, guards: guard.Guards | None = None
) -> tuple[Profile, Mapping[str, Profile]]:
    """The profile for all models, and those of models with rules of their own.

    Args:
        settings: See `resolve`.
        where: See `resolve`.
        guards: See `resolve`.

    Raises:
        ConfigError: See `resolve`.
    """
    scheduling = settings.scheduling
    tables = extensions.tables(scheduling, where=where, guards=guards)
    signals = provided(settings)

    def ruled(rules: grammar.Rules, name: str) -> Profile:
        profile = _ruled(rules, where=where, tables=tables)
        if name:
            profile = msgspec.structs.replace(profile, name=f"{profile.name}/{name}")
        _require(profile, signals, where=where)
        return profile

    by_model = {name: ruled(rules, name) for name, rules in scheduling.models.items()}
    return ruled(scheduling, ""), by_model


def _ruled(rules: grammar.Rules, *, where: str, tables: catalogue.Tables) -> Profile:
    if rules.profile is not None:
        return _written(rules.profile, where=where, tables=tables)
    if not rules.plugins:
        return _named(rules.strategy, where=where)

    def make(table: Mapping[str, type[Found]], written: grammar.Plugin, path: strict.Path) -> Found:
        spot = (*path, "parameters")
        return _plugin(table, written, where=where, path=path, tables=tables, spot=spot)

    return ecosystem.composed(rules, tables, make=make, where=where)


def provided(settings: sections.Settings) -> frozenset[Signal]:
    """The signals there will be."""
    signals = set(Signal) - set(_PROVIDED_BY)
    if settings.prefix.capacity_blocks:
        signals.add(Signal.PREFIX)
    if settings.scrape.enabled:
        signals |= {Signal.WAITING, Signal.RUNNING, Signal.KV_USAGE, Signal.ADAPTERS}
    return frozenset(signals)


def plugins(profile: Profile) -> tuple[Plugin, ...]:
    """Every plugin of a profile, in the order they run."""
    return profile.plugins


def _named(strategy: str, *, where: str) -> Profile:
    named = defaults.profiles()
    profile = named.get(strategy)
    if profile is None:
        meant = strict.nearest(strategy, named)
        raise ConfigError(
            strict.place(where, (*_SCHEDULING, "strategy")),
            wanted=f"one of {', '.join(named)}",
            found=strategy,
            fix=f"did you mean {meant}?" if meant else "name one, or write out a profile",
        )
    return profile


def _written(entry: grammar.ProfileEntry, *, where: str, tables: catalogue.Tables) -> Profile:
    path = (*_SCHEDULING, "profile")

    def plugin(
        table: Mapping[str, type[Found]], written: grammar.Plugin, *at: strict.Step
    ) -> Found:
        return _plugin(table, written, where=where, path=(*path, *at), tables=tables)

    filters = tuple(
        plugin(tables.filters, keep, "filters", at) for at, keep in enumerate(entry.filters)
    )
    scorers = tuple(
        (plugin(tables.scorers, scorer, "scorers", at), scorer.weight)
        for at, scorer in enumerate(entry.scorers)
    )
    picker = plugin(tables.pickers, entry.picker, "picker")
    cost = plugin(tables.costs, entry.cost, "cost") if entry.cost else None
    return Profile(entry.name, filters, scorers, picker, cost)


def _plugin(
    table: Mapping[str, type[Found]],
    entry: grammar.Plugin,
    *,
    where: str,
    path: strict.Path,
    tables: catalogue.Tables,
    spot: strict.Path = (),
) -> Found:
    spot = spot or (*path, "params")
    kind = catalogue.find(table, entry.kind, where=strict.place(where, (*path, "kind")))
    params = dict(entry.params)
    if issubclass(kind, tree.Tree):

        def below(node: grammar.Plugin, at: strict.Path) -> Filter:
            return _plugin(tables.filters, node, where=where, path=at, tables=tables)

        params = trees.grown(params, below, where=where, path=spot)
    try:
        made = strict.convert(params, kind, where=where, path=spot)
        if not isinstance(made.needs, frozenset):
            raise TypeError("its needs are no frozenset")  # noqa: TRY301 - told as its own errors are
    except ConfigError:
        raise
    except Exception as error:  # a check of its own, in a plugin of others
        raise ConfigError(
            strict.place(where, spot),
            wanted=f"parameters that {entry.kind} takes",
            found=f"{type(error).__name__}: {error}",
            fix="change the parameters, or correct the plugin",
        ) from error
    return tables.seated(made)


def _require(profile: Profile, signals: frozenset[Signal], *, where: str) -> None:
    for plugin in plugins(profile):
        missing = sorted(plugin.needs - signals, key=lambda signal: signal.value)
        if missing:
            names = ", ".join(signal.value for signal in missing)
            raise ConfigError(
                strict.place(where, _SCHEDULING),
                wanted=f"every signal that profile {profile.name} reads",
                found=f"nobody who provides {names}, which {plugin.kind} needs",
                fix=f"{_PROVIDED_BY[missing[0]]}, or take {plugin.kind} out",
            )
