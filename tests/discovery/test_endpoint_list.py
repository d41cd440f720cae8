import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.discovery import endpoint_list
from extproc.errors import ConfigError
from tests.support.seeded import examples


def document(*endpoints):
    return endpoint_list.from_document({"endpoints": list(endpoints)}, where="pool.yaml")


@pytest.mark.parametrize(
    ("item", "entry"),
    [
        ("10.0.0.1:8000", endpoint_list.EndpointListEntry("10.0.0.1", 8000)),
        ("[fd00:0::1]:8000", endpoint_list.EndpointListEntry("fd00::1", 8000)),
        ("Engine-0.Example:8000", endpoint_list.EndpointListEntry("engine-0.example", 8000)),
        ({"address": "10.0.0.1", "port": 8000}, endpoint_list.EndpointListEntry("10.0.0.1", 8000)),
        (
            {"address": "10.0.0.1", "port": "8000"},
            endpoint_list.EndpointListEntry("10.0.0.1", 8000),
        ),
        ({"address": "fd00::1", "port": 8000}, endpoint_list.EndpointListEntry("fd00::1", 8000)),
        ({"address": "[fd00::1]", "port": 8000}, endpoint_list.EndpointListEntry("fd00::1", 8000)),
        ({"host": "engine", "port": 8000}, endpoint_list.EndpointListEntry("engine", 8000)),
        ({"address": "10.0.0.1:8000"}, endpoint_list.EndpointListEntry("10.0.0.1", 8000)),
        (
            {
                "name": "a",
                "namespace": "ns",
                "address": "10.0.0.1",
                "port": 1,
                "labels": {"gpu": "h100"},
            },
            endpoint_list.EndpointListEntry(
                "10.0.0.1", 1, name="a", labels={"namespace": "ns", "gpu": "h100"}
            ),
        ),
    ],
)
def test_the_forms_of_an_endpoint(item, entry):
    """Strings and mappings, IPv4, IPv6 and names, upstream's keys and ours."""
    assert document(item) == (entry,)


@pytest.mark.parametrize(
    ("item", "where", "message"),
    [
        ("10.0.0.1", "endpoints[1]", "add the port"),
        ("fd00::1", "endpoints[1]", "add the port"),
        ("fd00::1::2:80", "endpoints[1]", "brackets"),
        ("[10.0.0.1]:80", "endpoints[1]", "IPv6 address in the brackets"),
        ("10.0.0.256:80", "endpoints[1]", "an IP address or a host name"),
        ("http://a:80", "endpoints[1]", "leave out http:// and write a:80"),
        ("http://u:p@a:80", "endpoints[1]", "//...@a:80'; leave out http:// and write a:80"),
        ("a b:80", "endpoints[1]", "a host name"),
        ("a:0", "endpoints[1]", "a port from 1 to 65535"),
        ("a:65536", "endpoints[1]", "a port from 1 to 65535"),
        (7, "endpoints[1]", "got 7"),
        ({"port": 80}, "endpoints[1].address", "got nothing"),
        ({"address": "a"}, "endpoints[1].port", "got nothing"),
        ({"address": "a", "port": True}, "endpoints[1].port", "got True"),
        ({"address": "a:1", "port": 1}, "endpoints[1].port", "keep one"),
        ({"address": "a", "host": "a", "port": 1}, "endpoints[1]", "keep one"),
        ({"adress": "a", "port": 1}, "endpoints[1]", "did you mean `address`?"),
        ({"address": "a", "port": 1, "zzz": 1}, "endpoints[1]", "remove it"),
        ({"address": "a", "port": 1, "name": 3}, "endpoints[1].name", "quotes"),
        ({"address": "a", "port": 1, "labels": ["a"]}, "endpoints[1].labels", "got a list"),
        ({"address": "a", "port": 1, "labels": {"g": 80}}, "endpoints[1].labels.g", "quotes"),
        ("x:80", "endpoints[1]", "first at pool.yaml: endpoints[0]"),
    ],
)
def test_errors_name_their_path(item, where, message):
    """Each mistake is refused with its path and what to do."""
    with pytest.raises(ConfigError) as raised:
        document("x:80", item)
    assert raised.value.where == f"pool.yaml: {where}"
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (None, "got nothing"),
        ([], "got a list"),
        ({}, "endpoints: expected a list, got nothing"),
        ({"endpoints": {}}, "got a dict"),
        ({"endpoint": []}, "did you mean `endpoints`?"),
    ],
)
def test_a_document_of_another_shape_is_refused(loaded, message):
    """Only a mapping with a list `endpoints` is one."""
    with pytest.raises(ConfigError) as raised:
        endpoint_list.from_document(loaded, where="pool.yaml")
    assert message in str(raised.value)


def test_an_empty_list_is_allowed():
    """A pool may be empty, if its owner says so."""
    assert document() == ()


@pytest.mark.parametrize("listed", [["a"], ["a:1", "a:1"], ["a:1", "A:1"], ["::1:3"], ["[::1:3"]])
def test_invalid_addresses_are_refused(listed):
    """The place in the list is named in the message."""
    with pytest.raises(ConfigError, match=r"f: endpoints\[\d\]: expected"):
        endpoint_list.from_document({"endpoints": listed}, where="f")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["endpoints", "address", "host", "port", "name", "labels"])
            | st.integers()
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@hypothesis.given(_JSON | st.fixed_dictionaries({"endpoints": st.lists(_JSON, max_size=3)}))
@hypothesis.settings(max_examples=examples(150), deadline=None)
def test_any_document_is_read_or_refused(loaded):
    """Nothing but ConfigError is raised, and what is read has hosts and ports."""
    try:
        listed = endpoint_list.from_document(loaded, where="f")
    except ConfigError:
        return
    assert all(entry.host and 1 <= entry.port <= 65535 for entry in listed)


@hypothesis.given(st.text(max_size=20) | st.from_regex(r"[a-z0-9.:\[\]-]{1,20}", fullmatch=True))
@hypothesis.settings(max_examples=examples(150), deadline=None)
def test_any_address_is_read_or_refused(value):
    """Nothing but ConfigError is raised."""
    try:
        endpoint_list.from_document({"endpoints": [value]}, where="f")
    except ConfigError as error:
        assert error.where == "f: endpoints[0]"  # noqa: PT017 - raising is optional here


@pytest.mark.parametrize(
    ("item", "wanted"),
    [
        ({"name": "n" * 513}, "at most 512 characters"),
        ({"namespace": "n" * 513}, "at most 512 characters"),
        ({"labels": {"k" * 513: "v"}}, "keys of at most 512 characters"),
        ({"labels": {"k": "v" * 513}}, "at most 512 characters"),
        ({"labels": {str(at): "v" for at in range(257)}}, "at most 256 labels"),
    ],
)
def test_names_and_labels_are_bounded(item, wanted):
    """Longer names and more labels than any cluster has are an error that quotes little of them."""
    with pytest.raises(ConfigError) as raised:
        document({"address": "10.0.0.1", "port": 8000, **item})
    assert f"expected {wanted}" in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_endpoints_are_bounded():
    """A list has a bound on its endpoints, so that anchors of YAML cannot make a huge one."""
    entry = {"address": "10.0.0.1", "port": 8000}
    with pytest.raises(ConfigError, match="at most 16384 endpoints, got 16385"):
        document(*[entry] * 16_385)
