"""JSON of which every value is one line for every reader of lines."""

import json

import pytest

from weft.kernel.text.json_lines import encode_each, encode_json

BREAKS = "".join(character for character in map(chr, range(0x3000)) if len(f"a{character}b".splitlines()) > 1)


@pytest.mark.parametrize("text", [BREAKS, f"\u00e9{BREAKS}\u4e2d", "\u2027\u202a\u0084 \u201c\u2014"])
def test_text_with_any_line_break_is_one_line_and_the_same_text(text: str) -> None:
    line = encode_json({text: [text]}).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {text: [text]}


def test_each_value_is_one_line() -> None:
    texts = [f"a{BREAKS}", "", '","', "b\\"]
    assert encode_each(texts) == b"".join(encode_json(text) + b"\n" for text in texts)
