"""Traits of the body modes."""

import pytest

from extproc.protocol.messages import BODY_MODE_TRAITS, BodyMode


@pytest.mark.parametrize("mode", BodyMode)
def test_every_mode_has_traits(mode):
    """A mode is a row of the table, and a body is either buffered by Envoy or returned to it."""
    traits = BODY_MODE_TRAITS[mode]
    assert not (traits.is_buffered and traits.is_returned)
    assert traits.awaits_body == (traits.is_buffered or traits.is_returned)
