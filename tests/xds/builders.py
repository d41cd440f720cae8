"""Snapshots of resources that have a name and a version."""

from __future__ import annotations

from extproc.xds.resources import ASSIGNMENT, CLUSTER, XdsResource


def snapshot(clusters=None, **assignments):
    """A snapshot with a version for each name."""
    clusters = dict.fromkeys(assignments, "1") if clusters is None else clusters
    return {
        CLUSTER: {name: XdsResource(name, version, b"") for name, version in clusters.items()},
        ASSIGNMENT: {
            name: XdsResource(name, version, b"") for name, version in assignments.items()
        },
    }
