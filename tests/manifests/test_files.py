"""Every YAML file of the folder, as it stands."""

import re

import pytest
import yaml

from extproc.config import loader
from extproc.config.settings import PeerSyncSection, ResponsesSection, Settings
from extproc.discovery.kubernetes import watch_plan
from tests.manifests import envoy_files, rules, strict, tools

FILES = sorted(path for path in tools.MANIFESTS.rglob("*.yaml") if "templates" not in path.parts)

#: Files that are no Kubernetes objects.
_OTHERS = {"kustomization.yaml", "values.yaml", "Chart.yaml", "envoy.yaml", "extproc.yaml"}


def name(path):
    return str(path.relative_to(tools.MANIFESTS))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_parse(path):
    """Every document is YAML, and no key stands twice."""
    assert [item for item in yaml.load_all(path.read_text(), strict.OneOfEach) if item]


@pytest.mark.parametrize(
    "path",
    [file for file in FILES if file.parent.name == "base" or file.parent == tools.MANIFESTS],
    ids=name,
)
def test_plain_objects_are_valid(path):
    """Objects that are applied without patches hold to the schemas as files, too."""
    if path.name in _OTHERS:
        return
    result = [
        p for document in tools.documents(path.read_text()) for p in strict.problems(document)
    ]
    assert not result


def test_the_base_configuration_is_valid():
    """It has the other replicas and request ids on responses; all else is as the defaults are."""
    text = (tools.MANIFESTS / "base/extproc.yaml").read_text()
    peers = PeerSyncSection(peers=("extproc-peers:9090",))
    settings = loader.settings(loader.parse(text, where="base/extproc.yaml"))
    assert settings == Settings(peer_sync=peers, responses=ResponsesSection(request_id=True))


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "extproc.yaml"], ids=name)
def test_every_configuration_returns_request_ids(path):
    """Several gateways cannot put the id on responses themselves."""
    settings = loader.settings(loader.parse(path.read_text(), where=name(path)))
    assert settings.responses.request_id


@pytest.mark.parametrize("overlay", envoy_files.FILES)
def test_envoy_files_are_the_shipped_ones(overlay):
    """`python -m tests.manifests.envoy_files` was run after a change in envoy/."""
    same = envoy_files.path(overlay).read_text() == envoy_files.FILES[overlay]()
    assert same, "run python -m tests.manifests.envoy_files"


def test_the_plain_example_is_valid():
    """It holds to the rules of overlays, and needs no rights at all."""
    documents = tools.documents((tools.MANIFESTS / "plain.yaml").read_text())
    assert not list(rules.wrong(documents))
    assert not rules.granted(documents)


def test_shared_patches_are_equal():
    """A patch that stands in two overlays is the same in both."""
    texts = {path.read_text() for path in tools.MANIFESTS.rglob("overlays/envoy*/selector.yaml")}
    assert len(texts) == 1


def test_the_permission_table_matches_the_watched_resources():
    """Every collection that discovery knows is granted, and no other."""
    known = {var for var in vars(watch_plan).values() if isinstance(var, watch_plan.ResourceType)}
    assert {(item.group, item.plural) for item in known} == {*rules.ALLOWED, *rules.SLICES}


@pytest.mark.parametrize("folder", ["overlays", "components"])
def test_the_readme_names_every_folder(folder):
    """And none that is not there."""
    text = (tools.MANIFESTS / "README.md").read_text()
    candidates = {path.name for path in (tools.MANIFESTS / folder).iterdir()}
    assert [name for name in candidates if f"`{name}`" not in text] == []
    if folder == "overlays":
        table = text[text.index("| overlay |") :].split("\n\n")[0]
        assert set(re.findall(r"^\| `([a-z-]+)`", table, re.MULTILINE)) == candidates


def test_the_page_of_security_has_the_table_of_rights():
    """The page of security has the rights as the tests know them."""
    text = (tools.MANIFESTS.parent / "docs/operations/security.md").read_text()
    table = text[text.index("| group | resource | verbs |") :].split("\n\n")[0]
    result = {}
    for line in table.splitlines()[2:]:
        groups, kinds, verbs, _ = (cell.strip() for cell in line.strip("|").split("|"))
        for group in groups.replace("`", "").replace("core", "").split(", "):
            for kind in kinds.split(", "):
                result[group, kind] = frozenset(verbs.split(", "))
    assert result == {**rules.ALLOWED, **rules.SLICES, **rules.SCALES, **rules.REVIEWS}
