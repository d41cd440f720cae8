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

#: Types of session-affinity plugins, which have sources.
_AFFINITY_TYPES: Final = frozenset({"session-affinity-filter", "session-affinity-scorer"})

#: The parameter of releases before the section for its strategy.
_OLD_HEADER: Final = "headerName"
_HEADER_SECTION: Final = "encodedEndpointHeaderConfig"

#: Settings of these plugins whose zero value stands for upstream's default, by section.
_ZERO_IS_DEFAULT: Final[Mapping[str, Mapping[str, object]]] = {
    _HEADER_SECTION: {"header": ""},
    "sessionIdConfig": {"sources": [], "evictionTtlSeconds": 0, "evictionSweepSeconds": 0},
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
        ConfigError: A producer names no header and no cookie, or both; a parameter is unknown; or the
            producer of a source is no text, or no plugin of the file.
    """
    sources: dict[str, _Sources] = {}
    agent_headers: tuple[str, ...] = ()
    for plugin, place in plugins.find_plugins({_PRODUCER, _AGENT}, file):
        if plugin.type == _PRODUCER:
            sources[_ATTRIBUTE + plugin.reference] = _read_producer(plugin, place)
        else:
            agent = validation.to_struct(plugin.parameters, _AgentIdentity, where=place)
            added = agent.additional_session_headers
            agent_headers = (*added, *_AGENT_HEADERS)
            # The request parsers read the others, in their own order and with the body.
            sources[_AGENT] = (*({"header": name} for name in added), {"attribute": _AGENT})
    warnings: list[str] = []
    names = [plugin.reference for plugin in plugins.plugins]
    converted = list(plugins.plugins)
    for index, plugin in enumerate(plugins.plugins):
        if plugin.type in _AFFINITY_TYPES:
            current = _drop_zero_values(_convert_old_header(plugin, warnings))
            place = file / "plugins" / index / "parameters"
            converted[index] = _replace_sources(current, sources, names, place)
    return msgspec.structs.replace(plugins, plugins=tuple(converted)), agent_headers, warnings


def _convert_old_header(plugin: NamedPlugin, warnings: list[str]) -> NamedPlugin:
    """A session-affinity plugin with its header in the section of newer releases."""
    if _OLD_HEADER in plugin.parameters and _HEADER_SECTION not in plugin.parameters:
        parameters = dict(plugin.parameters)
        parameters[_HEADER_SECTION] = {"header": parameters.pop(_OLD_HEADER)}
        plugin = msgspec.structs.replace(plugin, parameters=parameters)
        warnings.append(
            f"plugin {plugin.reference}: {_OLD_HEADER} is of earlier releases: write "
            f"{_HEADER_SECTION}.header"
        )
    return plugin


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


def _drop_zero_values(plugin: NamedPlugin) -> NamedPlugin:
    """The plugin without settings that stand for upstream's defaults, and blanks around names."""
    parameters = dict(plugin.parameters)
    for name, zeros in _ZERO_IS_DEFAULT.items():
        section = _strip(parameters.get(name))
        if isinstance(section, Mapping):
            parameters[name] = {
                key: value
                for key, value in section.items()
                if key not in zeros or value != zeros[key] or isinstance(value, bool)
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


def _join_producer(source: object, names: Sequence[str], place: Place) -> object:
    """A source whose attribute has the name of its producer in it, as up to llm-d-router 0.10."""
    if not isinstance(source, Mapping) or "producer" not in source:
        return source
    attribute, producer = source.get("attribute"), source["producer"]
    if producer is not None and not isinstance(producer, str):
        raise ConfigError(
            place / "producer",
            wanted="text",
            got=validation.show(producer),
            fix="write the name of the plugin that has the attribute",
        )
    others = {key: value for key, value in source.items() if key != "producer"}
    if not producer or not attribute or not isinstance(attribute, str):
        return others
    if producer not in names:
        raise ConfigError(
            place / "producer",
            wanted="the name of a plugin of this file",
            got=producer,
            fix=validation.suggest(producer, names, f"add a {_PRODUCER} of that name"),
        )
    return {**others, "attribute": f"{attribute}/{producer}"}


def _replace_sources(
    plugin: NamedPlugin, sources: Mapping[str, _Sources], names: Sequence[str], place: Place
) -> NamedPlugin:
    """The plugin with the sources that its attributes stand for; malformed ones stay as they are.

    Args:
        names: Plugins of the file.
    """
    section = plugin.parameters.get("sessionIdConfig")
    written = section.get("sources") if isinstance(section, Mapping) else None
    if not isinstance(section, Mapping) or not isinstance(written, list | tuple):
        return plugin
    converted: list[object] = []
    for at, member in enumerate(written):
        source = _join_producer(member, names, place / "sessionIdConfig" / "sources" / at)
        attribute = source.get("attribute") if isinstance(source, Mapping) else None
        converted += sources.get(attribute, [source]) if isinstance(attribute, str) else [source]
    parameters = {**plugin.parameters, "sessionIdConfig": {**section, "sources": converted}}
    return msgspec.structs.replace(plugin, parameters=parameters)
