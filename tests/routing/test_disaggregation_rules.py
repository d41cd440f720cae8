"""Rules of stages that are refused, or warned of."""

from __future__ import annotations

import pytest

from extproc.config import factory, lint
from extproc.errors import ConfigError
from tests.routing.test_disaggregation import EPP, ESTIMATED, NATIVE, epp, native

ESTIMATING = "cost: {kind: estimated-time}"


@pytest.mark.parametrize(
    ("text", "lacking"),
    [
        (ESTIMATED.replace(ESTIMATING, "scorers: []"), "decode and prefill"),
        (ESTIMATED.replace(f", {ESTIMATING}", ""), "prefill"),
        (ESTIMATED.replace(f"    {ESTIMATING}\n", ""), "decode"),
    ],
)
def test_estimated_times_are_compared_where_both_profiles_estimate(text, lacking):
    """Without a prediction, the decider would send every prompt to another endpoint."""
    with pytest.raises(ConfigError, match=f"none in {lacking};") as caught:
        factory.build(native(text=text))
    assert caught.value.where.endswith("scheduling.disaggregation.prefill.decider")
    text = text.replace(
        "      profile:", "      decider: {kind: always-disagg-pd-decider}\n      profile:"
    )
    factory.build(native(text=text))


def test_estimated_times_are_compared_in_an_endpoint_picker_config_too():
    """The error names the plugin."""
    with pytest.raises(ConfigError, match="none in decode and prefill") as caught:
        factory.build(epp("{type: estimated-time-pd-decider, name: by-need}"))
    assert caught.value.where == "settings: plugins[4]"


def test_encode_has_no_time_to_compare():
    """Its requests have no prompt."""
    text = ESTIMATED + (
        "    encode: {profile: {cost: {kind: estimated-time}}, "
        "decider: {kind: estimated-time-pd-decider}}\n"
    )
    with pytest.raises(ConfigError, match="a decider for encode") as caught:
        factory.build(native(text=text))
    assert caught.value.where.endswith("scheduling.disaggregation.encode.decider")


ADAPTIVE = """apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling:
  strategy: adaptive
  disaggregation:
    prefill: {profile: {filters: [{kind: prefill-filter}], cost: {kind: estimated-time}}}
"""


@pytest.mark.parametrize(
    ("settings", "stages"),
    [
        (native(), ""),
        (epp(), ""),
        (native(text=ADAPTIVE), "prefill"),
        (
            native(text=NATIVE.replace("filters: [{kind: decode-filter}]", "filters: []")),
            "prefill and encode",
        ),
        (
            epp(text=EPP.replace("[{pluginRef: decode-filter}, ", "[")),
            "prefill and encode",
        ),
    ],
)
def test_a_routing_profile_without_a_filter_is_warned_of(settings, stages):
    """It takes endpoints of the other stages too."""
    warnings = [text for text in lint.find_warnings(settings) if "has no filter" in text]
    assert [f"to endpoints of {stages}: add decode-filter" in text for text in warnings] == (
        [True] if stages else []
    )
