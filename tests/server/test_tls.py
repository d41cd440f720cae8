"""Certificates that change while they are served."""

from __future__ import annotations

import datetime as dt
import errno
import logging
import os
import ssl

import pytest
from cryptography.exceptions import UnsupportedAlgorithm

from extproc.cli import flag_values
from extproc.errors import ConfigError
from extproc.server import tls


@pytest.mark.parametrize("raised", [RuntimeError(), UnsupportedAlgorithm("x"), MemoryError()])
def test_no_exception_reaches_grpc(tmp_path, monkeypatch, caplog, raised):
    """An exception for a new connection keeps the old pair in place, and is logged."""

    def fail(*_, **__):
        raise raised

    (tmp_path / "tls.key").write_text("key")
    (tmp_path / "tls.crt").write_text("certificate")
    monkeypatch.setattr(tls.serialization, "load_pem_private_key", fail)
    assert tls.KeyPair(tmp_path, tls.build_context).changed() is None
    assert len(caplog.messages) == 1
    assert type(raised).__name__ in caplog.messages[0]


def test_a_pipe_in_place_of_a_key_does_not_block(tmp_path, caplog):
    """The key is read when a client connects, in the thread that serves all."""
    os.mkfifo(tmp_path / "tls.key")
    (tmp_path / "tls.crt").write_text("certificate")
    files = tls.KeyPair(tmp_path, tls.build_context)
    assert (files.changed(), files.changed()) == (None, None)
    assert len(caplog.messages) == 1
    assert "a pipe, which is no regular file" in caplog.messages[0]


def test_a_chain_larger_than_a_usual_pipe_is_read():
    """A context is built of it as of a short one."""
    private, public = tls.self_signed_pair()
    chain = public * (1 + (1 << 16) // len(public))
    assert tls.build_context((private, chain)).get_ciphers()


def suites_of(names):
    """Cipher suites of TLS 1.2 of a context, and its oldest version."""
    context = tls.build_context(tls.self_signed_pair(), tls.TlsOptions(cipher_suites=names))
    suites = [suite["name"] for suite in context.get_ciphers() if suite["protocol"] != "TLSv1.3"]
    return suites, context.minimum_version


def test_every_cipher_suite_of_the_flag_is_served():
    """OpenSSL has all, in the order of the flag; TLS 1.2 is served if one is of it."""
    names = flag_values.read_suites("--tls-cipher-suites", ", ".join(flag_values.SUITES) + ",")
    older = [name for name in names.split(":") if not name.startswith("TLS_")]
    assert suites_of(names) == (older, ssl.TLSVersion.TLSv1_2)
    assert len(older) == 17


def test_cipher_suites_of_tls_1_3_alone_serve_no_earlier_version():
    """As in Go, where TLS 1.2 then has no suite."""
    names = flag_values.read_suites("--tls-cipher-suites", "TLS_AES_128_GCM_SHA256")
    assert suites_of(names)[1] == ssl.TLSVersion.TLSv1_3


def test_the_setting_of_cipher_suites_counts_before_the_environment(monkeypatch):
    """And an unknown name is reported by its place."""
    monkeypatch.setenv(tls.CIPHER_SUITES, "ECDHE-ECDSA-CHACHA20-POLY1305")
    assert suites_of("AES128-GCM-SHA256")[0] == ["AES128-GCM-SHA256"]
    assert suites_of("")[0] == ["ECDHE-ECDSA-CHACHA20-POLY1305"]
    with pytest.raises(ConfigError, match=r"server\.tls_cipher_suites"):
        suites_of("nothing")


KNOWN = "ECDHE-ECDSA-AES128-GCM-SHA256"


@pytest.mark.parametrize("separator", [":", ",", ";", " "])
@pytest.mark.parametrize("unknown", ["ECDHE-RSA-AES256-GCM-SHA38", "TLS_NOTHING"])
def test_an_unknown_cipher_suite_beside_a_known_one_is_refused(monkeypatch, separator, unknown):
    """OpenSSL would skip it; the error names it alone."""
    names = f"{KNOWN}{separator}{unknown}"
    with pytest.raises(ConfigError, match=f"server.tls_cipher_suites.*{unknown}") as refused:
        suites_of(names)
    assert KNOWN not in str(refused.value)
    monkeypatch.setenv(tls.CIPHER_SUITES, names)
    with pytest.raises(ConfigError, match=f"{tls.CIPHER_SUITES}.*{unknown}"):
        suites_of("")


def test_what_changes_a_list_of_cipher_suites_need_not_be_known(monkeypatch):
    """Exclusions of suites that are gone are usual, and gRPC names those of TLS 1.3 as well."""
    names = f"TLS_AES_128_GCM_SHA256:{KNOWN}:!EXPORT:!RC4:-3DES:+SHA:@SECLEVEL=2"
    monkeypatch.setenv(tls.CIPHER_SUITES, names)
    assert suites_of(names) == suites_of("") == ([KNOWN], ssl.TLSVersion.TLSv1_2)


def test_names_of_go_are_served_or_refused_in_the_setting():
    """They begin as those of TLS 1.3 do; newer releases of OpenSSL know them, older ones do not."""
    reason, served = "", None
    try:
        served = suites_of("TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256")
    except ConfigError as error:
        reason = str(error)
    known = (["ECDHE-RSA-AES128-GCM-SHA256"], ssl.TLSVersion.TLSv1_2)
    assert "server.tls_cipher_suites" in reason or served == known


#: End of a chain that begins with a good certificate.
BROKEN = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def write_pair(folder, pair):
    """Write a key and a certificate."""
    for name, data in zip(("tls.key", "tls.crt"), pair, strict=True):
        (folder / name).write_bytes(data)


def test_a_pair_that_openssl_refuses_leaves_the_old_one_in_force(tmp_path, caplog):
    """The warning stands in the log once, rather than a reload, and no connection is cut off."""
    caplog.set_level(logging.INFO, "extproc.server")
    private, public = tls.self_signed_pair()
    write_pair(tmp_path, (private, public))
    files = tls.KeyPair(tmp_path, tls.build_context)
    assert files.read()
    write_pair(tmp_path, (private, public + BROKEN))
    assert (files.changed(), files.changed()) == (None, None)
    assert [line.levelname for line in caplog.records] == ["WARNING"]
    assert "every certificate of tls.crt must be whole" in caplog.messages[0]
    write_pair(tmp_path, (private, public + public))
    assert files.changed()
    assert caplog.messages[1:] == ["certificate: reloaded"]


def test_a_pair_that_is_refused_is_not_read_again_until_it_changes(tmp_path, monkeypatch, caplog):
    """Connections cost two stats each and no line in the log, however many there are."""
    reads = []
    monkeypatch.setattr(
        tls, "open_regular", lambda name, flags: reads.append(name) or os.open(name, flags)
    )
    write_pair(tmp_path, (tls.self_signed_pair()[0], tls.self_signed_pair()[1]))
    files = tls.KeyPair(tmp_path, tls.build_context)
    assert [files.changed() for _ in range(30)] == [None] * 30
    assert len(reads) == 2
    assert len(caplog.messages) == 1
    assert "two that do not match" in caplog.messages[0]


def test_a_pair_that_cannot_be_read_for_a_passing_reason_is_read_again(
    tmp_path, monkeypatch, caplog
):
    """Though its files do not change any more: such as while too many files are open."""

    def fail(name: str, _flags: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name)

    write_pair(tmp_path, tls.self_signed_pair())
    files = tls.KeyPair(tmp_path, tls.build_context)
    with monkeypatch.context() as patch:
        patch.setattr(tls, "open_regular", fail)
        assert (files.changed(), files.changed()) == (None, None)
    assert len(caplog.messages) == 1
    assert files.changed()


def test_a_certificate_that_is_not_valid_at_a_time_is_named(tmp_path):
    """Each one of the chain; files that cannot be read are reported elsewhere."""
    now = dt.datetime.now(dt.UTC)
    assert list(tls.find_invalid_dates(tmp_path, now)) == []
    private, public = tls.self_signed_pair()
    write_pair(tmp_path, (private, public + public))
    assert list(tls.find_invalid_dates(tmp_path, now)) == []
    early, late = (dt.timedelta(days=days) for days in (-2, 4000))
    for shift, fault in ((early, " begins "), (late, " expired at ")):
        lines = list(tls.find_invalid_dates(tmp_path, now + shift))
        assert [fault in line for line in lines] == [True, True]


def test_a_reload_of_an_expired_certificate_is_a_warning(tmp_path, monkeypatch, caplog):
    """It is served, and stands in the log with its date."""
    write_pair(tmp_path, tls.self_signed_pair())
    files = tls.KeyPair(tmp_path, tls.build_context)
    assert files.read()
    monkeypatch.setattr(tls, "_VALID_DAYS", -0.5)
    write_pair(tmp_path, tls.self_signed_pair())
    assert files.changed()
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert " expired at " in line
