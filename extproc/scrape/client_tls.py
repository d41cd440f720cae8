"""TLS of clients of engines, with files that are read again when they change."""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from extproc.errors import ConfigError, is_passing_error
from extproc.scrape import client

_log: Final = logging.getLogger("extproc.scrape")


class TlsFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Certificates for connections to engines over `https`.

    Files are looked at for each new connection; those that cannot be read leave what was read before.

    Attributes:
        ca_file: File with authorities (PEM) that engines are checked by, with `verify_tls`. Empty: the
            authorities of the system.
        cert_file: File with the certificate (PEM) that engines get of extproc, and its chain. Empty:
            none, because few engines want one.
        key_file: File with its key (PEM), without a password.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


class ClientTls:
    """The TLS context of a client, built again once files behind it changed.

    Args:
        verify: Whether certificates of servers are checked.

    Raises:
        ConfigError: A file cannot be read, or holds no certificate or key.
    """

    def __init__(self, files: TlsFiles, *, verify: bool) -> None:
        self._files = files
        self._verify = verify
        self._error = ""
        self._stamps: Mapping[str, tuple[int, ...]] | None = self._read_stamps()
        self._context = self._build()

    def __call__(self) -> ssl.SSLContext:
        """Return the context for a new connection."""
        stamps = self._read_stamps()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._context = self._build()
            except ConfigError as error:
                is_passing = is_passing_error(error)
                if is_passing:
                    self._stamps = None
                if not is_passing or str(error) != self._error:
                    _log.warning("certificates for engines stay as they were: %s", error)
                self._error = str(error)
            else:
                self._error = ""
        return self._context

    def _read_stamps(self) -> Mapping[str, tuple[int, ...]]:
        """Stat fields of the files, which change with them; none of a missing one."""
        files = self._files
        system = ssl.get_default_verify_paths().cafile or ""
        authorities = (files.ca_file or system) if self._verify else ""
        names = (authorities, files.cert_file, files.key_file)
        stamps = {}
        for name in filter(None, names):
            with contextlib.suppress(OSError, ValueError):
                status = Path(name).stat()
                stamps[name] = (
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_size,
                    status.st_ino,
                )
        return stamps

    def _build(self) -> ssl.SSLContext:
        files = self._files
        for key, name in msgspec.structs.asdict(files).items():
            if name and not os.path.isfile(name):  # noqa: PTH113 - a Path raises what stat does
                raise _refuse(key, f"no regular file at {name}")
        try:
            context = client.build_tls(files.ca_file if self._verify else "")
        except OSError as error:
            raise _refuse("ca_file", f"{type(error).__name__}: {error}") from error
        if not self._verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if files.cert_file or files.key_file:
            try:
                # Without a password, OpenSSL would ask for one on the terminal.
                context.load_cert_chain(files.cert_file, files.key_file, password="")
            except (OSError, ValueError) as error:
                raise _refuse("cert_file", f"{type(error).__name__}: {error}") from error
        return context


def _refuse(key: str, got: str) -> ConfigError:
    return ConfigError(
        f"scrape.tls.{key}",
        wanted="certificates in PEM, and a key that belongs to them"
        if key != "ca_file"
        else "authorities in PEM",
        got=got,
        fix="correct the name, or mount the file",
    )
