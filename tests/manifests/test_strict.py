"""The checks themselves: they find what they are for."""

import copy

import pytest
import yaml

from tests.manifests import foreign, strict, tools

DEPLOYMENT = yaml.safe_load((tools.MANIFESTS / "base/deployment.yaml").read_text())
POOL = yaml.safe_load(
    (tools.MANIFESTS / "components/inference-pool/inferencepool.yaml").read_text()
)

POD = ("spec", "template", "spec")

#: An object, where to write, and what must not pass.
WRONG = [
    (DEPLOYMENT, (*POD, "containers", 0, "readOnlyRootFilesystem"), True),
    (DEPLOYMENT, (*POD, "terminationGracePeriodSeconds"), "45"),
    (DEPLOYMENT, (*POD, "containers", 0, "ports", 0, "containerport"), 1),
    (DEPLOYMENT, ("spec", "selector"), None),
    (DEPLOYMENT, ("spec", "replica"), 2),
    (DEPLOYMENT, ("apiVersion",), "apps/v2"),
    (DEPLOYMENT, ("kind",), "Deploiment"),
    (POOL, ("spec", "targetPort"), 8000),
    (POOL, ("spec", "targetPorts", 0, "number"), "8000"),
    (POOL, ("spec", "endpointPickerRef", "failureMode"), "Open"),
    (POOL, ("spec", "selector", "matchExpressions"), []),
    (POOL, ("metadata", "name"), "Capital"),
]


@pytest.mark.parametrize(
    ("document", "where", "what"), WRONG, ids=[".".join(map(str, where)) for _, where, _ in WRONG]
)
def test_invalid_objects_are_reported(document, where, what):
    """Unknown keys, wrong types, missing parts and unknown kinds are problems."""
    assert not list(strict.problems(document))
    broken = copy.deepcopy(document)
    at = broken
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = what
    assert list(strict.problems(broken))


@pytest.mark.parametrize("header", foreign.SCHEMAS)
def test_unknown_keys_of_foreign_kinds_are_reported(header):
    """A key that no table shows is a problem in every kind of others."""
    version, kind = header
    document = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "x"},
        "unknown": {},
        "spec": {"unheard": 1},
    }
    result = " ".join(strict.problems(document))
    assert "unknown" in result
    assert "unheard" in result or kind == "InferencePoolImport"


def test_duplicate_keys_are_reported():
    """YAML readers keep the last of two equal keys; ours refuses them."""
    with pytest.raises(yaml.YAMLError, match="twice"):
        yaml.load("{a: 1, b: {c: 1, c: 2}}", strict.OneOfEach)
