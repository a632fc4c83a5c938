"""Texts that clients keep for the mesh: readable by their tenant's gateways only."""

import pytest

from gateway.sealed_texts import SealedTexts
from weft.kernel.errors.error_tree import FieldError

KEY = b"k" * 32
SEALS = SealedTexts(KEY, "summary")


@pytest.mark.parametrize("text", ["", "so far: nothing", "größer 🙂" * 1_000, "half \ud800"])
def test_sealed_text_is_read_by_any_gateway_with_the_key(text: str) -> None:
    sealed = SEALS.seal("acme", text)
    assert SealedTexts(KEY, "summary").open("acme", sealed, "input[0].encrypted_content") == text
    assert not text or text not in sealed


def test_same_text_is_sealed_alike_and_another_text_with_another_nonce() -> None:
    assert SEALS.seal("acme", "a") == SEALS.seal("acme", "a")
    assert SEALS.seal("acme", "a")[6:22] != SEALS.seal("acme", "b")[6:22]
    assert SEALS.seal("acme", "a")[6:22] != SEALS.seal("other", "a")[6:22]


@pytest.mark.parametrize(
    ("reader", "tenant"),
    [(SEALS, "other"), (SEALS, ""), (SealedTexts(b"l" * 32, "summary"), "acme"), (SealedTexts(KEY, "page"), "acme")],
)
def test_another_tenant_key_or_purpose_cannot_open_it(reader: SealedTexts, tenant: str) -> None:
    with pytest.raises(FieldError, match="another service or tenant") as failure:
        reader.open(tenant, SEALS.seal("acme", "secret"), "input[0].encrypted_content")
    assert (failure.value.field, "secret" in str(failure.value)) == ("input[0].encrypted_content", False)


def test_changed_or_foreign_text_is_refused() -> None:
    good = SEALS.seal("acme", "secret")
    flipped = good[:20] + ("A" if good[20] != "A" else "B") + good[21:]
    for bad in (flipped, good[:-4], good[:10], "weft1.", "weft1.!!!", "weft1.é", "gAAAA", "", None, 7, {"a": 1}):
        with pytest.raises(FieldError):
            SEALS.open("acme", bad, "input[0].encrypted_content")


def test_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        SealedTexts(b"short", "summary")
