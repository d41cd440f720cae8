"""Reads configuration files and flags into settings; a flag overrides the file.

`collect` finds every error in one pass, the other functions stop at the first.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from extproc.config import epp_config, pools, validation, yaml_documents
from extproc.config.pool_sections import SchedulingSection
from extproc.config.settings import API_VERSION, KIND, Settings
from extproc.discovery.static_discovery import open_regular
from extproc.errors import ConfigError, file_error
from extproc.protocol import body_buffer


class ConfigDocument(msgspec.Struct, frozen=True):
    """A configuration as written.

    Attributes:
        where: The file or flag, for errors.
        tree: Mappings, lists and scalars.
        folder: Directory that relative file names in it start from; empty for the working
            directory.
        epp: The EndpointPickerConfig among the documents; None for a file of ours alone.
    """

    where: str
    tree: Mapping[str, object]
    folder: str = ""
    epp: epp_config.EppDocument | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about keys without effect."""
        return () if self.epp is None else self.epp.warnings


class FlagOverride(msgspec.Struct, frozen=True):
    """A setting that a flag overrides.

    Attributes:
        path: Keys from the top, such as `("server", "grpc_port")`.
        value: The value of the flag, in the type of the field.
        flag: The flag, for errors.
    """

    path: tuple[str, ...]
    value: object
    flag: str


_STRATEGY = ("scheduling", "strategy")

#: The document without a file: defaults, and flags.
EMPTY = ConfigDocument("the command line", {"apiVersion": API_VERSION, "kind": KIND})


def read(path: Path, *, again: bool = False) -> ConfigDocument:
    """Read a file.

    Args:
        again: As of `read_text`.

    Raises:
        ConfigError: It cannot be read or is no YAML or JSON mapping.
    """
    document = parse(read_text(path, again=again), where=str(path))
    return msgspec.structs.replace(document, folder=str(path.parent))


def read_text(path: Path, *, again: bool = False) -> str:
    """Return the text of a file.

    Args:
        again: Whether it was read before: only a regular file can be. The first time it may be a
            pipe too (`/dev/stdin`, `<(command)`), which is read to its end, however long its writer
            takes.

    Raises:
        ConfigError: It cannot be read or is not UTF-8.
    """
    try:
        with open(path, encoding="utf-8", opener=open_regular if again else None) as file:
            return file.read()
    except OSError as error:
        raise file_error(path, error) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            str(path),
            wanted="UTF-8 text",
            got=f"byte {error.start} that is not",
            fix="convert the file",
        ) from None
    except ValueError:
        raise ConfigError(
            repr(str(path)), wanted="a file name", got="a NUL in it", fix="correct the name"
        ) from None


def parse(text: str, *, where: str) -> ConfigDocument:
    """Parse a configuration without checking its fields.

    The upstream picker's file is converted to a tree of ours, to which a second document of the text
    may add settings.

    Raises:
        ConfigError: It is no mapping, has a duplicate key, or documents that do not fit together.
    """
    place = validation.Place(where)
    trees: list[dict[str, object]] = []
    for tree in yaml_documents.parse_documents(text, where=where) or [None]:
        yaml_documents.check_tree(tree, place)
        if not isinstance(tree, dict):
            raise ConfigError(
                where,
                wanted="a mapping with apiVersion and kind",
                got=validation.show(tree),
                fix=f"begin with 'apiVersion: {API_VERSION}'",
            )
        trees.append(tree)
    ours, theirs = trees[0], None
    if len(trees) > 1:
        ours, theirs = epp_config.split_documents(trees, place)
        _check_kind(where, ours)
    elif ours.get("kind") == epp_config.KIND:
        ours, theirs = {}, ours
    ours = _restore_off(ours)
    if theirs is None:
        return ConfigDocument(where, ours)
    epp = epp_config.from_endpoint_picker_config(theirs, place)
    return ConfigDocument(where, epp_config.merge_settings(epp, ours, place), epp=epp)


def _restore_off(tree: dict[str, object]) -> dict[str, object]:
    """Tree with `log.requests: off` as the word: YAML 1.1 and Helm take it for false."""
    log = tree.get("log")
    if isinstance(log, dict) and log.get("requests") is False:
        return {**tree, "log": {**log, "requests": "off"}}
    return tree


def settings(document: ConfigDocument, overrides: Sequence[FlagOverride] = ()) -> Settings:
    """Build settings from a document and the flags that override it.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type or is out of range, or
            fields contradict each other.
    """
    where = document.where
    _check_kind(where, document.tree)
    _refuse_references(document)
    validation.to_struct(document.tree, Settings, where=where)
    tree: Mapping[str, object] = document.tree
    for override in overrides:
        tree = _put(tree, override.path, override.value)
        # The file is in order, so what fails now is this flag.
        validation.to_struct(tree, Settings, where=override.flag)
    merged = validation.to_struct(tree, Settings, where=where)
    if document.epp is not None and not any(override.path == _STRATEGY for override in overrides):
        scheduling = msgspec.structs.replace(merged.scheduling, epp=document.epp.plugins)
        merged = msgspec.structs.replace(merged, scheduling=scheduling)
    flags = sorted({override.flag for override in overrides})
    listed = "--endpoints" if "--endpoints" in flags else str(validation.Place(where) / "pool")
    pools.parse_entries(merged.pool, where=listed)
    for at, pool in enumerate(merged.pools):
        pools.parse_entries(pool, where=str(validation.Place(where) / "pools" / at))
    check_compatible(merged, where=f"{where} with {', '.join(flags)}" if flags else where)
    return _resolve_paths(merged, document.folder)


def _resolve_paths(merged: Settings, folder: str) -> Settings:
    """Resolve plugin files relative to the directory of the configuration."""

    def resolve(rules: SchedulingSection) -> SchedulingSection:
        files = tuple(str(Path(folder, name)) for name in rules.plugin_files)
        return msgspec.structs.replace(rules, plugin_files=files)

    sections = tuple(
        msgspec.structs.replace(pool, scheduling=pool.scheduling and resolve(pool.scheduling))
        for pool in merged.pools
    )
    return msgspec.structs.replace(merged, scheduling=resolve(merged.scheduling), pools=sections)


def _check_kind(where: str, tree: Mapping[str, object]) -> None:
    for key, value in (("apiVersion", API_VERSION), ("kind", KIND)):
        if key not in tree:
            raise ConfigError(
                where,
                wanted=f"the key {key}",
                got="none",
                fix=f"begin with '{key}: {value}'",
            )


def _refuse_references(document: ConfigDocument) -> None:
    """Refuse the grammar of an EndpointPickerConfig in a file of ours."""
    pool_list = document.tree.get("pools")
    file = validation.Place(document.where)
    sections = [(file / "scheduling", document.tree.get("scheduling"))]
    for at, pool in enumerate(pool_list if isinstance(pool_list, list) else ()):
        if isinstance(pool, dict):
            sections.append((file / "pools" / at / "scheduling", pool.get("scheduling")))
    for place, section in sections:
        models = section.get("models") if isinstance(section, dict) else None
        rules: dict[object, object] = models if isinstance(models, dict) else {}
        for spot, written in (
            (place, section),
            *((place / "models" / str(model), rule) for model, rule in rules.items()),
        ):
            for key in ("plugins", "schedulingProfiles"):
                if isinstance(written, dict) and key in written:
                    raise ConfigError(
                        spot / key,
                        wanted="profile, with filters, scorers or cost, and picker",
                        got=f"{key}, which belongs to a file of kind {epp_config.KIND}",
                        fix="write profile: {filters: [{kind, params}], scorers: [{kind, weight, "
                        "params}], cost: {kind, params}, picker: {kind, params}}",
                    )


def check_compatible(merged: Settings, *, where: str) -> None:
    """Reject settings that are valid separately and contradict each other.

    Raises:
        ConfigError: Names the field that contradicts another one.
    """
    scrape, limits, place = merged.scrape, merged.limits, validation.Place(where)
    pools.check_compatible(merged, place)
    priorities = [band.priority for band in merged.flow_control.bands]
    validation.check_distinct(priorities, "priority", place / "flow_control" / "bands")
    if scrape.stale_after_s <= scrape.busy_interval_s:
        raise ConfigError(
            place / "scrape" / "stale_after_s",
            wanted=f"more than busy_interval_s ({scrape.busy_interval_s:g})",
            got=f"{scrape.stale_after_s:g}",
            fix="raise it, or every load counts as unknown before the next scrape",
        )
    if bool(scrape.tls.cert_file) != bool(scrape.tls.key_file):
        raise ConfigError(
            place / "scrape" / "tls",
            wanted="cert_file and key_file, or neither",
            got="one of them",
            fix="name both; one file may hold certificate and key",
        )
    least = body_buffer.SHARES * limits.max_body_bytes
    if limits.max_body_bytes > body_buffer.ALWAYS_TAKEN_BYTES and limits.max_assembly_bytes < least:
        raise ConfigError(
            place / "limits" / "max_assembly_bytes",
            wanted=f"at least {body_buffer.SHARES} times max_body_bytes ({least})",
            got=str(limits.max_assembly_bytes),
            fix="raise it or lower max_body_bytes, or the largest body is never let in",
        )
    if merged.server.cert_path and not merged.server.secure_serving:
        raise ConfigError(
            place / "server" / "cert_path",
            wanted="no certificate while secure_serving is false",
            got=merged.server.cert_path,
            fix="set secure_serving to true or remove cert_path",
        )
    server = merged.server
    if server.transport != "native" and (
        server.tls_min_version != "1.2" or server.tls_cipher_suites
    ):
        raise ConfigError(
            place / "server" / "transport",
            wanted="native with tls_min_version or tls_cipher_suites",
            got=server.transport,
            fix="set it to native; grpcio reads suites from the variable GRPC_SSL_CIPHER_SUITES",
        )
    keda = merged.autoscaling.keda
    if keda.enabled and keda.tls and not merged.server.secure_serving:
        raise ConfigError(
            place / "autoscaling" / "keda" / "tls",
            wanted="false while server.secure_serving is false, as KEDA gets its certificate",
            got="true",
            fix="set secure_serving to true, or tls to false",
        )


def _put(tree: Mapping[str, object], path: tuple[str, ...], value: object) -> dict[str, object]:
    """Copy a tree with a value replaced."""
    head, *rest = path
    if not rest:
        return {**tree, head: value}
    below = tree.get(head)
    inner = _put(below if isinstance(below, dict) else {}, tuple(rest), value)
    return {**tree, head: inner}


#: Errors that are shown (count); a file with more is another kind of file.
_MOST_ERRORS = 20

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

Read = TypeVar("Read")


def collect(
    document: ConfigDocument, read: Callable[[ConfigDocument], Read]
) -> tuple[Read | None, Sequence[ConfigError]]:
    """Read a configuration, and continue after errors as far as they can be separated.

    A wrong value is removed and the rest is read again. The removed value then has its default, so
    the other errors are the same as if it had been corrected.

    Returns:
        The result of `read` without the wrong values, None if the last error has no place in the
        file; and the errors, in the order they occurred.
    """
    errors: list[ConfigError] = []
    removed: list[validation.Path] = []
    while len(errors) < _MOST_ERRORS:
        try:
            return read(document), errors
        except ConfigError as error:
            path = _path_of(error, document)
            original = _original(path, removed)
            if path and original in removed:  # its default is as wrong as the value was
                return None, errors
            if not _is_consequence(error, original, removed):
                head = document.where
                spelled = f"{head}: {validation.format_path(original)}" if path else error.where
                error.where = spelled
                errors.append(error)
            tree = _without(document.tree, path) if path else None
            if tree is None:
                return None, errors
            removed.append(original)
            document = msgspec.structs.replace(document, tree=tree)
    return None, errors


def _path_of(error: ConfigError, document: ConfigDocument) -> validation.Path:
    """Return the path of an error in the tree of a file; empty if it is unknown.

    Places in an EndpointPickerConfig are none in the tree.
    """
    head = f"{document.where}: "
    if not error.where.startswith(head):
        return ()
    steps: list[validation.Step] = []
    for key, index in _STEP.findall(error.where.removeprefix(head).replace(": ", ".")):
        steps.append(int(index) if index else key)
    if document.epp is not None and _without(document.tree, tuple(steps)) is None:
        return ()
    return tuple(steps)


def _original(path: validation.Path, removed: Sequence[validation.Path]) -> validation.Path:
    """Return the path in the file as written: indexes count the removed list items as well."""
    steps: validation.Path = ()
    for step in path:
        if isinstance(step, int):
            gone = {place[-1] for place in removed if place[:-1] == steps}
            index = -1
            for _ in range(step + 1):
                index += 1
                while index in gone:
                    index += 1
            steps = (*steps, index)
        else:
            steps = (*steps, step)
    return steps


def _is_consequence(
    error: ConfigError, path: validation.Path, removed: Sequence[validation.Path]
) -> bool:
    """Return True if a key is missing only because its wrong value was removed."""
    return error.wanted.startswith("the key ") and any(
        place[:-1] == path and error.wanted.startswith(f"the key {place[-1]}") for place in removed
    )


def _without(tree: object, path: validation.Path) -> dict[str, object] | None:
    """Copy a tree without one value; None if the path has no value."""
    remaining = copy.deepcopy(tree)
    below: object = remaining
    *steps, last = path
    try:
        for step in steps:
            below = below[step]  # type: ignore[index]  # what it is not raises below
        del below[last]  # type: ignore[attr-defined]  # the same
    except (KeyError, IndexError, TypeError):
        return None
    return remaining if isinstance(remaining, dict) else None
