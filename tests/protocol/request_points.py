"""A request and pools for the points of section B."""

from __future__ import annotations

from tests.support import ext_proc_script
from tests.support.pool_fixture import PoolFixture, load

CHAT = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'


THREE = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")


def build_pool(*addresses: str) -> PoolFixture:
    return PoolFixture(
        {address: load(0, 0.0) for address in addresses or (ext_proc_script.ADDRESS,)}
    )
