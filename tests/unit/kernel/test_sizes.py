"""Amounts of memory."""

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.values.units import parse_size, size_words


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("8GiB", 8 * 1024**3),
        ("8g", 8 * 1024**3),
        ("8GB", 8_000_000_000),
        ("1.5 GiB", 3 * 1024**3 // 2),
        ("512MiB", 512 * 1024**2),
        ("64k", 65_536),
        ("1048576", 1_048_576),
        ("300B", 300),
        ("9007199254740993", 9_007_199_254_740_993),
    ],
)
def test_amount_is_parsed(text: str, amount: int) -> None:
    assert parse_size(text, "--memory") == amount


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "0.0001b", "8 XiB", "8GiB8", "nan", "1e9", "9" * 40, "٣GiB"])
def test_invalid_amount_error_names_its_field(text: str) -> None:
    with pytest.raises(FieldError) as refusal:
        parse_size(text, "--memory")
    assert refusal.value.field == "--memory"


@pytest.mark.parametrize("text", ["300", "8", "1048575", "20.5"])
def test_number_without_a_unit_is_refused_with_a_remedy(text: str) -> None:
    """`weft mesh lease acquire --memory 300` held 300 bytes."""
    with pytest.raises(FieldError) as refusal:
        parse_size(text, "--memory")
    assert f"write {text}MiB or {text}GiB" in refusal.value.message


@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (12 * 1024, "12 KiB"),
        (512 * 1024**2, "512 MiB"),
        (5_476_083_302, "5.1 GiB"),
        (24 * 1024**3, "24 GiB"),
        (160 * 1024**3 + 5, "160 GiB"),
    ],
)
def test_amount_is_shown_with_useful_precision(amount: int, words: str) -> None:
    assert size_words(amount) == words
