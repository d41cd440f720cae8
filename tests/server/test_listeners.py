import socket

import pytest

from extproc.config.settings import ServerSection
from extproc.errors import ConfigError
from extproc.server import ext_proc_servicer, transport


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_port_in_use_is_a_single_error(host, capfd):
    """The library is not asked to bind it, because it prints lines of its own about that."""
    listening = ext_proc_servicer.build_server(1 << 20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--grpc-port: .*port {port} to be free"):
            ext_proc_servicer.bind(listening, f"{host}:{port}", flag="--grpc-port")
    await listening.stop(None)
    assert capfd.readouterr() == ("", "")


async def test_a_host_in_brackets_is_no_host():
    """The error is about the host: a free port 0 cannot be missing."""
    listening = ext_proc_servicer.build_server(1 << 20)
    address = ServerSection(host="[::1]").grpc_address(0)
    with pytest.raises(ConfigError, match="--host: expected an address of this machine"):
        ext_proc_servicer.bind(listening, address, flag="--xds-port")
    await listening.stop(None)


def test_a_free_port_can_be_bound():
    """A socket that is closed leaves nothing behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert transport.is_taken("127.0.0.1", port)
    assert not transport.is_taken("127.0.0.1", port)
