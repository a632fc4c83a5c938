"""Names and identifiers from outside."""

import pytest

from weft.kernel.errors import FieldError
from weft.kernel.names import MAX_NAME_CHARS, is_token, require_name


@pytest.mark.parametrize("name", ["qwen3", "Qwen2.5-7B", "smollm2-135m:q4_1", "a", "a" * MAX_NAME_CHARS])
def test_usual_model_names_are_accepted(name: str) -> None:
    assert require_name(name, "model") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../etc/passwd",
        "/absolute",
        "..\\x",
        "a\0b",
        "line\nbreak",
        "-rf",
        ".hidden",
        "trailing ",
        "mоdel",  # noqa: RUF001 - a Cyrillic letter that looks like an o
        "a" * (MAX_NAME_CHARS + 1),
        "a" * 10_240,
    ],
)
def test_hostile_names_are_refused_naming_the_field(name: str) -> None:
    with pytest.raises(FieldError) as refused:
        require_name(name, "model")
    assert refused.value.field == "model"


@pytest.mark.parametrize("text", ["a\r\nX-Evil: 1", "é", " ", "", "a" * 65, "tab\t"])
def test_identifiers_that_could_break_a_header_are_refused(text: str) -> None:
    assert not is_token(text, 64)
