from collections.abc import Sequence
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
