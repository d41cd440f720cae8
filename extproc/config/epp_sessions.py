"""Converts the plugins of an EndpointPickerConfig that name sessions by headers and cookies.

Upstream, they store a session as an attribute of the request, which session-affinity plugins name as a
source. Here these sources become the headers and cookies themselves. The session of an agent is also the
flow of requests that name none.
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

#: The plugin that reads the session of an agent, which is also its attribute.
_AGENT: Final = "agent-identity"

#: Headers of an agent's session, as upstream reads them after those of the file.
_AGENT_HEADERS: Final = (
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
)

#: Types of the plugins with sources.
_READERS: Final = frozenset({"session-affinity-filter", "session-affinity-scorer"})

#: The parameter of releases before the section for its strategy.
_OLD_HEADER: Final = "headerName"
_HEADER_SECTION: Final = "encodedEndpointHeaderConfig"

#: Settings of these plugins that upstream takes for absent where they are empty or 0, by section.
_UNSET: Final = {
    _HEADER_SECTION: ("header",),
    "sessionIdConfig": ("sources", "evictionTtlSeconds", "evictionSweepSeconds"),
}

_Sources = Sequence[Mapping[str, str]]


class _SessionProducer(UpstreamParameters, frozen=True):
    header_name: str = ""
    cookie_name: str = ""


class _AgentIdentity(UpstreamParameters, frozen=True):
    additional_session_headers: tuple[validation.Name, ...] = ()


def convert_sessions(
    plugins: EppPlugins, file: Place
) -> tuple[EppPlugins, tuple[str, ...], list[str]]:
    """Convert the parameters of session-affinity plugins.

    Returns:
        The plugins with headers and cookies in place of attributes as sources; the headers that
        name the session of an agent, none without the plugin; and warnings.

    Raises:
        ConfigError: A producer names no header and no cookie, or both; or a parameter is unknown.
    """
    sources: dict[str, _Sources] = {}
    agent_headers: tuple[str, ...] = ()
    for index, plugin in enumerate(plugins.plugins):
        place = file / "plugins" / index / "parameters"
        if plugin.type == _PRODUCER:
            sources[_ATTRIBUTE + (plugin.name or plugin.type)] = _read_producer(plugin, place)
        elif plugin.type == _AGENT:
            agent = validation.to_struct(plugin.parameters, _AgentIdentity, where=place)
            added = agent.additional_session_headers
            agent_headers = (*added, *_AGENT_HEADERS)
            # The request parsers read the others, in their own order and with the body.
            sources[_AGENT] = (*({"header": name} for name in added), {"attribute": _AGENT})
    warnings: list[str] = []
    converted = tuple(
        _convert_reader(plugin, sources, warnings) if plugin.type in _READERS else plugin
        for plugin in plugins.plugins
    )
    return msgspec.structs.replace(plugins, plugins=converted), agent_headers, warnings


def _convert_reader(
    plugin: NamedPlugin, sources: Mapping[str, _Sources], warnings: list[str]
) -> NamedPlugin:
    """A session-affinity plugin as it is built."""
    if _OLD_HEADER in plugin.parameters and _HEADER_SECTION not in plugin.parameters:
        parameters = dict(plugin.parameters)
        parameters[_HEADER_SECTION] = {"header": parameters.pop(_OLD_HEADER)}
        plugin = msgspec.structs.replace(plugin, parameters=parameters)
        warnings.append(
            f"plugin {plugin.name or plugin.type}: {_OLD_HEADER} is of earlier releases: write "
            f"{_HEADER_SECTION}.header"
        )
    return _with_sources(_without_unset(plugin), sources)


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


def _without_unset(plugin: NamedPlugin) -> NamedPlugin:
    """The plugin without settings that stand for upstream's defaults, and blanks around names."""
    parameters = dict(plugin.parameters)
    for name, keys in _UNSET.items():
        section = _strip(parameters.get(name))
        if isinstance(section, Mapping):
            parameters[name] = {
                key: value
                for key, value in section.items()
                if key not in keys or value or isinstance(value, bool)
            }
    return msgspec.structs.replace(plugin, parameters=parameters)


def _strip(value: object) -> object:
    """A tree without blanks around its texts."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list | tuple):
        return [_strip(member) for member in value]
    if isinstance(value, Mapping):
        return {key: _strip(member) for key, member in value.items()}
    return value


def _with_one_name(source: object) -> object:
    """A source whose attribute has the name of its producer in it, as up to llm-d-router 0.10."""
    if not isinstance(source, Mapping) or "producer" not in source:
        return source
    attribute, producer = source.get("attribute"), source["producer"] or ""
    if not isinstance(attribute, str) or not isinstance(producer, str):
        return source
    others = {key: value for key, value in source.items() if key != "producer"}
    return {**others, "attribute": f"{attribute}/{producer}" if producer else attribute}


def _with_sources(plugin: NamedPlugin, sources: Mapping[str, _Sources]) -> NamedPlugin:
    """The plugin with the sources that its attributes stand for; malformed ones stay as they are."""
    section = plugin.parameters.get("sessionIdConfig")
    written = section.get("sources") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(written, list | tuple):
        return plugin
    converted: list[object] = []
    for source in map(_with_one_name, written):
        attribute = source.get("attribute") if isinstance(source, Mapping) else None
        converted += sources.get(attribute, [source]) if isinstance(attribute, str) else [source]
    parameters = {**plugin.parameters, "sessionIdConfig": {**section, "sources": converted}}
    return msgspec.structs.replace(plugin, parameters=parameters)
