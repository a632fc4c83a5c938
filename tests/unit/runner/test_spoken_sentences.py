"""The pieces in which a text is spoken."""

import pytest

from runner_svc.engine_host.speech import MAX_PIECE_CHARS, spoken_pieces


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        (" \n\t ", []),
        ("\x00\x07", []),
        ("Hello there.", ["Hello there."]),
        (
            "The fox jumps over the lazy dog. The answer is forty two, they say!",
            ["The fox jumps over the lazy dog.", "The answer is forty two, they say!"],
        ),
        ('He said: "It is the end of the world." Then he went home again.', None),
        ("A heading of a chapter here\n\nA paragraph that comes after it.", None),
    ],
)
def test_text_is_split_between_sentences(text: str, pieces: list[str] | None) -> None:
    found = spoken_pieces(text)
    assert found == pieces if pieces is not None else len(found) == 2


def test_short_sentences_are_grouped() -> None:
    assert spoken_pieces("Dr. Who is here. So. It is.") == ["Dr. Who is here. So. It is."]


def test_chinese_and_japanese_marks_end_a_sentence_without_a_space() -> None:
    sentence = "\u3053\u308c\u306f\u3068\u3066\u3082\u9577\u3044\u6587" * 4 + "\u3002"
    assert spoken_pieces(sentence * 2) == [sentence, sentence]


@pytest.mark.parametrize("text", ["word " * 500, "x" * 3000, "one, two and three, " * 100, ", " * 900])
def test_chunks_stay_within_the_maximum_and_lose_no_word(text: str) -> None:
    pieces = spoken_pieces(text)
    assert all(0 < len(piece) <= MAX_PIECE_CHARS for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_control_characters_and_lone_surrogates_become_spaces() -> None:
    assert spoken_pieces("one\x00two\ud800three\x1b[31m") == ["one two three [31m"]
