"""A real Kubernetes API server for tests: kube-apiserver and etcd as children, or a given cluster.

Nothing but the API: no controller, scheduler or kubelet runs, so objects stay as tests leave them,
and the status of a pod is what a test patches into it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime as dt
import ipaddress
import os
import shutil
import ssl
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from extproc.autoscaling.runtime import process_actuator
from extproc.demo import stack

#: Where `make envtest` puts what it builds.
BUILT = Path(__file__).resolve().parents[2] / ".cache" / "envtest"

#: Seconds the API server may take to become ready on a busy machine.
_READY_S = 300.0

#: Seconds between looks at a process or a port that gives no event.
_LOOK_S = 0.05

_NEEDED = ("etcd", "kube-apiserver")

#: Go collects garbage rarely: a quarter of the processor time of a start, for 80 MB.
_LAZY = {"GOGC": "400"}


class Access(msgspec.Struct, frozen=True):
    """Access of one user to the API.

    Attributes:
        url: `https://ip:port`.
        authority: The server's CA, PEM.
        certificate: The user's own, PEM; empty where a token speaks for the user.
        key: Of the certificate, PEM.
        token: A bearer token, or empty.
    """

    url: str
    authority: str
    certificate: str = ""
    key: str = ""
    token: str = ""

    def kubeconfig(self, namespace: str = "default") -> str:
        """The same as a kubeconfig with everything inside."""
        user = (
            {"token": self.token}
            if self.token
            else {
                "client-certificate-data": _base64(self.certificate),
                "client-key-data": _base64(self.key),
            }
        )
        cluster = {"server": self.url, "certificate-authority-data": _base64(self.authority)}
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "test",
                "clusters": [{"name": "test", "cluster": cluster}],
                "users": [{"name": "test", "user": user}],
                "contexts": [{"name": "test", "context": context}],
            }
        )

    def tls(self) -> ssl.SSLContext:
        """A client's side of the connection."""
        context = ssl.create_default_context(cadata=self.authority)
        if self.certificate:
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as both:
                both.write(self.certificate + self.key)
                both.flush()
                context.load_cert_chain(both.name)
        return context


class Cluster:
    """An API that tests may fill.

    Attributes:
        admin: Access that may do everything.
        folder: For kubeconfigs and logs; gone with the cluster.
        stoppable: Whether it is ours to stop and start.
    """

    stoppable = False

    def __init__(self, admin: Access, folder: Path) -> None:
        self.admin = admin
        self.folder = folder
        self.admin_kubeconfig = self.write_kubeconfig("admin", admin)

    def write_kubeconfig(self, name: str, access: Access, namespace: str = "default") -> Path:
        """Write the kubeconfig of a user; returns its path."""
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(access.kubeconfig(namespace))
        path.chmod(0o600)
        return path


class ApiServer(Cluster):
    """kube-apiserver and etcd on free loopback ports.

    Args:
        binaries: The folder of both.
        folder: Where certificates, data and logs go.
    """

    stoppable = True

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries = binaries
        self.port, self._etcd, self._peers = (stack.free_port() for _ in range(3))
        self._paper = _Authority(folder)
        certificate, key = self._paper.issue("admin", groups=("system:masters",))
        url = f"https://127.0.0.1:{self.port}"
        super().__init__(Access(url, self._paper.pem, certificate, key), folder)
        self._paper.serving()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start what is not running, with the data there was; returns once it is ready.

        In the main thread only: children die with the thread that starts them.
        """
        self._spawn()
        self._wait_until_ready()

    async def restart(self) -> None:
        """The same without holding up the loop."""
        self._spawn()
        await asyncio.to_thread(self._wait_until_ready)

    def stop(self) -> None:
        """Take the API down at once, as a crash would: every watch is cut. Data stay."""
        self._end("kube-apiserver")

    def close(self) -> None:
        """End everything."""
        for name in reversed(list(self._processes)):
            self._end(name)

    def _spawn(self) -> None:
        if "etcd" not in self._processes:
            self._run("etcd", *self._etcd_flags())
        if "kube-apiserver" not in self._processes:
            self._run("kube-apiserver", *self._api_flags())

    def _run(self, name: str, *flags: str) -> None:
        assert threading.current_thread() is threading.main_thread(), "children die with a thread"
        argv = process_actuator.with_parent_death_signal([str(self._binaries / name), *flags])
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                argv, env=os.environ | _LAZY, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def _wait_until_ready(self) -> None:
        context = self.admin.tls()
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended:\n{self._last_lines(name)}")
            with (
                contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
                urllib.request.urlopen(f"{self.admin.url}/readyz", context=context, timeout=5),
            ):
                return
            # Nothing tells when it is ready.
            time.sleep(_LOOK_S)  # noqa: TID251
        raise TimeoutError(f"kube-apiserver was not ready:\n{self._last_lines('kube-apiserver')}")

    def _last_lines(self, name: str) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text().splitlines()[-20:])

    def _etcd_flags(self) -> list[str]:
        clients, peers = (f"http://127.0.0.1:{port}" for port in (self._etcd, self._peers))
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            # The data need not outlive the machine.
            "--unsafe-no-fsync",
            "--log-level=error",
        ]

    def _api_flags(self) -> list[str]:
        paper = self.folder
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={paper}",
            f"--tls-cert-file={paper / 'server.crt'}",
            f"--tls-private-key-file={paper / 'server.key'}",
            f"--client-ca-file={paper / 'ca.crt'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={paper / 'accounts.key'}",
            f"--service-account-signing-key-file={paper / 'accounts.key'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.0.0.0/24",
            # No controller makes the accounts and tokens that it would demand of pods.
            "--disable-admission-plugins=ServiceAccount",
            # Its own Service has no endpoints: a loopback address is none.
            "--endpoint-reconciler-type=none",
            "--profiling=false",
            "--v=0",
        ]


class MissingApiServer(Exception):  # noqa: N818 - an answer, with what to do as its text
    """There is no API server to be had; the text says what would change that."""


@contextlib.contextmanager
def cluster():
    """The API server there is, gone when the block ends if we started it.

    `KUBEBUILDER_ASSETS` or what `make envtest` built; else the current context of `KUBECONFIG`, if
    `EXTPROC_TEST_CLUSTER=1` says that tests may write there (they replace the definitions of
    inference objects by ours, and delete the namespaces they make); else K3s in a container.

    Raises:
        MissingApiServer: None of them.
    """
    with tempfile.TemporaryDirectory(prefix="extproc-kube-") as name:
        folder = Path(name)
        binaries = assets()
        if binaries is not None:
            server = ApiServer(binaries, folder)
            try:
                server.start()
                yield server
            finally:
                server.close()
        elif os.environ.get("EXTPROC_TEST_CLUSTER") == "1" and os.environ.get("KUBECONFIG"):
            text = Path(os.environ["KUBECONFIG"]).read_text()
            yield Cluster(access(text), folder)
        else:
            with _k3s() as text:
                yield Cluster(access(text), folder)


def assets() -> Path | None:
    """The folder that holds kube-apiserver and etcd, if there is one."""
    named = os.environ.get("KUBEBUILDER_ASSETS", "")
    for folder in [Path(named)] if named else [BUILT]:
        if all((folder / name).is_file() for name in _NEEDED):
            return folder
    return None


def access(kubeconfig: str) -> Access:
    """Access of the current context of a kubeconfig, with all data inline."""
    config = yaml.safe_load(kubeconfig)
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    return Access(
        cluster["server"],
        _unbase64(cluster["certificate-authority-data"]),
        _unbase64(user.get("client-certificate-data", "")),
        _unbase64(user.get("client-key-data", "")),
        user.get("token", ""),
    )


@contextlib.contextmanager
def _k3s():
    if shutil.which("docker") is None or not _docker_answers():
        raise MissingApiServer(
            "no Kubernetes API server: run `make envtest`, set KUBEBUILDER_ASSETS, set KUBECONFIG "
            "with EXTPROC_TEST_CLUSTER=1, or start Docker"
        )
    from testcontainers.community.k3s import K3SContainer  # noqa: PLC0415 - only where Docker answers

    with K3SContainer("rancher/k3s:v1.34.3-k3s1", enable_cgroup_mount=False) as container:
        yield container.config_yaml()


def _docker_answers() -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return not subprocess.run(
            ["docker", "info"], capture_output=True, timeout=10, check=False
        ).returncode
    return False


class _Authority:
    """Certificates for a day, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject("test authority")
        self._certificate = self._sign(self._name, self._key, authority=True)
        self.pem = _pem(self._certificate)
        (folder / "ca.crt").write_text(self.pem)

    def issue(self, name: str, *, groups: tuple[str, ...] = ()) -> tuple[str, str]:
        """A certificate and its key for a user of some groups, or the server."""
        key = ec.generate_private_key(ec.SECP256R1())
        return _pem(self._sign(_subject(name, groups), key)), _private(key)

    def serving(self) -> None:
        """Write what the server itself needs."""
        certificate, key = self.issue("kube-apiserver")
        (self._folder / "server.crt").write_text(certificate)
        (self._folder / "server.key").write_text(key)
        # The server signs accounts' tokens with RSA or ECDSA; clients do not look.
        accounts = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self._folder / "accounts.key").write_text(_private(accounts))

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool = False
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        local = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(local), critical=False)
        )
        return builder.sign(self._key, hashes.SHA256())


def _subject(name: str, groups: tuple[str, ...] = ()) -> x509.Name:
    """A subject as Kubernetes reads it: the common name is the user, organisations are groups."""
    parts = [x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*parts, x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _private(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _named(entries, name):
    return next(entry for entry in entries if entry["name"] == name)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _unbase64(text: str) -> str:
    return base64.b64decode(text).decode()
