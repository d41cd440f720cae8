import itertools
import json
import math

import pytest

from extproc.config import loader
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from tests.support.config_text import HEAD


def settings(text, *overrides, head=HEAD):
    return loader.settings(loader.parse(head + text, where="pool.yaml"), overrides)


#: What is written below the head; where, wanted, found and fix of the error, each in part.
WRONG = {
    "unknown section": (
        "scraep: {}",
        ("scraep", "one of apiVersion", "unknown key scraep", "did you mean scrape?"),
    ),
    "unknown key in a list": (
        "scheduling: {profile: {scorers: [{kind: a}, {kind: b, wieght: 2}]}}",
        ("scheduling.profile.scorers[1].wieght", "kind, params, weight", "wieght", "weight?"),
    ),
    "unknown key far from all": (
        "log: {zzzzzz: 1}",
        ("log.zzzzzz", "one of format, level, requests", "zzzzzz", "remove it"),
    ),
    "unknown key behind a union": (
        "pool: {endpoints: [{adress: 'a:1'}]}",
        ("pool.endpoints[0].adress", "address, labels, name", "adress", "did you mean address?"),
    ),
    "key that is no text": ("1: 2", ("pool.yaml: 1", "one of", "unknown key 1", "remove it")),
    "text for a number": (
        "server: {grpc_port: '9002'}",
        ("server.grpc_port", "a whole number", "'9002'", "without quotes"),
    ),
    "unit in the value": (
        "scrape: {timeout_s: 5s}",
        ("scrape.timeout_s", "a number", "'5s'", "the unit is in the name"),
    ),
    "fraction for a count": (
        "server: {grpc_port: 9002.5}",
        ("server.grpc_port", "a whole number", "9002.5", "write a whole number"),
    ),
    "text for a boolean": (
        "server: {secure_serving: 'yes'}",
        ("server.secure_serving", "true or false", "'yes'", "without quotes"),
    ),
    "boolean for a number": (
        "server: {grpc_port: true}",
        ("server.grpc_port", "a whole number", "true", "write a whole number"),
    ),
    "number for text": (
        "pool: {endpoints: [{address: 'a:1', labels: {zone: 3}}]}",
        ("pool.endpoints[0].labels", "text", "int", "quotes"),
    ),
    "text for a list": (
        "pool: {endpoints: '10.0.0.1:8000'}",
        ("pool.endpoints", "a list", "'10.0.0.1:8000'", "write a list"),
    ),
    "section left empty": ("server:", ("server", "a mapping", "null", "remove the line")),
    "scalar for a section": ("server: 5", ("server", "a mapping", "5", "write a mapping")),
    "long value": ("seed: " + "x" * 100, ("seed", "a whole number or null", "xxx...", "write")),
    "above a bound": (
        "server: {grpc_port: 70000}",
        ("server.grpc_port", "<= 65535", "70000", "change the value"),
    ),
    "below a bound": (
        "responses: {stream_sample_ratio: -0.1}",
        ("responses.stream_sample_ratio", ">= 0", "-0.1", "change the value"),
    ),
    "not a path": ("scrape: {path: metrics}", ("scrape.path", "^/", "'metrics'", "change")),
    "empty name": (
        "scheduling: {strategy: ''}",
        ("scheduling.strategy", "not empty", "''", "change"),
    ),
    "no such word": (
        "log: {level: warn}",
        ("log.level", "debug, error, info, warning", "'warn'", "did you mean warning?"),
    ),
    "a section's own check": (
        "prefix: {schedule: {growth: 0}}",
        ("prefix.schedule", "growth of at least 1", "0", "change the value"),
    ),
    "key that must be there": (
        "scheduling: {profile: {scorers: [{weight: 1}]}}",
        ("scheduling.profile.scorers[0]", "the key kind", "a mapping with 1 keys", "add kind"),
    ),
    "infinite number": (
        "scrape: {timeout_s: .inf}",
        ("scrape.timeout_s", "a finite number", "inf", "write a number"),
    ),
    "half of a surrogate pair": (
        'pool: {name: "a\\ud800"}',
        ("pool.name", "text of Unicode characters", "half of a surrogate pair, \\ud800", "itself"),
    ),
    "half of a surrogate pair in a key": (
        'scheduling: {models: {"a\\ud800": {}}}',
        ("scheduling.models", "text of Unicode characters", "\\ud800", "itself"),
    ),
    "key twice": (
        "scrape: {timeout_s: 1, timeout_s: 2}",
        ("pool.yaml", "every key once", "timeout_s twice (again in line 3)", "keep one"),
    ),
    "mapping that holds itself": (
        "responses: &a {b: *a}",
        ("pool.yaml", "levels", "responses.b.b", "anchor"),
    ),
    "broken syntax": (
        "scrape: [",
        ("pool.yaml, line 3, column 10", "YAML or JSON", "expected", "correct the syntax"),
    ),
    "date that is none": (
        "seed: 2026-14-14",
        ("pool.yaml", "YAML or JSON", "month must be in 1..12", "correct the syntax"),
    ),
    "brackets without end": (
        "seed: " + "[" * 5000,
        ("pool.yaml", "YAML or JSON", "", "correct the syntax"),
    ),
    "number of many parts": (
        "seed: 1" + ":1" * 500,
        ("pool.yaml, line 3, column 7", "YAML or JSON", "a number of more than 1000", "correct"),
    ),
    "mappings that merge each other": (
        "a: &a {k: v}\n"
        + "\n".join(
            f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}"
            for old, new in itertools.pairwise("abcdefghijk")
        ),
        ("pool.yaml", "YAML or JSON", "more than 1000000 keys by <<", "correct the syntax"),
    ),
    "two sources": (
        "pool: {endpoints: ['a:1'], endpoints_file: f}",
        ("pool", "one of endpoints, endpoints_file", "endpoints and endpoints_file", "keep one"),
    ),
    "no port": (
        "pool: {endpoints: ['10.0.0.1']}",
        ("pool: endpoints[0]", "10.0.0.1:8000", "'10.0.0.1'", "add the port"),
    ),
    "stale at once": (
        "scrape: {busy_interval_s: 5, stale_after_s: 5}",
        ("scrape.stale_after_s", "more than busy_interval_s", "5", "raise it"),
    ),
    "assembly below one body": (
        "limits: {max_assembly_bytes: 10}",
        ("limits.max_assembly_bytes", "at least 4 times max_body_bytes", "10", "raise it"),
    ),
    "two bands of a priority": (
        "flow_control: {bands: [{priority: 1}, {priority: 0}, {priority: 1}]}",
        ("flow_control.bands[2].priority", "every priority once", "1 twice", "into one entry"),
    ),
    "a band of a priority that no objective has": (
        "flow_control: {bands: [{priority: 99999999999999999999}]}",
        ("flow_control.bands[0].priority", "<= 2147483647", "99999999999999999999", "change"),
    ),
    "certificate without TLS": (
        "server: {cert_path: /certs, secure_serving: false}",
        ("server.cert_path", "no certificate", "/certs", "secure_serving"),
    ),
    "TLS for KEDA without TLS": (
        "autoscaling: {keda: {enabled: true, tls: true}}\nserver: {secure_serving: false}",
        ("autoscaling.keda.tls", "secure_serving", "true", "tls to false"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_error_names_place_wanted_found_and_fix(name):
    """An error in a file is refused with its place and all three parts."""
    text, (where, wanted, actual, fix) = WRONG[name]
    with pytest.raises(ConfigError) as raised:
        settings(text)
    error = raised.value
    assert error.where.startswith("pool.yaml")
    assert where in error.where
    assert wanted in error.wanted
    assert actual in error.got
    assert fix in error.fix
    for part in (error.where, error.wanted, error.got, error.fix):
        assert part in str(error)


@pytest.mark.parametrize(
    ("text", "wanted", "actual", "fix"),
    [
        ("", "apiVersion and kind", "null", "begin with"),
        ("[]", "a mapping", "a list of 0", "begin with"),
        ("kind: ExtProcConfig", "the key apiVersion", "none", "apiVersion: extproc/v1alpha1"),
        ("apiVersion: extproc/v1alpha1", "the key kind", "none", "kind: ExtProcConfig"),
        ("apiVersion: extproc/v2\nkind: ExtProcConfig", "v1alpha1", "v2", "write extproc/v1alpha1"),
        ("kind: EndpointPickerConfig", "llm-d.ai/v1alpha1", "null", "write llm-d.ai/v1alpha1"),
        ('{"kind": 1, "kind": 2}', "every key once", "kind twice", "keep one"),
    ],
)
def test_a_file_without_version_and_kind_is_refused(text, wanted, actual, fix):
    """A file without version and kind, or of another program, is not read any further."""
    with pytest.raises(ConfigError) as raised:
        settings(text, head="")
    assert wanted in raised.value.wanted
    assert actual in raised.value.got
    assert fix in raised.value.fix


def test_a_late_duplicate_in_json_is_reported_in_linear_time():
    """Time grows with the keys of a mapping, not with their square: this would take minutes."""
    keys = [*(f"k{at}" for at in range(200_000)), "k199999"]
    with pytest.raises(ConfigError, match="k199999 twice"):
        settings("{" + ",".join(f'"{key}":1' for key in keys) + "}", head="")


def test_empty_file_body_means_defaults():
    """A file with only version and kind is the default configuration."""
    assert settings("") == Settings()


def test_yaml_and_json_give_the_same_settings():
    """The same tree reads the same in both forms."""
    tree = {
        "apiVersion": "extproc/v1alpha1",
        "kind": "ExtProcConfig",
        "pool": {"endpoints": ["10.0.0.1:8000", {"address": "[fd00::1]:8000", "name": "b"}]},
        "scheduling": {"profile": {"scorers": [{"kind": "queue-depth", "weight": 2}]}},
        "seed": 7,
    }
    from_json = settings(json.dumps(tree, indent="\t"), head="")
    from_yaml = settings(
        "pool:\n  endpoints:\n  - 10.0.0.1:8000\n  - {address: '[fd00::1]:8000', name: b}\n"
        "scheduling:\n  profile:\n    scorers:\n    - {kind: queue-depth, weight: 2}\n"
        "seed: 7\n"
    )
    assert from_json == from_yaml


@pytest.mark.parametrize("word", ["off", '"off"', "false"])
def test_off_needs_no_quotes(word):
    """YAML takes the word for false, and so does a chart's values."""
    text = f"apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\nlog: {{requests: {word}}}"
    assert loader.settings(loader.parse(text, where="c.yaml")).log.requests == "off"


def test_flow_mapping_that_is_no_json_is_yaml():
    """Text in braces is tried as JSON first and read as YAML all the same."""
    text = "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, seed: 1}"
    assert settings(text, head="").seed == 1


def test_override_beats_file():
    """A flag wins over the file, and leaves the rest of its section alone."""
    override = loader.FlagOverride(("server", "grpc_port"), 1, "--grpc-port")
    read = settings("server: {grpc_port: 2, metrics_port: 3}", override)
    assert (read.server.grpc_port, read.server.metrics_port) == (1, 3)


def test_override_error_names_the_flag():
    """A wrong flag is not blamed on the file."""
    override = loader.FlagOverride(("server", "grpc_port"), 70000, "--grpc-port")
    with pytest.raises(ConfigError) as raised:
        settings("", override)
    assert raised.value.where == "--grpc-port: server.grpc_port"


def test_missing_file_is_a_config_error(tmp_path):
    """The error of a missing file says that it does not exist."""
    with pytest.raises(ConfigError) as raised:
        loader.read(tmp_path / "none.yaml")
    assert "No such file" in raised.value.got


def test_bytes_that_are_no_text_are_a_config_error(tmp_path):
    """The error of a file that is not UTF-8 names the position of the first wrong byte."""
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"kind: \xff")
    with pytest.raises(ConfigError) as raised:
        loader.read(path)
    assert "byte 6" in raised.value.got


def test_a_file_is_read_from_its_path(tmp_path):
    """A file is read from its path, and its name stands in errors."""
    path = tmp_path / "a.yaml"
    path.write_text(HEAD + "seed: 3")
    document = loader.read(path)
    assert document.where == str(path)
    assert loader.settings(document).seed == 3


def test_defaults_are_finite():
    """No default would be refused if it were written in a file."""
    assert math.isfinite(Settings().scrape.stale_after_s)
    loader.settings(loader.EMPTY)
