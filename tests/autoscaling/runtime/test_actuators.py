from __future__ import annotations

import pkgutil

import msgspec
import pytest

from extproc.autoscaling.runtime import actuator
from extproc.config.autoscaling import ACTUATORS, ScalingSection, actuator_type

#: Values of the fields that select an actuator.
SETTINGS = {
    "target": {"target": {"name": "engines"}},
    "launch": {"launch": {"command": ["engine"]}},
    "exec": {"exec": ["scale", "{replicas}"]},
    "": {},
}


@pytest.mark.parametrize("row", ACTUATORS, ids=lambda row: row.key or "advisory")
def test_every_actuator_is_selected_by_its_setting_and_has_a_class(row):
    """Each key selects its row, and the class of the row has the members of the protocol."""
    section = msgspec.convert(SETTINGS[row.key], ScalingSection)
    assert actuator_type(section) is row
    assert row.describe(section)
    kind = pkgutil.resolve_name(row.implementation)
    members = {name for name in vars(actuator.Actuator) if not name.startswith("_")}
    assert members <= {*dir(kind), "scales"}
    assert isinstance(kind.scales, bool)
