"""Serving certificates: self-signed by default, files with reload."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import logging
import os
import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from extproc.discovery.static_discovery import FileStamp, file_stamp, open_regular
from extproc.errors import ConfigError, is_passing_error

_log = logging.getLogger("extproc.server")

#: Object that a transport serves a pair with, such as a TLS context.
_Served = TypeVar("_Served")

#: Environment variable by which operators choose the suites of TLS 1.2, as grpcio reads it.
CIPHER_SUITES: Final = "GRPC_SSL_CIPHER_SUITES"

#: Suites of TLS 1.2; RFC 9113, appendix A forbids the others with HTTP/2.
_DEFAULT_CIPHER_SUITES: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"

#: As the reference picker: data planes do not verify it, so its life is not a safety bound.
_VALID_DAYS = 3650


def self_signed_pair() -> tuple[bytes, bytes]:
    """Create the key and certificate of a self-signed certificate, PEM.

    For data planes that do not verify. Source: docs/spec/protocol.md#serving-certificate.
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
    return private, public


#: Suites that OpenSSL has for TLS 1.3. Others that begin with `TLS_` are Go's names for TLS 1.2.
_TLS_1_3_SUITES: Final = frozenset(
    (
        "TLS_AES_128_GCM_SHA256",
        "TLS_AES_256_GCM_SHA384",
        "TLS_CHACHA20_POLY1305_SHA256",
        "TLS_AES_128_CCM_SHA256",
        "TLS_AES_128_CCM_8_SHA256",
    )
)


class TlsOptions(msgspec.Struct, frozen=True):
    """TLS versions and cipher suites of a server.

    Attributes:
        min_version: Oldest version, `1.2` or `1.3`.
        cipher_suites: Suites of TLS 1.2 between colons, as OpenSSL names them. Names of TLS 1.3 do
            not count, as OpenSSL chooses among them; without any other, TLS 1.2 is not served.
            Empty: those of the environment, or usual ones.
    """

    min_version: str = "1.2"
    cipher_suites: str = ""


DEFAULT_OPTIONS: Final = TlsOptions()


def build_context(
    pair: tuple[bytes, bytes], options: TlsOptions = DEFAULT_OPTIONS
) -> ssl.SSLContext:
    """Build the TLS context of a server of HTTP/2.

    Args:
        pair: Key and certificate, PEM.

    Raises:
        ConfigError: The options or the environment name unknown cipher suites.
        OSError: OpenSSL refuses the pair (`ssl.SSLError`), or no file can be opened.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _restrict(context, options)
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2"])
    private, public = pair
    with contextlib.ExitStack() as stack:
        context.load_cert_chain(_open_pipe(stack, public), _open_pipe(stack, private))
    return context


def _restrict(context: ssl.SSLContext, options: TlsOptions) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if options.min_version == "1.3":
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    names, place = options.cipher_suites, "server.tls_cipher_suites"
    fix = "correct it, or leave it empty"
    if names:
        older = [name for name in names.split(":") if name not in _TLS_1_3_SUITES]
        if not older:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            return
        names = ":".join(older)
    else:
        names, place = os.environ.get(CIPHER_SUITES, "") or _DEFAULT_CIPHER_SUITES, CIPHER_SUITES
        fix = "correct it, or unset it; grpcio (server.transport) may know other names"
    for text in (*_plain_names(names), names):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).set_ciphers(text)
        except ssl.SSLError as error:
            wanted = "cipher suites of TLS 1.2, as OpenSSL names them"
            raise ConfigError(place, wanted=wanted, got=text, fix=fix) from error
    context.set_ciphers(names)


def _plain_names(names: str) -> list[str]:
    """Names of a list that add suites of TLS 1.2: OpenSSL skips those that it does not know."""
    return [
        name
        for name in re.split("[:;, ]", names)
        if name and name[0] not in "!-+@" and name not in _TLS_1_3_SUITES
    ]


def _open_pipe(stack: contextlib.ExitStack, data: bytes) -> str:
    """Path from which bytes can be read once, while the stack is open.

    The ssl module reads files only, and no folder may be writable.
    """
    reader, writer = os.pipe()
    stack.callback(os.close, reader)
    with os.fdopen(writer, "wb") as file:
        # All of it must fit, as nothing is read before it is written.
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, max(len(data), 1))
        file.write(data)
    return f"/proc/self/fd/{reader}"


def load_context(
    folder: str, *, reload: bool, options: TlsOptions = DEFAULT_OPTIONS
) -> Callable[[], ssl.SSLContext]:
    """Load `tls.crt` and `tls.key` of a folder; returns the source of contexts for connections.

    Args:
        folder: A mounted Kubernetes Secret.
        reload: Check the files at each new connection; a pair that cannot be read or served leaves
            the old one in place.

    Raises:
        ConfigError: The files are missing, or no key pair that OpenSSL serves.
    """
    files = KeyPair(Path(folder), lambda pair: build_context(pair, options))
    latest = files.read()

    # No `sni_callback`: ssl prints a traceback for each name of a server that is not ASCII.
    def choose() -> ssl.SSLContext:
        nonlocal latest
        if reload:
            latest = files.changed() or latest
        return latest

    return choose


def find_invalid_dates(folder: Path, now: dt.datetime) -> Iterator[str]:
    """Yield a sentence for each certificate of `tls.crt` that is not valid at a time.

    It is served all the same: only clients look at the dates. Files that cannot be read yield none.
    """
    try:
        with open(folder / "tls.crt", "rb", opener=open_regular) as file:
            certificates = x509.load_pem_x509_certificates(file.read())
    except (OSError, ValueError):
        return
    for certificate in certificates:
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if begin <= now <= end:
            continue
        fault = (
            f"expired at {end:%Y-%m-%d %H:%M}" if now > end else f"begins {begin:%Y-%m-%d %H:%M}"
        )
        yield (
            f"--cert-path: a certificate of tls.crt in {folder} {fault} UTC, and clients that verify "
            "it refuse it; renew it, or set the clock of this machine"
        )


class KeyPair(Generic[_Served]):
    """A certificate and its key on disk.

    Args:
        build: Builds the object that the transport serves from key and certificate, PEM; an
            OSError refuses them.
    """

    def __init__(self, folder: Path, build: Callable[[tuple[bytes, bytes]], _Served]) -> None:
        self._folder = folder
        self._build = build
        #: Of the files that were read last, also of those that were refused.
        self._stamps: Sequence[FileStamp] = ()
        self._error = ""

    def read(self) -> _Served:
        """Read the files, and build the object that the transport serves.

        Raises:
            ConfigError: The files are missing, or no key pair that can be served.
        """
        # Taken before reading: what is written during the read makes another change.
        self._stamps = self._read_stamps()
        try:
            private, public = self._read_file("tls.key"), self._read_file("tls.crt")
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
        try:
            return self._build((private, public))
        except OSError as error:
            raise ConfigError(
                "--cert-path",
                wanted=f"a certificate chain and a key in {self._folder} that can be served",
                got=f"{type(error).__name__}: {error}",
                fix="replace both files; every certificate of tls.crt must be whole, and RSA keys "
                "have 2048 bits or more",
            ) from error

    def changed(self) -> _Served | None:
        """Read the files again if they changed; None if they did not or are refused."""
        if self._read_stamps() == self._stamps:
            return None
        try:
            served = self.read()
        except Exception as error:  # noqa: BLE001 - a new connection calls this; the old pair must go on serving
            self._log_error(error)
            return None
        self._error = ""
        _log.info("certificate: reloaded")
        for line in find_invalid_dates(self._folder, dt.datetime.now(dt.UTC)):
            _log.warning(line)
        return served

    def _log_error(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ConfigError) else type(error).__name__
        is_passing = is_passing_error(error)
        if is_passing:
            self._stamps = ()
        if not is_passing or text != self._error:
            _log.warning("the certificate in force stays: %s", text)
        self._error = text

    def _read_file(self, name: str) -> bytes:
        with open(self._folder / name, "rb", opener=open_regular) as file:
            return file.read()

    def _read_stamps(self) -> Sequence[FileStamp]:
        return [file_stamp(self._folder / name) for name in ("tls.key", "tls.crt")]
