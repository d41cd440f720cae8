import sys
import textwrap

import pytest

from extproc.config import factory, loader, plugin_loader, pool_sections, profile_builder
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from extproc.request import HttpRequest
from extproc.scheduling import plugin_guard
from extproc.scheduling.plugin_guard import GuardedPlugin, GuardFactory, PluginCounters

CHAT = HttpRequest(
    {":path": "/v1/chat/completions", ":method": "POST", "content-type": "application/json"},
    b'{"model":"m","messages":[{"role":"user","content":"hello"}]}',
)
HEAD = """\
from __future__ import annotations
from functools import cached_property
from typing import ClassVar
import msgspec
from extproc.scheduling.framework import Signal
"""
SCORER = """
class Last(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: ClassVar[str] = "last"
    needs: ClassVar[frozenset[Signal]] = frozenset()
    power: float = 1.0

    def score(self, turn, candidates):
        last = max(c.endpoint.address for c in candidates)
        return [float(c.endpoint.address == last) ** self.power for c in candidates]
"""
HEAD_LINES = HEAD.count("\n")


@pytest.fixture
def write(tmp_path):
    """Writes a plugin file with the usual imports and returns its path."""

    def write(body, name="mine.py"):
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


def brought(path):
    return plugin_loader.from_file(path, where="extproc.yaml: scheduling.plugin_files[0]")


def scheduling(*paths, **more):
    return pool_sections.SchedulingSection(plugin_files=tuple(map(str, paths)), **more)


def refused(path):
    with pytest.raises(ConfigError) as raised:
        brought(path)
    return raised.value


def test_every_class_with_a_kind_and_a_method_is_a_plugin(write):
    """Classes a file only imports, and those without a kind, are not its plugins."""
    path = write(
        SCORER
        + """
from extproc.scheduling.load_scorers import InFlight

class Base(msgspec.Struct, frozen=True):
    def filter(self, turn, candidates):
        return candidates

class Both(Base, frozen=True):
    kind: ClassVar[str] = "both"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def pick(self, turn, candidates, totals, *, count):
        return [0]

class Worth(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "worth"
    needs: ClassVar[frozenset[Signal]] = frozenset()

    def cost(self, turn, candidates):
        return None
"""
    )
    plugins = brought(path)
    assert [cls.__name__ for cls in plugins.classes] == ["Last", "Both", "Worth"]
    tables = plugin_loader.combine([plugins])
    assert tables.scorers["last"].__name__ == "Last"
    assert tables.filters["both"] is tables.pickers["both"]
    assert "worth" in tables.costs
    assert "both" not in tables.scorers
    assert tables.scorers["in-flight"].__module__.startswith("extproc.")
    assert set(tables.external.values()) == {str(path)}


def test_no_files_are_the_built_in_tables():
    """Without plugins of others there are the kinds of the catalogue."""
    tables = plugin_loader.tables(pool_sections.SchedulingSection(), where="x")
    assert tables.external == {}
    assert "queue-depth" in tables.scorers


def test_a_file_is_read_anew_each_time(write):
    """A reload gets fresh classes of the changed file; those of before go on working."""
    path = write(SCORER)
    (first,) = brought(path).classes
    write(SCORER.replace("power: float = 1.0", "power: float = 2.0"))
    (second,) = brought(path).classes
    assert (first().power, second().power) == (1.0, 2.0)
    assert not list(path.parent.glob("__pycache__"))


COUNTING = """
from pathlib import Path
with Path(__file__).with_name("runs").open("a") as runs:
    runs.write("x")
"""


def test_a_file_runs_once_for_each_content(write):
    """Checking a configuration and routing by it share one run; a change makes another."""
    path = write(COUNTING + SCORER)
    (first,) = brought(path).classes
    settings = configured(path, PROFILE % 1)
    parts = factory.build(settings)
    profile_builder.resolve_all(settings, where="x", guards=parts.guards)
    assert brought(path).classes == (first,)
    assert path.with_name("runs").read_text() == "x"
    write(COUNTING + SCORER + "# changed")
    assert brought(path).classes != (first,)
    write(COUNTING + SCORER)
    brought(path)
    assert path.with_name("runs").read_text() == "xxx"


def test_a_failed_reload_keeps_the_previous_module(write):
    """When a changed file fails, what runs already keeps its module."""
    path = write(SCORER)
    (first,) = brought(path).classes
    write("1 / 0")
    refused(path)
    assert sys.modules[first.__module__].Last is first


@pytest.mark.parametrize(
    ("body", "line", "actual"),
    [
        ("x = 1\n1 / 0\n", 2, "ZeroDivisionError: division by zero"),
        ("def f():\n    return 1 / 0\nf()\n", 2, "ZeroDivisionError"),
        ("x = (\n", 1, "SyntaxError: '(' was never closed"),
        ("import sys\nsys.exit(3)\n", 2, "SystemExit: 3"),
        ("import no_such_module\n", 1, "ModuleNotFoundError"),
    ],
)
def test_a_file_that_raises(write, body, line, actual):
    """The error names the line of the file, what was raised and what to do."""
    path = write(body)
    error = refused(path)
    assert error.where == f"{path}:{HEAD_LINES + line}"
    assert error.wanted == "a Python file that can be imported"
    assert error.got.startswith(actual)
    assert "plugin_files" in error.fix


def test_a_missing_file_is_an_error(tmp_path):
    """The error stands where the file is named."""
    error = refused(tmp_path / "none.py")
    assert error.where == "extproc.yaml: scheduling.plugin_files[0]"
    assert "No such file" in error.got
    assert "relative to the configuration file" in error.fix


def test_a_file_without_plugins(write):
    """A file that adds nothing is a mistake."""
    path = write("x = 1\n")
    error = refused(path)
    assert (error.where, error.got) == (str(path), "none")


def test_a_class_without_a_kind_is_reported(write):
    """The error names the likely mistake: a class with a method and no kind."""
    path = write("class Last:\n    def score(self, turn, candidates): ...\n")
    error = refused(path)
    assert error.where == f"{path}:{HEAD_LINES + 1}"
    assert error.got == "Last with score and no kind"


NEEDS = "needs: ClassVar[frozenset[Signal]] = frozenset()"
STRUCT = "msgspec.Struct, frozen=True"


@pytest.mark.parametrize(
    ("bases", "lines", "wanted", "actual"),
    [
        ("", ["kind = 'a'", "needs = frozenset()"], "msgspec struct", "class Odd(object)"),
        (STRUCT, ["kind: str = 'a'", NEEDS], "a kind of Odd", "a field"),
        (STRUCT, ["kind: ClassVar[str] = 'My_Kind'", NEEDS], "a kind of Odd", "'My_Kind'"),
        (STRUCT, ["kind: ClassVar[str] = 'a'"], "signals Odd reads", "none"),
        (STRUCT, ["kind: ClassVar[str] = 'a'", "needs: ClassVar = ['x']"], "signals", "list"),
        (
            STRUCT,
            ["kind: ClassVar[str] = 'a'", NEEDS, "size: Sise = 1"],
            "annotations of Odd",
            "NameError: name 'Sise' is not defined",
        ),
    ],
)
def test_a_class_that_is_no_plugin(write, bases, lines, wanted, actual):
    """Each wrong class is refused with its line, what was wanted and what to write."""
    body = "\n    ".join([f"class Odd({bases}):", *lines, "def score(self, turn, c): ..."])
    path = write(f"\n{body}\n")
    error = refused(path)
    assert error.where == f"{path}:{HEAD_LINES + 2}"
    assert wanted in error.wanted
    assert error.got == actual
    assert error.fix


def test_a_built_in_kind_cannot_be_reused(write):
    """A file cannot take the place of a built-in."""
    path = write(SCORER.replace('"last"', '"queue-depth"'))
    with pytest.raises(ConfigError) as raised:
        plugin_loader.tables(scheduling(path), where="x")
    assert raised.value.where == f"{path}:{HEAD_LINES + 2}"
    assert raised.value.got == "queue-depth, a built-in"


def test_two_files_cannot_define_one_kind(write):
    """Two files cannot have one kind for one role; for two roles they can."""
    first, second = write(SCORER), write(SCORER, "other.py")
    with pytest.raises(ConfigError, match=r"got last, which Last of .*mine\.py has"):
        plugin_loader.tables(scheduling(first, second), where="x")
    second = write(SCORER.replace("def score", "def filter"), "other.py")
    plugin_loader.tables(scheduling(first, second), where="x")


def test_a_file_listed_twice_is_an_error(write):
    """Naming a file twice is a clash with itself."""
    path = write(SCORER)
    with pytest.raises(ConfigError, match="last"):
        plugin_loader.tables(scheduling(path, path), where="x")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installs a package with one module and an entry point."""

    def install(body, value):
        (tmp_path / "fleetwise.py").write_text(HEAD + body)
        about = tmp_path / "fleetwise-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fleetwise\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[extproc.plugins]\nwise = {value}\n")
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("fleetwise", None)


@pytest.mark.parametrize("value", ["fleetwise", "fleetwise:Last"])
def test_entry_points_provide_plugins(package, value):
    """An installed package names a module or a class."""
    package(SCORER, value)
    tables = plugin_loader.tables(pool_sections.SchedulingSection(), where="x")
    assert tables.external[tables.scorers["last"]] == "entry point wise of fleetwise"


@pytest.mark.parametrize(
    ("body", "value", "actual"),
    [
        ("1 / 0", "fleetwise", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(1)", "fleetwise", "SystemExit: 1"),
        ("x = 5", "fleetwise:x", "5"),
        ("x = 5", "fleetwise", "none"),
        ("x = 5", "fleetwise:y", "AttributeError: module 'fleetwise' has no attribute 'y'"),
    ],
)
def test_a_broken_entry_point_is_an_error(package, body, value, actual):
    """The error names the entry point and its package."""
    package(body, value)
    with pytest.raises(ConfigError) as raised:
        plugin_loader.tables(pool_sections.SchedulingSection(), where="x")
    assert raised.value.where == "entry point wise of fleetwise"
    assert raised.value.got == actual


def configured(path, tree):
    """Settings of a configuration file beside the plugin file."""
    file = path.parent / "extproc.yaml"
    file.write_text(f"apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\nscheduling: {tree}\n")
    return loader.settings(loader.read(file))


PROFILE = "{plugin_files: [mine.py], profile: {scorers: [{kind: last, params: {power: %s}}]}}"


def test_plugin_paths_are_relative_to_the_configuration(write):
    """The path is relative to the configuration file, and the plugin routes."""
    settings = configured(write(SCORER), PROFILE % 2)
    counts = PluginCounters()
    parts = factory.build(settings, guards=GuardFactory(lambda: 0.0, counts))
    parts.store.set_endpoints([Endpoint("10.0.0.1:80"), Endpoint("10.0.0.2:80")], 1.0)
    outcome = parts.director.route(CHAT, 2.0)
    assert isinstance(outcome, Decision)
    assert (outcome.endpoints[0].address, outcome.degraded) == ("10.0.0.2:80", "")
    parts.director.reserve(outcome, 2.0)
    assert not counts.exceptions
    ((guarded, _),) = parts.profile.scorers
    assert isinstance(guarded, GuardedPlugin)
    assert guarded.plugin.power == 2
    assert guarded.guards.limits.budget_s == 0.002


def test_a_changed_file_routes_after_a_reload(write):
    """A new profile has the new code, and counts go on where they were."""
    path = write(SCORER)
    settings = configured(path, PROFILE % 1)
    counts = PluginCounters()
    parts = factory.build(settings, guards=GuardFactory(lambda: 0.0, counts))
    parts.store.set_endpoints([Endpoint("10.0.0.1:80"), Endpoint("10.0.0.2:80")], 1.0)
    write(SCORER.replace("max(", "min("))
    assert parts.director.route(CHAT, 2.0).endpoints[0].address == "10.0.0.2:80"
    profiles = profile_builder.resolve_all(settings, where="x", guards=parts.guards)
    parts.director.reconfigure(factory.build_routing_config(settings, profiles))
    assert parts.director.route(CHAT, 3.0).endpoints[0].address == "10.0.0.1:80"
    write(SCORER.replace("return [", "return 1 / 0, ["))
    profiles = profile_builder.resolve_all(settings, where="x", guards=parts.guards)
    parts.director.reconfigure(factory.build_routing_config(settings, profiles))
    assert parts.director.route(CHAT, 4.0).degraded == "scorer last raised ZeroDivisionError"
    assert counts.exceptions == {("scorer", "last"): 1}


def test_a_checked_profile_has_unguarded_plugins(write):
    """`extproc check` sees the plugin itself with its parameters."""
    settings = configured(write(SCORER), PROFILE % 3)
    ((plugin, _),) = profile_builder.build_profile(settings, where="x").scorers
    assert plugin.power == 3


def test_built_in_plugins_are_never_guarded(write):
    """They cost nothing more for a guard they do not need."""
    tree = "{plugin_files: [mine.py], profile: {scorers: [{kind: in-flight}]}}"
    parts = factory.build(configured(write(SCORER), tree))
    assert not any(isinstance(plugin, GuardedPlugin) for plugin in parts.profile.plugins)


def test_the_time_budget_is_configurable(write):
    """Milliseconds in the file, seconds inside, the other limits as they are."""
    tables = plugin_loader.tables(
        scheduling(write(SCORER), plugin_budget_ms=5.0),
        where="x",
        guards=GuardFactory(lambda: 0.0, PluginCounters()),
    )
    assert tables.guards.limits == plugin_guard.GuardLimits(budget_s=0.005)


def test_parameters_are_as_strict_as_built_in_ones(write):
    """A wrong parameter of a plugin of others names its place."""
    with pytest.raises(ConfigError, match=r"params\.power: expected a number"):
        profile_builder.build_profile(configured(write(SCORER), PROFILE % "much"), where="x")


NEEDY = SCORER.replace(
    "    needs: ClassVar[frozenset[Signal]] = frozenset()\n",
    "    @property\n    def needs(self):\n        return ANSWER\n",
)


def test_needs_may_depend_on_parameters(write):
    """A property is as good as a class variable, and is held against what is provided."""
    answer = "frozenset({Signal.PREFIX} if self.power > 1 else ())"
    path = write(NEEDY.replace("ANSWER", answer))
    profile_builder.build_profile(configured(path, PROFILE % 1), where="x")
    tree = (PROFILE % 2) + "\nprefix: {capacity_blocks: 0}"
    with pytest.raises(ConfigError, match="no source of prefix, which last needs"):
        profile_builder.build_profile(configured(path, tree), where="x")


@pytest.mark.parametrize("answer", ["['prefix']", "None", "1 / 0"])
def test_invalid_needs_are_refused(write, answer):
    """A property that answers anything else is a configuration error."""
    path = write(NEEDY.replace("ANSWER", answer))
    with pytest.raises(ConfigError, match=r"profile\.scorers\[0\]\.params"):
        profile_builder.build_profile(configured(path, PROFILE % 1), where="x")


@pytest.mark.parametrize(
    ("answer", "actual"),
    [
        ("frozenset({'offload'})", "scrape.extra_metrics, got no offload there"),
        ("['offload']", "TypeError: its extra_metrics are no frozenset"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_extra_metrics_that_are_not_read_are_refused(write, answer, actual):
    """With a guard, as `serve` builds the profile, and without one, as `check` does."""
    path = write(
        SCORER + f"\n    @property\n    def extra_metrics(self):\n        return {answer}\n"
    )
    for guards in (None, GuardFactory(lambda: 0.0, PluginCounters())):
        with pytest.raises(ConfigError) as raised:
            profile_builder.resolve_all(configured(path, PROFILE % 1), where="x", guards=guards)
        assert actual in str(raised.value)


def test_an_exception_in_a_constructor_is_a_config_error(write):
    """Whatever a plugin raises while it is made is a configuration error."""
    body = SCORER + "\n    def __post_init__(self):\n        raise KeyError('power')\n"
    with pytest.raises(ConfigError) as raised:
        profile_builder.build_profile(configured(write(body), PROFILE % 1), where="x")
    assert raised.value.where == "x: scheduling.profile.scorers[0].params"
    assert raised.value.got == "KeyError: 'power'"
