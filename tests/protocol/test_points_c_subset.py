from __future__ import annotations

from typing import Any

import pytest

from extproc.protocol.exchange import ExchangeSettings
from tests.support import ext_proc_script, peer
from tests.support.pool_fixture import PoolFixture, load

FIRST, SECOND, THIRD = "192.168.1.1:8000", "192.168.1.2:8000", "192.168.1.3:8000"
#: The second has the least load, the third by far the most.
LOADS = {FIRST: load(3, 0.2), SECOND: load(0, 0.1), THIRD: load(10, 0.9)}
RANKS = ("10.0.0.1:3000", "10.0.0.1:3002", "10.0.0.1:3004", "[fd00::1]:3000", "[fd00::1]:3002")
TEST_MODE = ExchangeSettings(1 << 20, conformance=True)
NO_ENDPOINTS = ext_proc_script.refuse(
    503,
    message="inference error: ServiceUnavailable - "
    "failed to find endpoint candidates for serving the request",
    kind="server_error",
    reason="rejected-no-endpoints",
    retry_after="1",
)


def picked(subset: Any, house: PoolFixture) -> str:
    """The endpoint of a request with a hint; empty for a 503."""
    message = ext_proc_script.request_headers(ends=True, metadata=peer.hinted(subset))
    (reply,) = ext_proc_script.Talk(house.decide).hear(message)
    if reply == NO_ENDPOINTS:
        return ""
    return reply.headers[peer.DESTINATION]


def allowed(subset: Any, *addresses: str) -> list[str]:
    """Everybody a hint allows, in pool order, by asking for all fallbacks."""
    pool_fixture = PoolFixture(dict.fromkeys(addresses), fallbacks=len(addresses))
    destinations = picked(subset, pool_fixture).split(",")
    return [address for address in addresses if address in destinations]


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        peer.metadata_of({}),
        peer.metadata_of({"other": {peer.HINT_KEY: [THIRD]}}),
        peer.metadata_of({peer.HINT: {"other": [THIRD]}}),
    ],
    ids=["nil", "empty", "other namespace", "no key"],
)
def test_045_without_a_hint_every_endpoint_is_a_candidate(metadata: Any):
    """No hint: the best of all endpoints is picked, and all of them are candidates."""
    pool_fixture = PoolFixture(LOADS, fallbacks=2)
    (reply,) = ext_proc_script.Talk(pool_fixture.decide).hear(
        ext_proc_script.request_headers(ends=True, metadata=metadata)
    )
    order = reply.headers[peer.DESTINATION].split(",")
    assert order[0] == SECOND
    assert sorted(order) == [FIRST, SECOND, THIRD]


def test_046_a_hint_with_a_single_endpoint_is_obeyed():
    """The only endpoint a hint names is picked despite its load."""
    assert picked([THIRD], PoolFixture(LOADS)) == THIRD


def test_047_the_best_of_a_hint_is_picked():
    """Among several hinted endpoints the best one is picked."""
    assert picked([FIRST, SECOND, THIRD], PoolFixture(LOADS)) == SECOND
    assert picked([FIRST, THIRD], PoolFixture(LOADS)) == FIRST


def test_048_a_hint_without_a_match_is_refused():
    """A hint that names no endpoint of the pool: 503 with the reference's text and the reason."""
    hint = peer.hinted(["192.168.1.99:8000"])
    headers = {**ext_proc_script.PLAIN, ":path": "/x"}
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers, metadata=hint),
            ext_proc_script.request_body(b"x", ends=True, metadata=hint),
            NO_ENDPOINTS,
        ],
        PoolFixture(LOADS).decide,
    )


@pytest.mark.parametrize("subset", [[], "", " , ,", [""], [" ", ","]])
def test_049_an_empty_hint_allows_no_endpoint(subset: Any):
    """A hint that is there and names no endpoint: 503."""
    assert picked(subset, PoolFixture(LOADS)) == ""


def test_050_a_hint_as_one_string():
    """One string with commas names several endpoints."""
    assert allowed(f"{FIRST},{THIRD}", *LOADS) == [FIRST, THIRD]


def test_051_a_list_element_with_commas_is_split():
    """A list element that holds commas names several endpoints."""
    assert allowed([f"{FIRST},{THIRD}"], *LOADS) == [FIRST, THIRD]


@pytest.mark.parametrize(
    ("subset", "expected"),
    [
        (["10.0.0.1"], RANKS[:3]),
        (["10.0.0.1:3002"], RANKS[1:2]),
        (["10.0.0.1:9999"], ()),
        (["fd00::1"], RANKS[3:]),
        (["[fd00::1]"], RANKS[3:]),
        (["[fd00::1]:3002"], RANKS[4:]),
        (["[fd00::1]:9999"], ()),
        (["10.0.0.1:3000", "fd00::1"], (RANKS[0], *RANKS[3:])),
        (["10.0.0"], ()),
        (["3000"], ()),
    ],
)
def test_052_bare_addresses_and_ports(subset: list[str], expected: tuple[str, ...]):
    """A bare IP allows all its ports, ip:port that port, a wrong port none; IPv6 too."""
    assert allowed(subset, *RANKS) == list(expected)


@pytest.mark.parametrize(
    "subset",
    [
        [f"  {FIRST} ", "", " "],
        f" {FIRST} , ,",
        [7, None, True, {"a": FIRST}, [FIRST], FIRST],
        [FIRST, FIRST],
    ],
)
def test_053_blanks_and_other_types_are_dropped(subset: Any):
    """Tokens are trimmed, empty ones dropped, elements that are no strings ignored."""
    assert allowed(subset, *LOADS) == [FIRST]


@pytest.mark.parametrize("value", [7, True, None, {"a": FIRST}])
def test_053_a_hint_of_another_type_is_ignored(value: Any):
    """A hint that is neither a list nor a string hints nothing."""
    assert allowed(value, *LOADS) == [FIRST, SECOND, THIRD]


@pytest.mark.parametrize("mode", ["DUPLEX", "BUFFERED", "STREAMED", "NONE"])
def test_054_the_hint_counts_for_bodiless_requests(mode: str):
    """A request without body goes where the hint says, in every mode."""
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(ends=True, metadata=peer.hinted([THIRD])),
            ext_proc_script.route(THIRD),
        ],
        PoolFixture(LOADS).decide,
        modes=(mode, "NONE"),
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (THIRD, THIRD),
        ("192.168.1.3", THIRD),
        (f" {THIRD} ,", THIRD),
        (f"{FIRST},{THIRD}", FIRST),
    ],
)
@pytest.mark.parametrize("hint", [None, [SECOND]])
def test_055_the_selection_header_beats_the_hint(value: str, expected: str, hint: Any):
    """In test mode the selection header limits the pick, whatever the metadata says and where."""
    metadata = None if hint is None else peer.hinted(hint)
    headers = {**ext_proc_script.PLAIN, ":path": "/x", "test-epp-endpoint-selection": value}
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers, metadata=metadata),
            ext_proc_script.request_body(b"x", ends=True, metadata=metadata),
            ext_proc_script.route(expected, removes=["test-epp-endpoint-selection"]),
            ext_proc_script.hand_on(b"x", ends=True),
        ],
        PoolFixture(LOADS).decide,
        settings=TEST_MODE,
    )


def test_055_the_selection_header_is_dead_outside_test_mode():
    """Without test mode the selection header selects nothing and is removed."""
    headers = {**ext_proc_script.PLAIN, "test-epp-endpoint-selection": THIRD}
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers, ends=True),
            ext_proc_script.route(SECOND, removes=["test-epp-endpoint-selection"]),
        ],
        PoolFixture(LOADS).decide,
    )


def test_055_selection_by_bracketed_ipv6():
    """IPv6 endpoints are selected in bracket form."""
    headers = {**ext_proc_script.PLAIN, "test-epp-endpoint-selection": "[fd00::1]:3002"}
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers, ends=True),
            ext_proc_script.route("[fd00::1]:3002", removes=["test-epp-endpoint-selection"]),
        ],
        PoolFixture(dict.fromkeys(RANKS)).decide,
        settings=TEST_MODE,
    )


def test_056_foreign_addresses_are_ignored():
    """Addresses of other pools in the selection header do not matter if one of ours is there."""
    headers = {
        **ext_proc_script.PLAIN,
        "test-epp-endpoint-selection": f"9.9.9.9,8.8.8.8:80,{THIRD}",
    }
    ext_proc_script.play(
        [
            ext_proc_script.request_headers(headers, ends=True),
            ext_proc_script.route(THIRD, removes=["test-epp-endpoint-selection"]),
        ],
        PoolFixture(LOADS).decide,
        settings=TEST_MODE,
    )


def test_058_ranks_of_an_address_are_distinct():
    """Of several ranks on one address only the named ports are ever picked."""
    assert allowed(["10.0.0.1:3002"], *RANKS) == [RANKS[1]]
    assert allowed(["10.0.0.1:3000", "10.0.0.1:3004"], *RANKS) == [RANKS[0], RANKS[2]]
    pool_fixture = PoolFixture(dict.fromkeys(RANKS), profile="random")
    picks = {picked(["10.0.0.1:3000,10.0.0.1:3004"], pool_fixture) for _ in range(50)}
    assert picks == {RANKS[0], RANKS[2]}


def test_059_one_endpoint_by_default():
    """Without the option exactly one endpoint is named."""
    assert picked([FIRST, SECOND], PoolFixture(LOADS)) == SECOND


def test_059_fallbacks_in_order_and_inside_the_hint():
    """With the option: an ordered comma list, no blanks, no duplicates, all of it hinted."""
    assert picked([THIRD, FIRST], PoolFixture(LOADS, fallbacks=5)) == f"{FIRST},{THIRD}"
    assert picked([FIRST, SECOND, THIRD], PoolFixture(LOADS, fallbacks=1)) == f"{SECOND},{FIRST}"
