"""The bytes of tokens, by the two families of tokenizers."""

import pytest

from runner_svc.engine_host.text_routes import TokenBytes

BYTE_LEVEL = {"decoder": {"type": "ByteLevel"}, "added_tokens": [{"content": "<|im_end|>"}, {"content": "Ġadded"}]}
SENTENCES = {
    "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    "added_tokens": [{"content": "<bos>"}],
}


@pytest.mark.parametrize(
    ("tokenizer", "token", "expected"),
    [
        (BYTE_LEVEL, "Hello", b"Hello"),
        (BYTE_LEVEL, "Ġthe", b" the"),
        (BYTE_LEVEL, "Ċ", b"\n"),
        (BYTE_LEVEL, "Ã¤", "ä".encode()),
        (BYTE_LEVEL, "<|im_end|>", b"<|im_end|>"),
        (BYTE_LEVEL, "Ġadded", "Ġadded".encode()),
        (BYTE_LEVEL, "☃", "☃".encode()),
        ({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}}, "Ġ", b" "),
        (SENTENCES, "▁the", b" the"),
        (SENTENCES, "<0xE2>", b"\xe2"),
        (SENTENCES, "<0xZZ>", b"<0xZZ>"),
        (SENTENCES, "ä", "ä".encode()),
        (SENTENCES, "<bos>", b"<bos>"),
        ({"decoder": None}, "Ġ", "Ġ".encode()),
    ],
)
def test_token_is_decoded_as_its_tokenizer_defines(tokenizer: dict[str, object], token: str, expected: bytes) -> None:
    assert TokenBytes(tokenizer).of(token) == expected


def test_every_byte_has_one_letter_in_byte_level_tokenizers() -> None:
    alphabet = TokenBytes(BYTE_LEVEL)._bytes
    assert sorted(alphabet.values()) == list(range(256))
