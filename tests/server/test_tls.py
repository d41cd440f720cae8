"""Certificates that change while they are served."""

from __future__ import annotations

import os

import pytest
from cryptography.exceptions import UnsupportedAlgorithm

from extproc.server import tls


@pytest.mark.parametrize("raised", [RuntimeError(), UnsupportedAlgorithm("x"), MemoryError()])
def test_no_exception_reaches_grpc(tmp_path, monkeypatch, raised):
    """An exception for a new connection keeps the old pair in place, and is logged."""

    def fail(*_, **__):
        raise raised

    (tmp_path / "tls.key").write_text("key")
    (tmp_path / "tls.crt").write_text("certificate")
    monkeypatch.setattr(tls.serialization, "load_pem_private_key", fail)
    results = []
    assert tls.KeyPair(tmp_path, tls.build_context).changed(results.append) is None
    assert len(results) == 1
    assert type(raised).__name__ in results[0]


def test_a_pipe_in_place_of_a_key_does_not_block(tmp_path):
    """The key is read when a client connects, in the thread that serves all."""
    os.mkfifo(tmp_path / "tls.key")
    (tmp_path / "tls.crt").write_text("certificate")
    results = []
    assert tls.KeyPair(tmp_path, tls.build_context).changed(results.append) is None
    assert "a pipe, which is no regular file" in results[0]


def test_a_chain_larger_than_a_usual_pipe_is_read():
    """A context is built of it as of a short one."""
    private, public = tls.self_signed_pair()
    chain = public * (1 + (1 << 16) // len(public))
    assert tls.build_context((private, chain)).get_ciphers()


#: End of a chain that begins with a good certificate.
BROKEN = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def test_a_pair_that_openssl_refuses_leaves_the_old_one_in_force(tmp_path):
    """The error is logged rather than a reload, and no connection is cut off by it."""
    private, public = tls.self_signed_pair()
    (tmp_path / "tls.key").write_bytes(private)
    (tmp_path / "tls.crt").write_bytes(public)
    files, results = tls.KeyPair(tmp_path, tls.build_context), []
    assert files.read()
    (tmp_path / "tls.crt").write_bytes(public + BROKEN)
    assert files.changed(results.append) is None
    assert "every certificate of tls.crt must be whole" in results[0]
    (tmp_path / "tls.crt").write_bytes(public + public)
    assert files.changed(results.append)
    assert results[1:] == ["reloaded"]
