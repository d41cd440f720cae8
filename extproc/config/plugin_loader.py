"""Loads external plugins from Python files and installed packages into the plugin registry.

A file named in `scheduling.plugin_files`, or a package with an entry point in the group
`extproc.plugins`, adds every class it defines that has a `kind` and one of the methods filter, score,
cost or pick. Plugins do not register themselves: the registry is a value, built at start and at
every reload, and files are read again. A file runs once per content, so that checking a
configuration and routing by it share its classes. Packages are imported once per process.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from extproc.config import pool_sections, validation
from extproc.discovery.static_discovery import open_regular
from extproc.errors import ConfigError
from extproc.scheduling import plugin_guard, registry
from extproc.scheduling.framework import Signal

#: Entry points of packages that bring plugins; the value is a module or one class.
GROUP = "extproc.plugins"

#: Tables of the registry by the method that makes a class a plugin of that role.
METHODS: Mapping[str, str] = {
    "filter": "filters",
    "score": "scorers",
    "cost": "costs",
    "pick": "pickers",
}

#: Attribute of a module with the source it was built from (bytes).
_CONTENT = "__extproc_content__"

_KIND = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


class ExternalPlugins(msgspec.Struct, frozen=True):
    """Plugin classes of one file or package.

    Attributes:
        origin: The file, or the entry point and its package.
        classes: Plugin classes in order of definition; at least one.
    """

    origin: str
    classes: tuple[type, ...]


def tables(
    scheduling: pool_sections.SchedulingSection,
    *,
    where: str,
    guards: plugin_guard.GuardFactory | None = None,
) -> registry.PluginRegistry:
    """Build the registry of all plugin kinds, built-in and external.

    Args:
        guards: Clock and counters for external plugins; None leaves them unguarded, for checks of
            a configuration without routing.

    Raises:
        ConfigError: A file cannot be read or imported, defines no plugin or a broken one, or a kind
            exists already.
    """
    limits = plugin_guard.GuardLimits(budget_s=scheduling.plugin_budget_ms / 1000)
    external_plugins = [*installed()]
    for at, name in enumerate(scheduling.plugin_files):
        spot = str(validation.Place(where) / "scheduling" / "plugin_files" / at)
        external_plugins.append(from_file(Path(name), where=spot))
    return combine(external_plugins, guards and msgspec.structs.replace(guards, limits=limits))


def combine(
    external_plugins: Sequence[ExternalPlugins], guards: plugin_guard.GuardFactory | None = None
) -> registry.PluginRegistry:
    """Combine the built-in kinds and external plugins.

    Raises:
        ConfigError: Two classes of a role have the same kind.
    """
    built_in = registry.BUILT_IN
    classes_by_table: dict[str, dict[str, Any]] = {
        table: dict(getattr(built_in, table)) for table in METHODS.values()
    }
    origins: dict[type, str] = {}
    for external in external_plugins:
        for cls in external.classes:
            origins[cls] = external.origin
            for role in roles(cls):
                table = classes_by_table[METHODS[role]]
                kind: str = cls.kind  # type: ignore[attr-defined]  # `_checked` saw it
                if kind in table:
                    raise ConfigError(
                        _line_of(cls, external.origin),
                        wanted=f"a kind that no other class with {role} has",
                        got=f"{kind}, {_owner(table[kind], origins)}",
                        fix=f"give {cls.__name__} another kind",
                    )
                table[kind] = cls
    return registry.PluginRegistry(**classes_by_table, external=origins, guards=guards)


def roles(cls: type) -> tuple[str, ...]:
    """Return the methods of a class that make it a plugin: some of filter, score, cost, pick."""
    return tuple(method for method in METHODS if callable(getattr(cls, method, None)))


def installed() -> Iterator[ExternalPlugins]:
    """Load plugins of installed packages, sorted by the name of their entry points.

    Raises:
        ConfigError: A package cannot be imported, or defines no plugin or a broken one.
    """
    for point in _points(tuple(sys.path)):
        origin = f"entry point {point.name} of {point.dist.name if point.dist else 'a package'}"
        try:
            loaded = point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # even an exit: the code is external
            raise ConfigError(
                origin,
                wanted="a module or class that can be imported",
                got=_format_error(error),
                fix="correct the package or uninstall it",
            ) from error
        if isinstance(loaded, ModuleType):
            yield _defined_plugins(loaded, origin)
        else:
            yield ExternalPlugins(origin, (_checked(loaded, origin),))


@lru_cache(maxsize=4)
def _points(_: tuple[str, ...]) -> Sequence[metadata.EntryPoint]:
    """Entry points of packages on this path, by name; slow, because it reads all metadata."""
    return sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name)


def from_file(
    path: Path, *, where: str, relative_to: str = "the configuration file"
) -> ExternalPlugins:
    """Load the plugins of a Python file; it runs only if its content changed since the last run.

    Args:
        relative_to: The base of relative paths, for the error of a file that cannot be read.

    Raises:
        ConfigError: It cannot be read, raises, or defines no plugin or a broken one.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            source = file.read()
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(
            where,
            wanted="a readable Python file",
            got=f"{path}: {why}",
            fix=f"correct the path; it is relative to {relative_to}",
        ) from None
    # A name of its own for each path: annotations written as text are looked up by module name,
    # and a reload then takes the place of what it replaces.
    module = ModuleType(f"extproc plugin {path}")
    module.__file__ = str(path)
    before = sys.modules.get(module.__name__)
    if before is not None and getattr(before, _CONTENT, None) == source:
        return _defined_plugins(before, str(path))
    setattr(module, _CONTENT, source)
    sys.modules[module.__name__] = module
    try:
        _execute(source, module, path)
        return _defined_plugins(module, str(path))
    except BaseException:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before
        raise


def _execute(source: bytes, module: ModuleType, path: Path) -> None:
    """Run source as the body of a module.

    Not through an import: Python's cache of compiled files goes by size and whole seconds, and
    would miss a quick edit.
    """
    try:
        code = compile(source, str(path), "exec", dont_inherit=True)
        exec(code, module.__dict__)  # noqa: S102 - the configuration asks for this code to run
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # even an exit: the code is external
        line = error.lineno if isinstance(error, SyntaxError) else None
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(path):
                line = frame.lineno
        raise ConfigError(
            f"{path}:{line or 1}",
            wanted="a Python file that can be imported",
            got=_format_error(error),
            fix="correct it, or take the file out of scheduling.plugin_files",
        ) from error


def _defined_plugins(module: ModuleType, origin: str) -> ExternalPlugins:
    """Return the plugins that a module defines; imported classes do not count."""
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and roles(value)
    ]
    plugins = dict.fromkeys(cls for cls in own if hasattr(cls, "kind"))
    if not plugins:
        nameless = f"{own[0].__name__} with {roles(own[0])[0]} and no kind" if own else "none"
        raise ConfigError(
            _line_of(own[0], origin) if own else origin,
            wanted=f"a class with a kind and one of the methods {', '.join(METHODS)}",
            got=nameless,
            fix="add one; `extproc plugin template scorer` prints a start",
        )
    return ExternalPlugins(origin, tuple(_checked(cls, origin) for cls in plugins))


def _checked(cls: Any, origin: str) -> type:
    """Check that a class can be a plugin, and return it.

    Raises:
        ConfigError: It cannot; the error names the line at which it begins.
    """
    if not isinstance(cls, type) or not roles(cls):
        raise ConfigError(
            origin,
            wanted=f"a module, or a class with one of the methods {', '.join(METHODS)}",
            got=validation.show(cls),
            fix="let the entry point name one",
        )
    for complaint, actual, fix in _complaints(cls):
        raise ConfigError(_line_of(cls, origin), wanted=complaint, got=actual, fix=fix)
    return cls


def _complaints(cls: Any) -> Iterator[tuple[str, str, str]]:
    """Yield errors of a plugin class as (expected, actual, fix)."""
    name = cls.__name__
    if not issubclass(cls, msgspec.Struct):
        yield (
            f"the parameters of {name} as fields of a msgspec struct",
            f"class {name}({', '.join(base.__name__ for base in cls.__bases__)})",
            f"write class {name}(msgspec.Struct, frozen=True)",
        )
    kind = getattr(cls, "kind", None)
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        yield (
            f"a kind of {name} in lower case with dashes",
            validation.show(kind) if isinstance(kind, str | None) else "a field",
            'write kind: ClassVar[str] = "my-kind"',
        )
    needs = getattr(cls, "needs", None)
    # A property: what it needs depends on its parameters.
    signals = isinstance(needs, frozenset) and all(isinstance(signal, Signal) for signal in needs)
    if not signals and not isinstance(needs, property):
        yield (
            f"the signals {name} reads as a frozenset of Signal",
            "none" if needs is None else type(needs).__name__,
            "write needs: ClassVar[frozenset[Signal]] = frozenset({...})",
        )
    try:
        msgspec.inspect.type_info(cls)
    except Exception as error:  # noqa: BLE001 - whatever its annotations do
        yield (
            f"annotations of {name} that can be read",
            _format_error(error),
            "import at the top of the file what they name",
        )


def _line_of(cls: type, origin: str) -> str:
    """Return file and line at which a class begins; its origin if they are unknown."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.findsource(cls)[1] + 1}"
    except (OSError, TypeError):
        return origin


def _owner(cls: type, origins: Mapping[type, str]) -> str:
    return f"which {cls.__name__} of {origins[cls]} has" if cls in origins else "a built-in"


def _format_error(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return text if len(text) <= 200 else f"{text[:197]}..."
