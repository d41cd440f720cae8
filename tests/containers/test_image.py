"""The image, built and run by Docker.

`EXTPROC_BASE_IMAGE` names a base that is there already; without it the Dockerfile's own is pulled.
`EXTPROC_BUILD_NETWORK` is the network of the build, which installs packages.
"""

import contextlib
import gc
import os
import re
import socket
import tempfile
import urllib.request
import warnings
from pathlib import Path

import docker
import grpc
import pytest
from grpc_health.v1 import health_pb2
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.image import DockerImage

from tests.containers import dockerfile
from tests.support import programs

#: The reaper is an image of its own to pull; what is started here is removed here.
testcontainers_config.ryuk_disabled = True

#: As the manifests run it.
RESTRICTED = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "mem_limit": "1g",
}

#: Metrics of absent engines are not scraped: readiness would wait for them.
UNSCRAPED = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}, "
    "scheduling: {strategy: least-request}}"
)

#: With xDS, for what the image has beyond the least.
SERVE = [
    "serve",
    "--endpoints=127.0.0.1:9",
    "--drain-timeout=0s",
    "--xds",
    f"--config-text={UNSCRAPED}",
]

#: Of a cluster that does not answer.
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: x
clusters: [{name: x, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: x, user: {token: t}}]
contexts: [{name: x, context: {cluster: x, user: x}}]
"""

#: Writes a recording as Parquet, reads it, and prints its rows (count).
CONVERT = """\
from pathlib import Path
from extproc.recording import parquet
recording = parquet.ParquetFile(open("/tmp/decisions.parquet", "wb"))
recording.write(Path("/examples/decisions.jsonl").read_bytes())
recording.close()
print(sum(1 for _ in parquet.read_lines(Path("/tmp/decisions.parquet"))))
"""

#: Bytes that the image may have above its base.
_MOST = 300 * 1024 * 1024


#: Docker's client and testcontainers leave connections to be collected.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def tidy():
    """Collects those connections here, before the end of the session makes errors of them."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def client():
    """Docker, or a skip that says it does not answer."""
    where = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    scheme, _, path = where.partition("://")
    if scheme == "unix":
        # Docker's own client would leave a socket open here.
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                what = f"Docker does not answer at {where}"
                raise programs.missing(what, "EXTPROC_REQUIRE_DOCKER") from None
    with contextlib.closing(docker.from_env(timeout=300)) as result:
        yield result


@contextlib.contextmanager
def closed(thing):
    """An image or a container, whose connection to Docker is closed behind it."""
    try:
        with thing as running:
            yield running
    finally:
        thing.get_docker_client().client.close()


@pytest.fixture(scope="module")
def base():
    """The base's name."""
    default = dockerfile.instructions()[0].rest.partition("=")[2]
    return os.environ.get("EXTPROC_BASE_IMAGE", default)


@pytest.fixture(scope="module")
def image(client, base, tmp_path_factory):
    """The built image."""
    context = dockerfile.context(tmp_path_factory.mktemp("context"))
    network = os.environ.get("EXTPROC_BUILD_NETWORK")
    more = {"network_mode": network} if network else {}
    wanted = DockerImage(
        context, tag="extproc:test", dockerfile_path="Dockerfile", buildargs={"BASE": base}, **more
    )
    with closed(wanted) as built:
        yield str(built)


@contextlib.contextmanager
def saying(wanted, what):
    """A running container, once its program has said something."""
    with closed(wanted.with_kwargs(**RESTRICTED)) as running:
        text = b""
        lines = running.get_wrapped_container().logs(stream=True, follow=True)
        with contextlib.closing(lines):
            for line in lines:
                text += line
                if what in text:
                    break
        assert what in text, text.decode()
        yield running


@pytest.fixture
def container(image):
    """A running picker."""
    wanted = DockerContainer(image).with_command(SERVE).with_exposed_ports(9003, 9090)
    with saying(wanted, b"extproc is listening") as running:
        yield running


def address(container, port):
    return f"{container.get_container_host_ip()}:{container.get_exposed_port(port)}"


def test_image_serves_on_a_read_only_file_system(container):
    """With a read-only root file system, no capability and no root, probes and pages answer."""
    with grpc.insecure_channel(address(container, 9003)) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        for name in ("liveness", "readiness"):
            answer = check(health_pb2.HealthCheckRequest(service=name), timeout=300)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    url = f"http://{address(container, 9090)}/metrics"
    with urllib.request.urlopen(url, timeout=300) as page:
        assert b"extproc_info" in page.read()


def test_image_does_not_run_as_root(container):
    """The process has the number that the Dockerfile gives it."""
    running = container.get_wrapped_container()
    wanted = dockerfile.last("USER").rest.split(":")[0]
    status = container.exec(["python", "-c", "import os; print(os.getuid())"])
    assert status.exit_code == 0, status.output
    assert status.output.decode().strip() == wanted
    assert running.diff() in (None, [])


def test_image_ends_on_sigterm(container):
    """SIGTERM reaches the picker itself, and it ends well."""
    running = container.get_wrapped_container()
    running.stop(timeout=20)
    assert running.wait(timeout=20)["StatusCode"] == 0


def test_image_contains_the_kubernetes_client(image):
    """The reduced Kubernetes client still connects to an API server."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "config").write_text(KUBECONFIG)
        wanted = (
            DockerContainer(image)
            .with_volume_mapping(folder, "/kube")
            .with_command(["serve", "--kubeconfig=/kube/config", "--endpoint-selector=app=vllm"])
        )
        with saying(wanted, b"127.0.0.1:1: Cannot connect"):
            pass


def test_image_prints_its_version(client, image):
    """The other commands are there, too."""
    text = client.containers.run(image, ["version"], remove=True, read_only=True).decode()
    assert re.match(r"extproc \d+\.\d+", text)


def test_image_writes_and_reads_parquet(client, image):
    """The reduced Arrow still converts recordings."""
    examples = dockerfile.ROOT / "docs/examples"
    text = client.containers.run(
        image,
        ["-c", CONVERT],
        entrypoint="python",
        remove=True,
        read_only=True,
        tmpfs={"/tmp": ""},
        volumes={str(examples): {"bind": "/examples", "mode": "ro"}},
    )
    assert int(text) == (examples / "decisions.jsonl").read_text().count("\n")


def test_image_size_is_bounded(client, image, base):
    """The bytes that the image adds to its base are bounded."""
    sizes = [client.images.get(name).attrs["Size"] for name in (image, base)]
    assert sizes[0] - sizes[1] < _MOST
