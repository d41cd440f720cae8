from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.diagnostics import picker_diagnosis
from extproc.diagnostics.pages import PickerPages
from extproc.scrape.client import FetchedPage

READY = FetchedPage(b"ok\n")


def pools(*endpoints):
    return FetchedPage(json.dumps({"pools": {"": {"endpoints": endpoints}}}).encode())


GOOD = {"address": "10.0.0.1:8000", "health": "healthy"}


def findings(ready=READY, page=None):
    page = page or pools(GOOD)
    pages = PickerPages(url="http://127.0.0.1:9090", ready=ready, pools=page)
    return [result for result in picker_diagnosis.diagnose(pages) if result.severity != "fine"]


def test_a_picker_in_order_has_no_findings():
    """It is ready and has a healthy endpoint."""
    assert findings() == []


FAULTS = {
    "gone": ((FetchedPage(failure="refused"), None), "error", "picker_reachable"),
    "another server": (
        (FetchedPage(failure="status 404"), FetchedPage(failure="status 404")),
        "error",
        "picker_reachable",
    ),
    "not ready": ((FetchedPage(failure="status 503"), None), "error", "picker_ready"),
    "locked": ((READY, FetchedPage(failure="status 403")), "warning", "picker_pools"),
    "garbage": ((READY, FetchedPage(b"<html>")), "warning", "picker_pools"),
    "empty": ((READY, pools()), "error", "pool_empty"),
    "ejected": (
        (READY, pools({**GOOD, "health": "ejected", "cause": "5 failures"})),
        "warning",
        "endpoint_health",
    ),
    "distrusted": (
        (READY, pools({**GOOD, "distrusted": "frozen"})),
        "warning",
        "endpoint_distrusted",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_picker_is_a_finding(name):
    """With a fix."""
    (ready, page), severity, check = FAULTS[name]
    (result,) = findings(ready, page)
    assert (result.severity, result.check) == (severity, check)
    assert result.fix


@pytest.mark.parametrize(
    ("failure", "fix"),
    [("status 401", "another token is refused"), ("status 403", "on its machine")],
)
def test_pools_that_are_locked_name_the_key(failure, fix):
    """With a token, its machine is refused as well."""
    (result,) = findings(page=FetchedPage(failure=failure))
    assert fix in result.fix


@pytest.mark.parametrize(
    "address", ["", "8000", ":8000", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:70000", "a\r\nb:80"]
)
def test_an_address_that_is_none_is_left_out(address):
    """It goes into the head of a request."""
    assert picker_diagnosis.to_endpoint(picker_diagnosis.EndpointRow(address)) is None


@given(st.binary(max_size=100))
def test_any_page_of_pools_is_read(body):
    """It may be of another version, or of something else."""
    picker_diagnosis.read_pools(FetchedPage(body))


def test_settings_of_the_page_are_a_tree_as_of_a_file():
    """Only those that others are compared with; what is shortened, hidden or a list of pools is not."""
    rows = [
        ("server.secure_serving", "false"),
        ("server.grpc_port", "9000"),
        ("limits.max_body_bytes", "1000"),
        ("flow_control.bands[0].priority", "1"),
        ("responses.request_cost", '{"prompt":1...'),
        ("scheduling.fallbacks", "2"),
        ("scheduling.strategy", '"adaptive"'),
        ("scrape.enabled", "false"),
        ("scrape.path", '"/m"'),
        ("scrape.scheme", '"https"'),
        ("scrape.timeout_s", "2.5"),
        ("scrape.tls.ca_file", '"ca.pem"'),
        ("scrape.path.of_another_version", "1"),
        ("pool.endpoints", '["10.0.0.1:1"]'),
    ]
    page = {"settings": [{"path": path, "after": after} for path, after in rows]}
    body = json.dumps(page).encode()
    assert picker_diagnosis.read_configuration(FetchedPage(body=body)) == {
        "server": {"secure_serving": False},
        "limits": {"max_body_bytes": 1000},
        "scheduling": {"fallbacks": 2},
        "scrape": {
            "path": "/m",
            "scheme": "https",
            "timeout_s": 2.5,
            "tls": {"ca_file": "ca.pem"},
        },
    }


@pytest.mark.parametrize(
    "page", [FetchedPage(failure="status 403"), FetchedPage(body=b"{"), FetchedPage(body=b"\xff")]
)
def test_a_page_of_settings_that_cannot_be_read_has_none(page):
    """Another version, or one that wants a token."""
    assert picker_diagnosis.read_configuration(page) == {}
