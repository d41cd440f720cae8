from __future__ import annotations

import msgspec
import pytest

from extproc.config import pool_sections, pools

#: A pool section for each source.
SECTIONS = {
    "endpoints": {"endpoints": ["10.0.0.1:8000"]},
    "endpoints_file": {"endpoints_file": "FILE"},
    "kubernetes": {"kubernetes": {"inference_pool": "p"}},
    "autoscaling.launch": {"autoscaling": {"launch": {"command": ["engine", "{port}"]}}},
}

DESCRIBED = {
    "endpoints": "1 listed of pool a",
    "endpoints_file": "1 in FILE, watched of pool a",
    "kubernetes": "from Kubernetes: InferencePool p (inference.networking.k8s.io) of pool a",
    "autoscaling.launch": "started here of pool a: engine {port}",
}


@pytest.mark.parametrize("source", pools.SOURCES, ids=lambda source: source.key)
def test_every_source_is_selected_by_its_setting_and_described(source, tmp_path):
    """Each key selects its row alone, and its description states what the source is."""
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: ['10.0.0.2:8000']\n", encoding="utf-8")
    section = SECTIONS[source.key] | {"name": "a"}
    if "endpoints_file" in section:
        section["endpoints_file"] = str(path)
    pool = msgspec.convert(section, pool_sections.PoolSource)
    assert pools.configured_sources(pool) == [source]
    source.check(pool, "x")
    first, *_ = source.describe(pool)
    assert first == DESCRIBED[source.key].replace("FILE", str(path))


def test_a_pool_without_a_source_has_none():
    """An empty pool section selects no source."""
    assert pools.configured_sources(pool_sections.PoolSource()) == []
