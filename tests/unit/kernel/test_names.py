"""Names and identifiers from outside."""

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.names import MAX_NAME_CHARS, ascii_name, is_token, new_process_id, process_name, require_name


@pytest.mark.parametrize("name", ["qwen3", "Qwen2.5-7B", "smollm2-135m:q4_1", "a", "a" * MAX_NAME_CHARS])
def test_common_model_names_are_accepted(name: str) -> None:
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
def test_hostile_names_are_refused_with_their_field(name: str) -> None:
    with pytest.raises(FieldError) as refused:
        require_name(name, "model")
    assert refused.value.field == "model"


@pytest.mark.parametrize("text", ["a\r\nX-Evil: 1", "é", " ", "", "a" * 65, "tab\t"])
def test_identifiers_that_could_break_a_header_are_refused(text: str) -> None:
    assert not is_token(text, 64)


@pytest.mark.parametrize("name", ["router-box-5f1c02", "r:1", "a" * MAX_NAME_CHARS])
def test_start_id_contains_as_much_of_its_process_name_as_fits(name: str) -> None:
    first, second = new_process_id(name), new_process_id(name)
    assert first != second
    assert len(first) <= MAX_NAME_CHARS
    assert process_name(first) == process_name(second) == name[: MAX_NAME_CHARS - 25]


def test_letters_of_other_scripts_become_distinct_ascii_names() -> None:
    texts = ["über/模型", "uber/模型", "模型™", "über\u20137b", "\u0645\u06cc\u200c\u062e", "\uff4d1", "m1", "m\u0661"]
    names = list(map(ascii_name, texts))
    assert all(name.isascii() for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("text", ["m1\x9b2J", "m\u200b1", "m\u202e1", "m\u20031", "m\ue0001"])
def test_invisible_characters_are_not_encoded_as_letters(text: str) -> None:
    assert ascii_name(text) == text
