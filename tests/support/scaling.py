"""Configurations of pickers that scale."""

from __future__ import annotations

import json

from extproc.config import loader
from extproc.config.settings import Settings

_HEAD = {"apiVersion": "extproc/v1alpha1", "kind": "ExtProcConfig"}


def configured(*, scaling, holding=None, pool=None, **sections) -> Settings:
    """Settings of a picker on free loopback ports with one pool that is scaled."""
    ports = {"grpc_port": 0, "grpc_health_port": 0, "metrics_port": 0}
    tree = {
        **_HEAD,
        "server": {"host": "127.0.0.1", "secure_serving": False, **ports},
        "pool": {**(pool or {}), "autoscaling": scaling},
        "flow_control": holding or {},
        "scrape": {"enabled": False},
        "scheduling": {"strategy": "least-request"},
        **sections,
    }
    return loader.settings(loader.parse(json.dumps(tree), where="test"))
