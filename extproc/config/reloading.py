"""Fields that take effect on reload; all others need a restart.

`LIVE` is the single source: reloads, the log, `extproc check --diff` and the documentation derive
from it. A field that is not live keeps its value from the start of the process, also in parts that
are built later, such as pools discovered in Kubernetes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import msgspec

from extproc.config import loader, pool_sections, pools, profile_builder, validation
from extproc.config.settings import Settings
from extproc.errors import ConfigError

#: Fields in force from the next request on, with everything below them, by section of `Settings`
#: (empty: fields at the top). All others need a restart.
LIVE: Final[Mapping[str, tuple[str, ...]]] = {
    "": ("parse_bodies", "conformance"),
    "server": ("admin_token_file",),
    "pool": ("objectives", "rewrites"),
    "pools": ("match", "scheduling", "objectives", "rewrites"),
    "cluster": ("match_rules",),
    "scrape": ("stale_after_s",),
    "health": (
        "failures",
        "failure_share",
        "window_s",
        "base_s",
        "cap_s",
        "max_ejection_share",
        "stall_timeout_s",
        "slow_start_s",
        "slow_start_floor",
    ),
    "scheduling": (
        "strategy",
        "goal",
        "profile",
        "epp",
        "models",
        "shadow",
        "disaggregation",
        "kv_cache_source",
        "saturation",
        "fallbacks",
        "respect_subset",
        "unknown_model",
        "kubeai_names",
        "plugin_files",
        "plugin_budget_ms",
        "allow_unsupported",
    ),
    "limits": ("max_body_bytes", "max_streams", "body_idle_s"),
    "flow_control": (
        "timeout_s",
        "empty_timeout_s",
        "max_timeout_s",
        "by_objective",
        "timeout_header",
        "busy_s",
        "max_requests",
        "max_bytes",
        "order",
        "fairness",
        "bands",
        "default_band",
        "default_negative_band",
        "half_life_s",
        "usage_limit",
        "tenant_header",
        "fallback_tenant_headers",
        "by_adapter",
        "limit",
        "limits",
    ),
    "responses": (
        "marker",
        "feedback",
        "stream_sample_ratio",
        "restore_model",
        "request_cost",
        "request_id",
        "list_models",
    ),
    "decisions": ("decisions", "header", "metadata", "scores"),
    "log": ("level", "requests"),
}

#: Fields whose values may hold a password.
_SECRET = frozenset({"peer_sync.url"})

#: Parts of paths whose values may hold a command line, which may hold a password.
_COMMANDS = frozenset({"autoscaling", "launch", "exec", "command"})

_HIDDEN = "(not shown)"


class Change(msgspec.Struct, frozen=True):
    """A difference between two configurations.

    Attributes:
        path: Path as spelled in a file; pools by their names.
        before: The old value as text.
        after: The new value as text.
        is_live: True if a reload puts it in force.
    """

    path: str
    before: str
    after: str
    is_live: bool


def apply_live_fields(running: Settings, wanted: Settings) -> Settings:
    """Return the settings in force after a running process reads another configuration.

    Args:
        running: The settings in force before.

    Returns:
        `running` with the live fields of `wanted`. Of several pools, those in both change; pools
        are neither added nor removed.
    """
    values: dict[str, Any] = {}
    for section, live in _find_live_fields(running, wanted).items():
        if not section:
            values |= {name: getattr(wanted, name) for name in live}
        elif section == "pools":
            by_name = {pool.name: pool for pool in wanted.pools}
            values["pools"] = tuple(
                _merge_section(pool, by_name.get(pool.name, pool), live) for pool in running.pools
            )
        else:
            old, new = getattr(running, section), getattr(wanted, section)
            values[section] = _merge_section(old, new, live)
    return msgspec.structs.replace(running, **values)


def _find_live_fields(before: Settings, after: Settings) -> Mapping[str, tuple[str, ...]]:
    """`LIVE` without sections whose fields `pool` and `pools` exchange.

    Where only one configuration has `pools`, what a running pool needs may stand in the other
    section, and would be missing until the restart.
    """
    if bool(before.pools) == bool(after.pools):
        return LIVE
    moved = {"pool"}
    if any(pool.scheduling is not None for pool in (*before.pools, *after.pools)):
        moved.add("scheduling")
    return {section: () if section in moved else live for section, live in LIVE.items()}


def find_changes(before: Settings, after: Settings) -> Iterator[Change]:
    """Yield every field that differs, in the order of `Settings`, to the depth that both share."""
    live = _find_live_fields(before, after)
    for field in msgspec.structs.fields(Settings):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name == "pools":
            yield from _pools(old, new)
        elif isinstance(old, msgspec.Struct):
            yield from _section((field.name,), live.get(field.name, ()), old, new)
        else:
            yield from _leaves((field.encode_name,), old, new, field.name in live[""])


def find_changes_from_defaults(settings: Settings) -> Iterator[Change]:
    """Yield every field that is not as it would be without a file and flags."""
    bare = tuple(pool_sections.PoolSection(name=pool.name) for pool in settings.pools)
    return find_changes(Settings(pools=bare), settings)


def find_public_changes_from_defaults(settings: Settings) -> Iterator[Change]:
    """Yield the same without passwords and command lines."""
    for change in find_changes_from_defaults(settings):
        if _COMMANDS.isdisjoint(change.path.split(".")):
            yield change
        else:
            yield msgspec.structs.replace(change, after=_HIDDEN)


def find_edited_plugins(settings: Settings, edited: Collection[str]) -> Iterator[Change]:
    """Yield a change for each plugin file among the edited files."""
    for path, rules in pools.scheduling_sections(settings):
        for name in rules.plugin_files:
            if name in edited:
                yield Change(f"{path}.plugin_files", name, f"{name}, edited", is_live=True)


def find_restart_fields(running: Settings, wanted: Settings) -> tuple[str, ...]:
    """Return the paths of fields that differ and take effect only after a restart."""
    return tuple(change.path for change in find_changes(running, wanted) if not change.is_live)


def _merge_section(old: Any, new: Any, live: tuple[str, ...]) -> Any:
    return msgspec.structs.replace(old, **{name: getattr(new, name) for name in live})


def _section(path: validation.Path, live: tuple[str, ...], old: Any, new: Any) -> Iterator[Change]:
    for field in msgspec.structs.fields(type(old)):
        old_value, new_value = getattr(old, field.name), getattr(new, field.name)
        key = field.encode_name.removeprefix("_")
        yield from _leaves((*path, key), old_value, new_value, field.name in live)


def _pools(
    before: tuple[pool_sections.PoolSection, ...],
    after: tuple[pool_sections.PoolSection, ...],
) -> Iterator[Change]:
    old, new = ({pool.name: pool for pool in section} for section in (before, after))
    if list(old) != list(new):
        yield Change("pools", ", ".join(old) or "none", ", ".join(new) or "none", is_live=False)
    for name in old:
        if name in new:
            yield from _section((f"pools[{name}]",), LIVE["pools"], old[name], new[name])


def _leaves(path: validation.Path, old: Any, new: Any, is_live: bool) -> Iterator[Change]:  # noqa: FBT001
    if old == new:
        return
    if isinstance(old, msgspec.Struct) and type(old) is type(new):
        for field in msgspec.structs.fields(type(old)):
            old_value, new_value = getattr(old, field.name), getattr(new, field.name)
            yield from _leaves((*path, field.encode_name), old_value, new_value, is_live)
    elif isinstance(old, Mapping) and isinstance(new, Mapping) and old and new:
        for key in dict.fromkeys((*old, *new)):
            old_value, new_value = old.get(key, msgspec.UNSET), new.get(key, msgspec.UNSET)
            yield from _leaves((*path, str(key)), old_value, new_value, is_live)
    else:
        spelled = validation.format_path(path)
        hidden = spelled in _SECRET
        before, after = (_HIDDEN if hidden and value else _text(value) for value in (old, new))
        yield Change(spelled, before, after, is_live)


def _text(value: object) -> str:
    if value is msgspec.UNSET:
        return "none"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


_LIVE, _RESTART = "live", "needs a restart"


class Comparison(msgspec.Struct, frozen=True):
    """Effect of a reload from one configuration to another.

    Attributes:
        file: The file of the configuration that runs.
        changes: Every field that differs.
        refusal: Why reading the other one would be refused; empty if it would not be.
    """

    file: str
    changes: tuple[Change, ...]
    refusal: str

    def to_lines(self) -> Iterator[str]:
        """The comparison for people."""
        if not self.changes:
            yield f"nothing differs from {self.file}"
            return
        longest = max(len(change.path) for change in self.changes)
        yield f"compared with {self.file}, as if that was running"
        for change in self.changes:
            effect = _LIVE if change.is_live else _RESTART
            yield (
                f"  {effect:<{len(_RESTART)}}  {change.path:<{longest}}  "
                f"{change.before} -> {change.after}"
            )
        num_live = sum(change.is_live for change in self.changes)
        num_restart = len(self.changes) - num_live
        yield (
            f"{_fields(num_live)} in force once the file is read again, "
            f"{_fields(num_restart)} after a restart"
        )
        if self.refusal:
            yield f"refused until the restart, if it is read again: {self.refusal}"


def compare(running: Settings, wanted: Settings, *, where: str) -> Comparison:
    """Compare two configurations.

    Args:
        where: The file of `running`, for people.
    """
    return Comparison(where, tuple(find_changes(running, wanted)), refusal(running, wanted))


def refusal(running: Settings, wanted: Settings) -> str:
    """Reason for which a reload would be rejected; empty if it would succeed.

    What is new and live may lean on what needs a restart.
    """
    merged = apply_live_fields(running, wanted)
    where = "the live fields with what is running"
    try:
        loader.check_compatible(merged, where=where)
        profile_builder.check_pools(merged, where=where)
        if pools.uses_top_scheduling(merged):
            profile_builder.build_profile(merged, where=where)
    except ConfigError as error:
        return str(error)
    return ""


def _fields(count: int) -> str:
    return f"{count} field" if count == 1 else f"{count} fields"
