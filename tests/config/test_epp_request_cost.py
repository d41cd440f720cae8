"""The cost of requests, as an EndpointPickerConfig describes it."""

from __future__ import annotations

import json

import pytest

from extproc.config import lint, loader
from extproc.errors import ConfigError

KEY = {"name": "x-gateway-inference-request-cost"}
PROMPT, COMPLETION = "usage.prompt_tokens", "usage.completion_tokens"
CACHED = "usage.prompt_tokens_details.cached_tokens"
GUARDED = f"(has({PROMPT}) ? {PROMPT} : 0) + (has({COMPLETION}) ? {COMPLETION} : 0)"


def read(*attributes: object):
    """Settings of a file with a reporter for each list of attributes."""
    plugins = [
        {"type": "request-attribute-reporter", "name": f"r{at}", "parameters": {"attributes": some}}
        for at, some in enumerate(attributes)
    ]
    tree = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": plugins}
    return loader.settings(loader.parse(json.dumps(tree), where="x"))


def attribute(expression: str, **more: object) -> dict[str, object]:
    return {"key": KEY, "expression": expression, **more}


@pytest.mark.parametrize(
    ("expression", "weights"),
    [
        (PROMPT, {"prompt": 1}),
        (f"{PROMPT} + {COMPLETION}\n", {"prompt": 1, "completion": 1}),
        (GUARDED, {"prompt": 1, "completion": 1}),
        ("usage.total_tokens", {"prompt": 1, "completion": 1}),
        (f"has({PROMPT}) && has({COMPLETION}) ? {PROMPT} : 0", {"prompt": 1}),
        (f"{PROMPT} * 0.5 + 4 * {COMPLETION}", {"prompt": 0.5, "completion": 4}),
        (f"int(double({PROMPT}) / 4.0)", {"prompt": 0.25}),
        (f"2.0 * ({PROMPT} - {CACHED})", {"prompt": 2, "cached": -2}),
        (
            f"{PROMPT} - (has(usage.prompt_tokens_details) ? {CACHED} : 0) * 1.0",
            {"prompt": 1, "cached": -1},
        ),
        (f"-{CACHED} + {PROMPT} + 0", {"prompt": 1, "cached": -1}),
    ],
)
def test_sums_of_tokens_are_weights(expression, weights):
    """Guards have no effect, as tokens that are not reported count as 0; streams are read too."""
    settings = read([attribute(expression)])
    assert settings.responses.request_cost == weights
    assert settings.responses.stream_sample_ratio == 1.0
    assert not [warning for warning in lint.find_warnings(settings) if "r0" in warning]


@pytest.mark.parametrize(
    "expression",
    [
        f"{PROMPT} + 1",
        f"{PROMPT} * {COMPLETION}",
        f"{PROMPT} > 5 ? {PROMPT} : 0",
        f"has({PROMPT}) ? {PROMPT} : 1",
        f"has(usage.prompt_tokens_details) ? {PROMPT} : 0",
        f"has({PROMPT}) ? {PROMPT}",
        f"has({PROMPT})",
        f"{PROMPT} +",
        f"{PROMPT} {PROMPT}",
        f"1 / 2 * {PROMPT}",
        f"{PROMPT} / 0",
        f"{PROMPT} * 1e999",
        f"{PROMPT} % 5",
        "usage.reasoning_tokens",
        "math.greatest(usage.prompt_tokens, 1)",
        'usage["prompt_tokens"]',
        "5",
        f"0 * {PROMPT}",
        "(" * 400 + PROMPT + ")" * 400,
        "-" * 900 + PROMPT,
        f"{PROMPT} + " * 100 + PROMPT,
    ],
)
def test_other_expressions_are_refused(expression):
    """A limit of the gateway would get no number, or another one."""
    with pytest.raises(ConfigError) as refused:
        read([attribute(expression)])
    assert refused.value.where.endswith("plugins[0].parameters.attributes[0].expression")
    assert "constant factors" in refused.value.wanted


@pytest.mark.parametrize(
    ("condition", "is_known"),
    [
        (f"has({PROMPT}) && has({COMPLETION})", True),
        ("", True),
        (f"{COMPLETION} > 0", False),
        (f"has({PROMPT}) || has({COMPLETION})", False),
        (f"has({CACHED})", False),
        ("has(", False),
        (f"has({PROMPT}) && ", False),
    ],
)
def test_a_condition_may_want_tokens_that_are_always_there(condition, is_known):
    """Others could leave out a cost that is written here."""
    attributes = [attribute(PROMPT, condition=condition)]
    if is_known:
        assert read(attributes).responses.request_cost == {"prompt": 1}
    else:
        with pytest.raises(ConfigError, match="condition"):
            read(attributes)


@pytest.mark.parametrize(
    ("attributes", "spot"),
    [
        ([[attribute(PROMPT, key={"name": "cost"})]], "attributes[0].key"),
        ([[attribute(PROMPT, key={**KEY, "namespace": "io.x"})]], "attributes[0].key"),
        ([[attribute(PROMPT), attribute(COMPLETION)]], "plugins[0].parameters.attributes"),
        ([[]], "plugins[0].parameters.attributes"),
        ([[attribute(PROMPT)], [attribute(PROMPT)]], "plugins[1].parameters.attributes"),
        ([[{"key": KEY}]], "expression"),
    ],
)
def test_the_cost_has_one_place(attributes, spot):
    """A value elsewhere would not be found, and there is one value."""
    with pytest.raises(ConfigError) as refused:
        read(*attributes)
    assert spot in str(refused.value)


def test_the_namespace_may_be_written():
    """It is the default."""
    settings = read([attribute(PROMPT, key={**KEY, "namespace": "envoy.lb"})])
    assert settings.responses.request_cost == {"prompt": 1}


def test_files_without_a_reporter_have_no_cost():
    """Streams are then not read for it."""
    settings = read()
    assert (settings.responses.request_cost, settings.responses.stream_sample_ratio) == ({}, 0.0)
