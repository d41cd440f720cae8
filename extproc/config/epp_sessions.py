"""Converts the plugins of an EndpointPickerConfig that name sessions by headers and cookies.

Upstream, they store a session as an attribute of the request, which session-affinity plugins name as a
source. Here these sources become the headers and cookies themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.config import validation
from extproc.config.pool_sections import EppPlugins, NamedPlugin
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling.framework import UpstreamParameters

#: The plugin that reads a session from a header or a cookie, and its attribute without its name.
_PRODUCER: Final = "session-id-producer"
_ATTRIBUTE: Final = "SessionIDDataKey/"

#: Types of the plugins with sources.
_READERS: Final = frozenset({"session-affinity-filter", "session-affinity-scorer"})

_Sources = Sequence[Mapping[str, str]]


class _SessionProducer(UpstreamParameters, frozen=True):
    header_name: str = ""
    cookie_name: str = ""


def convert_sessions(plugins: EppPlugins, file: Place) -> EppPlugins:
    """Return the plugins with headers and cookies in place of attributes as sources.

    Raises:
        ConfigError: A producer names no header and no cookie, or both.
    """
    sources: dict[str, _Sources] = {}
    for index, plugin in enumerate(plugins.plugins):
        place = file / "plugins" / index / "parameters"
        if plugin.type == _PRODUCER:
            sources[_ATTRIBUTE + (plugin.name or plugin.type)] = _read_producer(plugin, place)
    if not sources:
        return plugins
    converted = tuple(
        _with_sources(plugin, sources) if plugin.type in _READERS else plugin
        for plugin in plugins.plugins
    )
    return msgspec.structs.replace(plugins, plugins=converted)


def _read_producer(plugin: NamedPlugin, place: Place) -> _Sources:
    """The source that a producer reads."""
    producer = validation.to_struct(plugin.parameters, _SessionProducer, where=place)
    header, cookie = producer.header_name.strip(), producer.cookie_name.strip()
    if bool(header) == bool(cookie):
        raise ConfigError(
            place,
            wanted="one of headerName and cookieName, as upstream",
            got="both" if header else "none",
            fix="write headerName: x-session-id",
        )
    return ({"header": header} if header else {"cookie": cookie},)


def _with_sources(plugin: NamedPlugin, sources: Mapping[str, _Sources]) -> NamedPlugin:
    """The plugin with the sources that its attributes stand for; malformed ones stay as they are."""
    section = plugin.parameters.get("sessionIdConfig")
    written = section.get("sources") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(written, list | tuple):
        return plugin
    converted: list[object] = []
    for source in written:
        attribute = source.get("attribute") if isinstance(source, Mapping) else None
        converted += sources.get(attribute, [source]) if isinstance(attribute, str) else [source]
    parameters = {**plugin.parameters, "sessionIdConfig": {**section, "sources": converted}}
    return msgspec.structs.replace(plugin, parameters=parameters)
