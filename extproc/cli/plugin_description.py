"""Describes profiles and plugins with their parameters and signals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from extproc.config import validation
from extproc.scheduling import registry
from extproc.scheduling.framework import Plugin, Signal
from extproc.scheduling.profile import SchedulerProfile


def describe_plugins() -> Iterator[str]:
    """Strategies, and the kinds of plugins of each role."""
    yield "strategies"
    yield from (f"  {name}" for name in registry.profiles())
    yield from _describe_kinds("filters", registry.FILTERS)
    yield from _describe_kinds("scorers", registry.SCORERS)
    yield from _describe_kinds("costs", registry.COSTS)
    yield from _describe_kinds("pickers", registry.PICKERS)
    yield from _describe_kinds("deciders", registry.DECIDERS)


def _describe_kinds(title: str, kinds: Mapping[str, type[Plugin]]) -> Iterator[str]:
    yield title
    for kind in sorted(kinds.keys() - registry.ALIASES.keys()):
        aliases = registry.aliases_of(kind)
        yield f"  {_describe_kind(kind, kinds[kind])}"
        if aliases:
            yield f"    also {', '.join(aliases)}"


def _describe_kind(kind: str, cls: type[Plugin]) -> str:
    """A kind with its parameters and their defaults, and the signals it needs."""
    fields = msgspec.structs.fields(cls) if issubclass(cls, msgspec.Struct) else ()
    params = (
        f"{field.encode_name}={'required' if field.required else _format_default(field)}"
        for field in fields
    )
    return _describe(kind, params, cls.needs)


def describe_profile(profile: SchedulerProfile) -> Iterator[str]:
    """Plugins of a profile, one in a line."""
    for plugin in profile.filters:
        yield f"  filter    {describe_plugin(plugin)}"
    for scorer, weight in profile.scorers:
        yield f"  scorer    {describe_plugin(scorer)}, weight {weight:g}"
    if profile.cost is not None:
        yield f"  cost      {describe_plugin(profile.cost)}"
    yield f"  picker    {describe_plugin(profile.picker)}"


def describe_plugin(plugin: Plugin) -> str:
    """A plugin with its parameters and the signals it needs."""
    fields = msgspec.structs.fields(plugin) if isinstance(plugin, msgspec.Struct) else ()
    params = (
        f"{field.encode_name}={validation.show(getattr(plugin, field.name))}" for field in fields
    )
    return _describe(plugin.kind, params, plugin.needs)


def _describe(kind: str, params: Iterable[str], needs: object) -> str:
    listed = ", ".join(params)
    text = f"{kind} ({listed})" if listed else kind
    # A property: what the plugin needs depends on its parameters.
    if not isinstance(needs, frozenset):
        return f"{text}, reads what its parameters name"
    signals = join_signals(needs)
    return f"{text}, reads {signals}" if signals else text


def _format_default(field: msgspec.structs.FieldInfo) -> str:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if has_factory else field.default
    return validation.show(msgspec.to_builtins(value))


def join_signals(signals: frozenset[Signal]) -> str:
    """Names of signals, separated by commas."""
    return ", ".join(sorted(signal.value for signal in signals))
