from extproc.protocol import headers


def test_subset_hints_are_bounded():
    """Of a huge subset hint the first members count; those behind are not allowed."""
    many = ",".join(f"10.0.{at // 250}.{at % 250}" for at in range(20_000))
    members = headers.tokens(many)
    assert len(members) == headers.MAX_SUBSET_ENDPOINTS
    assert ",".join(members) == many[: len(",".join(members))]
    assert headers.tokens(" a , b,,") == ("a", "b")
