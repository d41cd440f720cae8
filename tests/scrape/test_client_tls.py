"""Certificates of clients of engines, over sockets of loopback."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import ssl

import pytest

from extproc.errors import ConfigError
from extproc.scrape import client
from extproc.scrape.client_tls import ClientTls, TlsFiles
from tests.support.certificates import write_certificate


@contextlib.asynccontextmanager
async def engine(http, certificate, *, clients=None):
    """An engine with a certificate, which wants one of its clients where their authority is given."""
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(certificate, certificate.with_suffix(".key"))
    if clients is not None:
        served.verify_mode = ssl.CERT_REQUIRED
        served.load_verify_locations(clients)

    async def answer(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(http.answer(b"page"))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", ssl=served) as server:
        yield client.target("127.0.0.1", server.sockets[0].getsockname()[1], path="/metrics")


async def fetch(tls, where):
    """The page, over a new connection."""
    http = client.ScrapeClient(timeout_s=60.0, cap_bytes=100, tls=tls)
    try:
        return await http.get(where)
    finally:
        http.close()


def test_authorities_are_read_again_when_their_file_changes(http, tmp_path):
    """A file that holds none leaves those before; the next one counts."""
    own, other = write_certificate(tmp_path, "own"), write_certificate(tmp_path, "other")
    authorities = tmp_path / "ca.crt"
    authorities.write_bytes(other.read_bytes())

    async def scene():
        tls = ClientTls(TlsFiles(ca_file=str(authorities)), verify=True)
        async with engine(http, own) as where:
            pages = [await fetch(tls, where)]
            for text in (own.read_text(), "none at all", other.read_text() + "\n"):
                authorities.write_text(text)
                pages.append(await fetch(tls, where))
        return pages

    failed = client.FetchFailed("tls")
    assert asyncio.run(scene()) == [failed, b"page", b"page", failed]


def test_files_that_could_not_be_opened_are_read_again(tmp_path, monkeypatch, caplog):
    """Though they do not change any more: such as while too many files are open."""
    authorities = write_certificate(tmp_path, "own")
    tls = ClientTls(TlsFiles(ca_file=str(authorities)), verify=True)
    before, reads = tls(), []

    def build_tls(name):
        reads.append(name)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)

    with monkeypatch.context() as patched:
        patched.setattr(client, "build_tls", build_tls)
        authorities.write_bytes(authorities.read_bytes() + b"\n")
        assert [tls(), tls()] == [before, before]
    after = tls()
    assert after is not before
    assert (tls(), len(reads)) == (after, 2)
    assert caplog.text.count("stay as they were") == 1


def test_files_without_permission_are_read_again_when_they_change(tmp_path, monkeypatch):
    """To build a context takes long, and is not tried for each connection without a reason."""
    authorities = write_certificate(tmp_path, "own")
    tls = ClientTls(TlsFiles(ca_file=str(authorities)), verify=True)
    before, reads = tls(), []

    def build_tls(name):
        reads.append(name)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    with monkeypatch.context() as patched:
        patched.setattr(client, "build_tls", build_tls)
        authorities.write_bytes(authorities.read_bytes() + b"\n")
        assert [tls(), tls(), tls()] == [before] * 3
    assert len(reads) == 1
    os.utime(authorities, ns=(0, 0))
    assert tls() is not before


def test_a_file_that_cannot_be_looked_at_leaves_the_certificates_in_force(tmp_path):
    """As in a folder that may not be searched, or behind a link to a name that is too long."""
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder")
    authorities = write_certificate(tmp_path / "folder", "own")
    tls = ClientTls(TlsFiles(ca_file=str(link / authorities.name)), verify=True)
    before = tls()
    link.unlink()
    link.symlink_to("x" * 300)
    assert tls() is before


def test_the_system_authorities_are_read_again(http, tmp_path, monkeypatch):
    """Those of `SSL_CERT_FILE`, which a platform may mount."""
    own, other = write_certificate(tmp_path, "own"), write_certificate(tmp_path, "other")
    authorities = tmp_path / "ca.crt"
    authorities.write_bytes(other.read_bytes())
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities))

    async def scene():
        tls = ClientTls(TlsFiles(), verify=True)
        async with engine(http, own) as where:
            before = await fetch(tls, where)
            authorities.write_bytes(own.read_bytes() + b"\n")
            return before, await fetch(tls, where)

    assert asyncio.run(scene()) == (client.FetchFailed("tls"), b"page")


def test_an_engine_gets_the_certificate_of_the_client(http, tmp_path):
    """Also where certificates of engines are not checked."""
    own, ours = write_certificate(tmp_path, "own"), write_certificate(tmp_path, "ours")
    files = TlsFiles(cert_file=str(ours), key_file=str(ours.with_suffix(".key")))

    async def scene():
        async with engine(http, own, clients=ours) as where:
            return [
                await fetch(ClientTls(chosen, verify=False), where)
                for chosen in (files, TlsFiles())
            ]

    page, refused = asyncio.run(scene())
    assert page == b"page"
    assert isinstance(refused, client.FetchFailed)


@pytest.mark.parametrize(
    ("key", "text"), [("ca_file", None), ("ca_file", "no PEM"), ("cert_file", "no PEM")]
)
def test_files_that_cannot_be_read_are_refused_at_the_start(tmp_path, key, text):
    """The error names the setting."""
    path = tmp_path / "file"
    if text is not None:
        path.write_text(text)
    files = (
        {"cert_file": str(path), "key_file": str(path)} if key != "ca_file" else {key: str(path)}
    )
    with pytest.raises(ConfigError) as refused:
        ClientTls(TlsFiles(**files), verify=True)
    assert refused.value.where == f"scrape.tls.{key}"
