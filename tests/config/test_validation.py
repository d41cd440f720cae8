from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import pytest

from extproc.config import validation
from extproc.errors import ConfigError


class Cat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="cat"):
    lives: int = 9
    mood: Literal["calm", "wild"] = "calm"


class Dog(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="dog"):
    name: str = ""


class Household(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pet: Cat | Dog | None = None
    more: Sequence[Cat | Dog] = ()


def convert(tree):
    return validation.to_struct(tree, Household, where="h")


def test_a_tag_selects_the_struct():
    """Each member of a union takes its own keys."""
    household = convert(
        {"pet": {"kind": "cat", "lives": 3}, "more": [{"kind": "dog", "name": "x"}]}
    )
    assert household == Household(Cat(3), [Dog("x")])
    assert convert({"pet": None}) == Household()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"pet": {"lives": 3}}, "h: pet: expected the key kind: one of cat, dog, got .* add kind"),
        (
            {"pet": {"kind": "cta"}},
            "h: pet.kind: expected one of cat, dog, got .* did you mean cat?",
        ),
        ({"pet": {"kind": 3}}, "h: pet.kind: expected one of cat, dog, got 3; write cat"),
        ({"pet": {"kind": "dog", "lives": 3}}, "h: pet.lives: expected one of kind, name,"),
        ({"pet": {"kind": "cat", "lives": "x"}}, "h: pet.lives: expected a whole number"),
        ({"pet": {"kind": "cat", "mood": "wlid"}}, "h: pet.mood: .* did you mean wild?"),
        ({"more": [{"kind": "cat", "mood": "wlid"}]}, r"h: more\[0\].mood: .* did you mean wild?"),
        ({"more": [{"kind": "cat"}, {"kin": "dog"}]}, r"h: more\[1\]: expected the key kind"),
        ({"pet": 3}, "h: pet: expected a mapping"),
    ],
)
def test_errors_name_the_fields_of_the_selected_struct(tree, message):
    """A key is unknown to the member the tag names, and nearest names are that member's."""
    with pytest.raises(ConfigError, match=message):
        convert(tree)


class Moods(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    now: Literal["calm", "wild"] | None = None
    past: Sequence[Literal["calm", "wild"]] | None = None
    usual: frozenset[Literal["calm", "wild"]] = frozenset()
    causes: Mapping[Literal["calm", "wild"], str] = {}
    by_day: Mapping[str, Literal["calm", "wild"]] = {}
    only: Literal["calm"] | None = None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"now": "wlid"}, "h: now: expected one of calm, wild, got 'wlid'; did you mean wild?"),
        ({"now": "x"}, "h: now: expected one of calm, wild, got 'x'; write calm"),
        ({"past": ["calm", "wlid"]}, r"h: past\[1\]: .* did you mean wild?"),
        ({"usual": ["wlid"]}, r"h: usual\[0\]: .* did you mean wild?"),
        ({"causes": {"wlid": "x"}}, "h: causes: .* got 'wlid'; did you mean wild?"),
        ({"by_day": {"x": "wlid"}}, "h: by_day: .* got 'wlid'; did you mean wild?"),
        ({"only": "x"}, "h: only: expected calm, got 'x'; write calm"),
    ],
)
def test_errors_name_the_values_of_a_choice(tree, message):
    """Also of one that may be absent, and of keys and items of collections."""
    with pytest.raises(ConfigError, match=message):
        validation.to_struct(tree, Moods, where="h")
