"""The Dockerfile, without Docker."""

import re
import subprocess
import sys

import pytest

from extproc.config.settings import ServerSection
from tests.containers import dockerfile
from tests.manifests import parts, tools


def test_sources_exist():
    """Every file that is copied is there."""
    assert dockerfile.sources()
    assert [
        source for source in dockerfile.sources() if not (dockerfile.ROOT / source).exists()
    ] == []


def test_the_build_context_holds_only_the_sources():
    """The ignore file lets in exactly what is copied."""
    lines = [
        line for line in dockerfile.IGNORED.read_text().splitlines() if line[:1] not in {"#", ""}
    ]
    assert lines[0] == "*"
    assert {item[1:] for item in lines if item.startswith("!")} == set(dockerfile.sources())


def test_all_stages_use_the_base_argument():
    """A base that is there already can be named for all of the build."""
    assert dockerfile.instructions()[0].rest.startswith("BASE=")
    bases = [
        instruction.words[0]
        for instruction in dockerfile.instructions()
        if instruction.word == "FROM"
    ]
    assert set(bases) == {"${BASE}"}


def test_the_user_id_is_numeric_and_equal_in_manifests():
    """Kubernetes refuses names where it must not run root."""
    user, group = map(int, dockerfile.last("USER").rest.split(":"))
    pod = tools.documents((tools.MANIFESTS / "base/deployment.yaml").read_text())[0]
    context = pod["spec"]["template"]["spec"]["securityContext"]
    assert user > 0
    assert (context["runAsUser"], context["runAsGroup"]) == (user, group)


def test_the_command_is_a_valid_command_line():
    """And it names the file that manifests mount."""
    assert dockerfile.last("ENTRYPOINT").words == ["extproc"]
    requested = parts.parsed(dockerfile.last("CMD").words)
    pod = tools.documents((tools.MANIFESTS / "base/deployment.yaml").read_text())[0]
    (container,) = pod["spec"]["template"]["spec"]["containers"]
    assert requested.config_file == parts.parsed(container["args"]).config_file


def test_exposed_ports_are_the_default_ports():
    """EXPOSE says what the defaults are."""
    server = ServerSection()
    wanted = {server.grpc_port, server.grpc_health_port, server.metrics_port}
    assert {int(word) for word in dockerfile.last("EXPOSE").words} == wanted


def test_bytecode_is_compiled_in_the_build():
    """Bytecode is made in the build and not later."""
    assert "PYTHONDONTWRITEBYTECODE=1" in dockerfile.last("ENV").words
    assert any(
        "compileall" in instruction.rest
        for instruction in dockerfile.instructions()
        if instruction.word == "RUN"
    )


#: Modules of ours that import the Kubernetes client.
_ASKS = re.compile(r"^\s*(from|import) kubernetes\b", re.MULTILINE)
CLIENTS = sorted(
    ".".join(path.relative_to(dockerfile.ROOT).with_suffix("").parts)
    for path in (dockerfile.ROOT / "extproc").rglob("*.py")
    if _ASKS.search(path.read_text())
)


@pytest.mark.parametrize("module", [*CLIENTS, "extproc.server.lifecycle"])
def test_modules_missing_from_the_image_are_not_imported(module):
    """No class of the Kubernetes client that is made from a kind is imported."""
    program = (
        f"import sys, {module}\n"
        "print(*(m for m in sys.modules if m.startswith('kubernetes.')"
        " and ('.client.models.' in m or '.client.api.' in m)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == []
