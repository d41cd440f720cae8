from __future__ import annotations

import pytest

from extproc.discovery.kubernetes.api_responses import ApiError, Denials

NO, AWAY = ApiError(403, "no"), ApiError(0, "no answer")


@pytest.mark.parametrize("before", [b"{}", ApiError(404, "none"), ApiError(409, "conflict")])
def test_denials_of_a_granted_verb_count_from_the_fourth(before):
    """An API server that has just started knows no Roles; a failure in between begins anew."""
    denials = Denials()
    assert not denials.is_missing("get", before)
    assert [denials.is_missing("get", NO) for _ in range(5)] == [False, False, False, True, True]
    assert not denials.is_missing("get", AWAY)
    assert [denials.is_missing("get", NO) for _ in range(4)] == [False, False, False, True]


def test_denials_of_a_never_granted_verb_count_at_once():
    """Whatever else is allowed: people are waiting for the name of the right."""
    denials = Denials()
    denials.is_missing("get", b"{}")
    assert denials.is_missing("patch", NO)
