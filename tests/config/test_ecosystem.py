"""The upstream picker's file, and our own file in the same grammar."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.config import advice, factory, load, profiles
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from extproc.request import RawRequest

SAMPLES = sorted((Path(__file__).parent.parent / "data" / "epp").glob("*.yaml"))
CHAT = RawRequest(
    {":method": "POST", ":path": "/v1/chat/completions"},
    b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}',
)
THEIRS = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
OURS = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"
PROFILE = """
plugins:
- {type: queue-scorer, name: queue}
- {type: least-request, parameters: {choices: 3}}
schedulingProfiles:
- name: mine
  plugins: [{pluginRef: queue, weight: 0.5}, {pluginRef: least-request}]
"""


def read(text):
    document = load.parse(text, where="file.yaml")
    return load.settings(document), document.warnings


def resolved(text):
    settings, _ = read(text)
    return profiles.resolve(settings, where="file.yaml")


def indented(text):
    return "\n".join(f"  {line}" for line in text.strip().splitlines())


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_published_configurations_load_and_route(path):
    """Every sample loads as it stands, routes over three endpoints, and is never degraded."""
    parts = factory.build(load.settings(load.read(path)), where=str(path))
    labels = {"llm-d.ai/role": "decode", "zone": "a"}
    parts.fleet.replace([Endpoint(f"10.0.0.{i}:8000", labels=labels) for i in range(3)], 0.0)
    outcome = parts.dispatcher.route(CHAT, 1.0)
    assert isinstance(outcome, Decision)
    assert outcome.degraded == ""
    parts.dispatcher.complete(parts.dispatcher.commit(outcome, 1.0), 2.0)


def test_there_are_samples():
    """The list above is not empty by mistake."""
    assert len(SAMPLES) == 9


def test_both_files_have_one_grammar():
    """The same plugins and profiles mean the same in their file and in ours."""
    theirs, _ = read(THEIRS + PROFILE)
    ours, _ = read(OURS + "scheduling:\n" + indented(PROFILE))
    made = [profiles.resolve(settings, where="x") for settings in (theirs, ours)]
    assert made[0] == made[1]
    assert made[0].name == "mine"
    assert [(scorer.kind, weight) for scorer, weight in made[0].scorers] == [("queue-scorer", 0.5)]
    assert made[0].picker.choices == 3


def test_the_old_group_is_read_with_a_warning():
    """Both API groups are accepted; the old one says what to write."""
    text = THEIRS.replace("llm-d.ai", "inference.networking.x-k8s.io")
    settings, warnings = read(text)
    assert settings.scheduling.strategy == "weighted"
    assert warnings == (
        "apiVersion inference.networking.x-k8s.io/v1alpha1 is deprecated: write llm-d.ai/v1alpha1",
    )


def test_what_is_not_acted_on_is_told():
    """Flow control is read and warned about; so are plugins that nobody here does the work of."""
    settings, warnings = read(
        THEIRS + "flowControl: {maxRequests: 5}\nplugins: [{type: always-disagg-pd-decider}]\n"
    )
    assert any("flowControl is not acted on" in warning for warning in warnings)
    assert any("always-disagg-pd-decider" in told for told in advice.advice(settings))


def test_an_old_plugin_name_is_mapped_with_a_warning():
    """A deprecated type routes as its successor and says what to write instead."""
    settings, _ = read(
        THEIRS + "plugins: [{type: precise-prefix-cache-scorer}, {type: max-score-picker}]\n"
    )
    made = profiles.resolve(settings, where="x")
    assert [scorer.kind for scorer, _ in made.scorers] == ["prefix-cache-scorer"]
    assert any("prefix-cache-scorer" in told for told in advice.advice(settings))


@pytest.mark.parametrize(
    ("text", "spot", "fix"),
    [
        ("plugins: [{type: queue-scorrer}]", "plugins[0].type", "did you mean queue-scorer?"),
        (
            "plugins: [{type: load-aware-scorer, parameters: {treshold: 1}}]",
            "plugins[0].parameters.treshold",
            "did you mean threshold?",
        ),
        (
            "plugins: [{type: random-picker}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: x}]}]",
            "schedulingProfiles[0].plugins[0].pluginRef",
            "extproc check --plugins",
        ),
        ("plugins: [{type: queue-scorer}, {type: queue-scorer}]", "plugins[1].name", "another"),
        (
            "plugins: [{type: random-picker}, {type: max-score-picker}]",
            "schedulingProfiles[0]",
            "keep one",
        ),
        (
            "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a}, {name: b}]",
            "schedulingProfiles",
            "keep the profile",
        ),
        ("plugin: []", "plugin", "did you mean plugins?"),
    ],
)
def test_mistakes_are_named(text, spot, fix):
    """Unknown types, parameters, references and keys name the place and the nearest known one."""
    with pytest.raises(ConfigError) as raised:
        resolved(THEIRS + text + "\n")
    assert raised.value.where == f"file.yaml: {spot}"
    assert fix in raised.value.fix


def test_models_may_have_rules_of_their_own():
    """A model with a strategy of its own is routed by it, all others by the common one."""
    settings, _ = read(
        OURS + "scheduling: {strategy: random, models: {m: {strategy: round-robin}}}\n"
    )
    parts = factory.build(settings)
    parts.fleet.replace([Endpoint("10.0.0.1:8000")], 0.0)
    other = RawRequest(CHAT.headers, CHAT.body.replace(b'"m"', b'"n"'))
    assert parts.dispatcher.route(CHAT, 1.0).profile == "round-robin/m"
    assert parts.dispatcher.route(CHAT, 1.0).picker == "round-robin"
    assert parts.dispatcher.route(other, 1.0).profile == "random"
