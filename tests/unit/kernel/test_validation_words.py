"""What pydantic says of a value, in the words of weft."""

from typing import Annotated, Any, Literal

import pytest
from kit.library_words import library_words
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from weft.kernel.errors.validation_words import plain_words


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Checked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = "a"

    @field_validator("name")
    @classmethod
    def _require_short(cls, name: str) -> str:
        if len(name) > 3:
            raise ValueError("must be short")
        return name


WRONG: tuple[tuple[Any, Any, str], ...] = (
    (int, "x", "must be a whole number"),
    (int, 1.5, "must be a whole number"),
    (float, [], "must be a number"),
    (bool, "perhaps", "must be true or false"),
    (str, 1, "must be a text"),
    (list[int], 1, "must be a list"),
    (dict[str, int], 1, "must be an object"),
    (Checked, 1, "must be an object"),
    (Cat, {}, "is required"),
    (Checked, {"nmae": 1}, "there is no such field"),
    (Checked, {"name": "long name"}, "must be short"),
    (Annotated[int, Field(ge=3)], 2, "must be at least 3"),
    (Annotated[int, Field(le=3)], 4, "must be at most 3"),
    (Annotated[float, Field(gt=0)], 0, "must be greater than 0"),
    (Annotated[str, Field(max_length=2)], "abc", "must have at most 2 characters"),
    (Annotated[list[int], Field(min_length=1)], [], "must have at least 1 item, and has 0"),
    (Annotated[str, Field(pattern="^a$")], "b", "must match pattern '^a$'"),
    (Literal["a", "b"], "c", "must be 'a' or 'b'"),
    (Annotated[Cat | Dog, Field(discriminator="kind")], {"kind": "cow"}, "has 'kind' 'cow'; it must be 'cat', 'dog'"),
    (Annotated[Cat | Dog, Field(discriminator="kind")], {}, "needs 'kind'"),
)


@pytest.mark.parametrize(("kind", "value", "words"), WRONG)
def test_validation_errors_avoid_library_wording(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(value)
    said = refused.value.errors()[0]["msg"]
    assert plain_words(said) == words
    assert library_words(words) == []


def test_unreplaced_library_wording_is_detected() -> None:
    for kind, value, _ in WRONG:
        with pytest.raises(ValidationError) as refused:
            TypeAdapter(kind).validate_python(value)
        assert library_words(str(refused.value)) != []
    assert library_words("Value error, 'owner' is not one of 'user'") == ["Value error,"]
    assert library_words("--ctx: must be from 16 to 8192") == []
