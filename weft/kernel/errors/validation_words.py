"""Validation error messages in plain words, independent of the library that made them."""

import re

_WHOLE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Field required", "is required"),
        (r"Extra inputs are not permitted", "there is no such field"),
        (r"Input should be a valid (?:dictionary|mapping|object)\b.*", "must be an object"),
        (r"Input should be a valid (?:list|tuple|array|set)\b.*", "must be a list"),
        (r"Input should be a valid (?:integer|whole number)\b.*", "must be a whole number"),
        (r"Input should be a valid number\b.*", "must be a number"),
        (r"Input should be a valid boolean\b.*", "must be true or false"),
        (r"Input should be a valid string\b.*", "must be a text"),
        (r"Input should be a finite number", "must be a finite number"),
        (r"Input should be None", "must be left out"),
        (r"Input tag (.+) found using (.+) does not match any of the expected tags: (.+)", r"has \2 \1; it must be \3"),
        (r"Unable to extract tag using discriminator (.+)", r"needs \1"),
    )
)
_BEGINNINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^(?:Value|Assertion) error, ", ""),
        (r"^[A-Z]\w+ should be greater than or equal to ", "must be at least "),
        (r"^[A-Z]\w+ should be less than or equal to ", "must be at most "),
        (r"^[A-Z]\w+ should (be|have|match) ", r"must \1 "),
    )
)
_AFTER = re.compile(r"\b(items?|characters?) after validation, not (\d+)$")


def plain_words(message: str) -> str:
    """Rephrases a pydantic message: "Input should be greater than 0" becomes "must be greater than 0".

    Other messages are returned unchanged.
    """
    for pattern, words in _WHOLE:
        found = pattern.fullmatch(message)
        if found is not None:
            return found.expand(words)
    for pattern, words in _BEGINNINGS:
        message = pattern.sub(words, message)
    return _AFTER.sub(r"\1, and has \2", message)
