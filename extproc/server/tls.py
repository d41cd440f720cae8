"""Serving certificates: self-signed by default, files with reload."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import cast

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from extproc.errors import ConfigError

#: As the reference picker: data planes do not verify it, so its life is not a safety bound.
_VALID_DAYS = 3650


def self_signed() -> grpc.ServerCredentials:
    """Create a self-signed certificate, for data planes that do not verify.

    Source: docs/spec/protocol.md#serving-certificate.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Inference Ext")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=_VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    return grpc.ssl_server_credentials([(private, public)])


def from_files(
    folder: Path, *, reload: bool, on_reload: Callable[[str], None]
) -> grpc.ServerCredentials:
    """The certificate `tls.crt` and key `tls.key` of a folder (a mounted Kubernetes Secret).

    With `reload`, the files are looked at on each new connection; a pair that cannot be read
    leaves the old one in place.

    Args:
        folder: Holds `tls.crt` and `tls.key`.
        reload: Reload the files when they change.
        on_reload: Called with the result of a reload: `reloaded`, or the error.

    Raises:
        ConfigError: The files are missing or no key pair.
    """
    files = KeyPair(folder)
    first = files.read()
    if not reload:
        return grpc.ssl_server_credentials([first])
    # gRPC takes None for "no change"; its stubs do not say so.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", files.fetcher(on_reload))
    return grpc.dynamic_ssl_server_credentials(
        grpc.ssl_server_certificate_configuration([first]), fetch
    )


class KeyPair:
    """A certificate and its key on disk.

    Args:
        folder: Holds `tls.crt` and `tls.key`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: object = None

    def read(self) -> tuple[bytes, bytes]:
        """Key and certificate, in that order, PEM.

        Raises:
            ConfigError: The files are missing or no key pair.
        """
        stamp = self._look()
        try:
            private = (self._folder / "tls.key").read_bytes()
            public = (self._folder / "tls.crt").read_bytes()
            key = serialization.load_pem_private_key(private, password=None)
            certificate = x509.load_pem_x509_certificate(public)
        except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(
                "--cert-path",
                wanted=f"tls.crt and tls.key in PEM in {self._folder}",
                got=f"{type(error).__name__}: {error}",
                fix="mount the certificate there, or leave the flag out for a self-signed one",
            ) from error
        if key.public_key() != certificate.public_key():
            raise ConfigError(
                "--cert-path",
                wanted="a key that belongs to the certificate",
                got=f"two that do not match in {self._folder}",
                fix="replace both files",
            )
        self._stamp = stamp
        return private, public

    def fetcher(
        self, on_reload: Callable[[str], None]
    ) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
        """Build the callback that gRPC calls on each new connection."""
        return lambda: self.changed(on_reload)

    def changed(
        self, on_reload: Callable[[str], None]
    ) -> grpc.ServerCertificateConfiguration | None:
        """Read the files again if they changed; None if they did not or are invalid."""
        if self._look() == self._stamp:
            return None
        try:
            pair = self.read()
        except Exception as error:  # noqa: BLE001 - gRPC calls this; the old pair must go on serving
            on_reload(str(error) if isinstance(error, ConfigError) else type(error).__name__)
            return None
        on_reload("reloaded")
        return grpc.ssl_server_certificate_configuration([pair])

    def _look(self) -> object:
        stamps = []
        for name in ("tls.key", "tls.crt"):
            try:
                stat = (self._folder / name).stat()
            except OSError:
                return None
            stamps.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return stamps
