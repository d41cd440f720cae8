"""The flags of `serve` and `check`: parsed words to settings.

Each flag exists with one dash and with two, as Go programs take them. Ours are in `flag_table`, the
upstream picker's others with them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from extproc.cli import flag_table, flag_values, label_selector
from extproc.config import loader, pools, profile_builder
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.scheduling.disaggregation import DisaggregatedStages
from extproc.scheduling.profile import SchedulerProfile


class Resolved(msgspec.Struct, frozen=True):
    """Settings and files that a command line resolves to.

    Attributes:
        profile: The scheduling profile they name; its plugins have all the signals they need.
        stages: Stages of requests that other endpoints may do; None for none.
        where: The file, or the defaults, for later errors.
        warnings: A line for each flag that has no effect, or another than requested.
    """

    settings: Settings
    profile: SchedulerProfile
    stages: DisaggregatedStages | None
    where: str
    warnings: tuple[str, ...]


#: Flags that are read here by name, because they are more than one setting.
_SOURCES = ("config-file", "config-text", "endpoints", "endpoints-file")


#: Flags of the upstream EPP for Kubernetes discovery: name to placeholder and help text.
_KUBERNETES_FLAGS: Mapping[str, tuple[str, str]] = {
    "pool-name": ("NAME", "InferencePool to follow; with endpoints of your own only a label"),
    "pool-namespace": ("NAME", "namespace of the pool; $NAMESPACE or the pod's own if unset"),
    "pool-group": ("GROUP", "API group of the InferencePool"),
    "endpoint-selector": ("a=b,c=d", "labels of pods to follow without an InferencePool"),
    "endpoint-target-ports": ("PORT,...", "ports of these pods, each an endpoint"),
}


def add(parser: argparse.ArgumentParser) -> None:
    """Add every flag to a parser; values stay text until `resolve`."""
    parser.set_defaults(unknown_flags=[])
    source = parser.add_argument_group("what to serve")
    _add(source, "config-file", metavar="FILE", help="YAML or JSON configuration")
    _add(source, "config-text", metavar="YAML", help="the configuration itself, as text")
    _add(
        source,
        "endpoints",
        action="append",
        metavar="IP:PORT,...",
        help="endpoints; repeatable and separated by commas",
    )
    _add(source, "endpoints-file", metavar="FILE", help="file with endpoints; watched")
    cluster = parser.add_argument_group("what to follow in Kubernetes")
    for name, (metavar, text) in _KUBERNETES_FLAGS.items():
        _add(cluster, name, metavar=metavar, help=text)
    ours = parser.add_argument_group("settings that beat the file")
    for flag in flag_table.FLAGS:
        _add(ours, flag.name, boolean=flag.boolean, metavar=flag.metavar, help=_help(flag))
    theirs = parser.add_argument_group("flags of the upstream picker")
    hidden = [
        _add(theirs, other.name, boolean=other.boolean, metavar="VALUE", help=argparse.SUPPRESS)
        for other in flag_table.COMPATIBLE_FLAGS
    ]
    texts = [other.message for other in flag_table.COMPATIBLE_FLAGS]
    parser.set_defaults(valued_log_flags=())
    for name in flag_table.VALUED_LOG_FLAGS:
        spellings = dict.fromkeys((name, name.replace("-", "_")))
        names = [dashes + spelling for spelling in spellings for dashes in ("--", "-")]
        parser.add_argument(
            *names, dest="valued_log_flags", action=_RecordLogFlag, help=argparse.SUPPRESS
        )

    class HelpAll(argparse.Action):
        """Prints the help with the flags that are usually left out."""

        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            """Print it and leave."""
            theirs.description = "Taken so that a Deployment need not be edited."
            for action, text in zip(hidden, texts, strict=True):
                action.help = text.replace("%", "%%")
            parser.print_help()
            parser.exit()

    parser.add_argument(
        "--help-all", action=HelpAll, nargs=0, help="also show the flags of the upstream picker"
    )


class _RecordLogFlag(argparse.Action):
    """Records the name of a log flag, whose value is not used."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        _values: object,
        option_string: str | None = None,
    ) -> None:
        """Append the name, as it is written."""
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), option_string))


def _help(flag: flag_table.Flag) -> str:
    """The text of a flag with the values it takes and its default."""
    choices = flag_table.choices(flag)
    text = f"{flag.text}: {', '.join(choices)}" if choices else flag.text
    default = flag_table.default(flag)
    return (f"{text} (default: {default})" if default else text).replace("%", "%%")


def resolve(
    args: argparse.Namespace,
    document: loader.ConfigDocument | None = None,
    *,
    again: bool = False,
) -> Resolved:
    """Settings from parsed flags.

    Args:
        args: Parsed flags of a parser that `add` prepared, with unknown words in `unknown_flags`.
        document: The configuration; None reads the one that the flags name.
        again: Whether its file was read before, as of `loader.read_text`.

    Raises:
        ConfigError: A flag or a file is wrong, or asks for what does not exist.
    """
    warnings = list(flag_table.compatibility_warnings(args))
    warnings += find_log_flags(args)
    document = document or read_document(args, again=again)
    warnings += document.warnings
    in_cluster = _kubernetes_overrides(args, document.tree)
    overrides = [*_endpoints(args), *in_cluster, *_settings(args)]
    merged = loader.settings(document, overrides)
    warnings += _warn_unused_kubernetes_flags(args, followed=pools.from_kubernetes(merged))
    profiles = profile_builder.resolve_all(
        merged, where="--strategy" if args.strategy else document.where
    )
    profile_builder.check_pools(merged, where=document.where)
    warnings += _clamp_refresh(args)
    return Resolved(merged, profiles.profile, profiles.stages, document.where, tuple(warnings))


def find_log_flags(args: argparse.Namespace) -> list[str]:
    """Find log flags, also among unknown words; returns a warning for each.

    Raises:
        ConfigError: A word is no log flag.
    """
    return [
        *map(flag_table.log_flag_warning, args.valued_log_flags),
        *flag_table.unknown_flag_warnings(args.unknown_flags, known=known_flags()),
    ]


def known_flags() -> tuple[str, ...]:
    """Every flag there is, without dashes."""
    return (
        *_SOURCES,
        *_KUBERNETES_FLAGS,
        *(flag.name for flag in flag_table.FLAGS),
        *(flag.name for flag in flag_table.COMPATIBLE_FLAGS),
    )


def flag_text(args: argparse.Namespace, name: str) -> str | None:
    """The text of a flag; None when it was not given."""
    text: str | None = getattr(args, name.replace("-", "_"))
    return text


def _add(
    group: argparse._ArgumentGroup, name: str, *, boolean: bool = False, **more: str
) -> argparse.Action:
    dest = name.replace("-", "_")
    bare = {"nargs": "?", "const": "true"} if boolean else {}
    action = group.add_argument(f"--{name}", dest=dest, **bare, **more)  # type: ignore[arg-type]  # keywords come from the table
    more["help"] = argparse.SUPPRESS
    group.add_argument(f"-{name}", dest=dest, default=argparse.SUPPRESS, **bare, **more)  # type: ignore[arg-type]  # the same
    return action


def read_document(args: argparse.Namespace, *, again: bool = False) -> loader.ConfigDocument:
    """The configuration that flags name, as it was written.

    Args:
        again: As of `loader.read_text`.

    Raises:
        ConfigError: It cannot be read, or two are named.
    """
    file, text = args.config_file, args.config_text
    if file and text:
        raise ConfigError(
            "--config-text",
            wanted="--config-file or --config-text",
            got="both",
            fix="put everything into one of them",
        )
    if file:
        return loader.read(Path(file), again=again)
    return loader.parse(text, where="--config-text") if text else loader.EMPTY


def _endpoints(args: argparse.Namespace) -> Iterator[loader.FlagOverride]:
    """A list on the command line beats list and file of the configuration, and so does a file."""
    words, file = args.endpoints or [], args.endpoints_file
    if words and file:
        raise ConfigError(
            "--endpoints-file",
            wanted="--endpoints or --endpoints-file",
            got="both",
            fix="keep one; the file is watched, the list is not",
        )
    if words:
        listed = [word for text in words for word in flag_values.listed("--endpoints", text)]
        yield loader.FlagOverride(("pool", "endpoints_file"), "", "--endpoints")
        yield loader.FlagOverride(("pool", "endpoints"), listed, "--endpoints")
    elif file:
        yield loader.FlagOverride(("pool", "endpoints"), [], "--endpoints-file")
        yield loader.FlagOverride(("pool", "endpoints_file"), file, "--endpoints-file")


def _settings(args: argparse.Namespace) -> Iterator[loader.FlagOverride]:
    for flag in flag_table.FLAGS:
        text = flag_text(args, flag.name)
        value = None if text is None else flag.reader(f"--{flag.name}", text)
        if value is not None:
            yield loader.FlagOverride(flag.path, value, f"--{flag.name}")
    if args.strategy is not None:
        # A word on the command line also beats a profile written out in the file.
        yield loader.FlagOverride(("scheduling", "profile"), None, "--strategy")


def _clamp_refresh(args: argparse.Namespace) -> Iterator[str]:
    text = flag_text(args, "refresh-metrics-interval")
    if text is not None:
        refresh_s = flag_values.seconds("--refresh-metrics-interval", text)
        if refresh_s < flag_table.SHORTEST_REFRESH_S:
            yield f"--refresh-metrics-interval: {text} is too short; 50ms is used"


def _kubernetes_overrides(
    args: argparse.Namespace, tree: Mapping[str, object]
) -> Iterator[loader.FlagOverride]:
    """Overrides of settings from the flags of Kubernetes discovery."""
    name, selector = args.pool_name, args.endpoint_selector
    if name:
        yield loader.FlagOverride(("pool", "name"), name, "--pool-name")
    pool = tree.get("pool")
    written = dict(pool) if isinstance(pool, dict) else {}
    listed = bool(args.endpoints or args.endpoints_file)
    elsewhere = listed or any(written.get(key) for key in ("endpoints", "endpoints_file"))
    if selector and (listed or elsewhere):
        raise ConfigError(
            "--endpoint-selector",
            wanted="one source of endpoints",
            got="endpoints listed besides",
            fix="remove one of them",
        )
    if elsewhere or tree.get("pools"):
        return
    before = written.get("kubernetes")
    section = _kubernetes_section(args, before if isinstance(before, dict) else {})
    if section:
        if section != before:
            flag = "--endpoint-selector" if selector else "--pool-name"
            yield loader.FlagOverride(("pool", "kubernetes"), section, flag)
    elif args.pool_namespace and _discovers_every_pool(tree):
        yield loader.FlagOverride(("cluster", "namespace"), args.pool_namespace, "--pool-namespace")


#: Keys of `pool.kubernetes` that name engines without an InferencePool.
_POD_SOURCES = ("selector", "selector_expressions", "service")


def _kubernetes_section(
    args: argparse.Namespace, before: Mapping[str, object]
) -> dict[str, object]:
    """Section `pool.kubernetes` with the flags applied; empty where no object is named."""
    section = dict(before)
    if args.endpoint_selector:
        section.pop("inference_pool", None)
        section.pop("service", None)
        section["selector"], section["selector_expressions"] = label_selector.read_selector(
            "--endpoint-selector", args.endpoint_selector
        )
    elif args.pool_name and not any(section.get(key) for key in _POD_SOURCES):
        section["inference_pool"] = args.pool_name
    if not any(section.get(key) for key in ("inference_pool", *_POD_SOURCES)):
        return {}
    if args.endpoint_target_ports and args.endpoint_target_ports != "[]":
        section["ports"] = _parse_ports(args.endpoint_target_ports)
    if args.pool_namespace:
        section["namespace"] = args.pool_namespace
    if args.pool_group and section.get("inference_pool"):
        section["group"] = args.pool_group
    return section


def _warn_unused_kubernetes_flags(args: argparse.Namespace, *, followed: bool) -> Iterator[str]:
    """A warning for each flag of Kubernetes discovery that changes nothing."""
    if followed:
        return
    for name in list(_KUBERNETES_FLAGS)[1:]:
        value = flag_text(args, name)
        if value and value != "[]":
            yield f"--{name} has no effect: no endpoints come from Kubernetes"


def _parse_ports(text: str) -> list[int]:
    """`8000,8001` to numbers; the brackets of a Go list are taken too."""
    words = flag_values.listed("--endpoint-target-ports", text.strip("[]").replace(" ", ","))
    return [flag_values.whole_number("--endpoint-target-ports", word) for word in words]


def _discovers_every_pool(tree: Mapping[str, object]) -> bool:
    cluster = tree.get("cluster")
    return isinstance(cluster, dict) and cluster.get("discover_pools") == "namespace"
