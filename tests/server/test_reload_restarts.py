"""Fields that a reload leaves to a restart, beside those that it changes at once."""

from __future__ import annotations

import pytest

from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from tests.server.test_reload_fields import busy
from tests.support.reloading import ReloadingScene, read

pytestmark = pytest.mark.usefixtures("level")

BUSY = "pool: {endpoints: ['10.0.0.1:8000']}\nflow_control: {enabled: %s}\n"


async def test_flow_control_is_enabled_by_a_restart_only():
    """Busy engines get requests as before without flow control, and with it requests are queued."""
    for started, wanted in (("false", "true"), ("true", "false")):
        untouched, reloaded = (ReloadingScene(read(BUSY % started)) for _ in range(2))
        reloaded.read_again(read(BUSY % wanted))
        assert busy(reloaded) == busy(untouched)
        assert list(reloaded.picker.pool_registry.flow_controllers) == list(
            untouched.picker.pool_registry.flow_controllers
        )


async def test_pools_discovered_later_use_the_new_settings():
    """A pool that Kubernetes brings after a reload has live fields as read, and no others."""
    scene = ReloadingScene(
        read("cluster: {discover_pools: cluster}\nprefix: {capacity_blocks: 7}\n")
    )
    scene.read_again(
        read(
            "cluster: {discover_pools: cluster}\nprefix: {capacity_blocks: 9}\n"
            "flow_control: {enabled: true}\nscheduling: {strategy: random}\n"
        )
    )
    scene.picker.pool_registry.on_pools_changed(
        {"n/p": DiscoveredPool((Endpoint("10.0.0.1:1"),))}, ()
    )
    runtime = scene.picker.pool_registry.by_name["n/p"]
    assert runtime.flow_controller is None
    assert runtime.profile == "random"
    assert runtime.parts.settings.prefix.capacity_blocks == 7


def test_rules_that_no_pool_discovered_later_could_have_are_refused():
    """No pool is there yet to build them, and a pool that comes would not be served."""
    discovering = "cluster: {discover_pools: cluster}\n"
    without_prefixes = "prefix: {capacity_blocks: 0}\nscheduling: {strategy: random}\n"
    scene = ReloadingScene(read(discovering + without_prefixes))
    with pytest.raises(ConfigError, match="no source of prefix"):
        scene.read_again(read(discovering + "scheduling: {strategy: adaptive}\n"))
    scene.picker.pool_registry.on_pools_changed(
        {"n/p": DiscoveredPool((Endpoint("10.0.0.1:1"),))}, ()
    )
    assert scene.picker.pool_registry.by_name["n/p"].profile == "random"
