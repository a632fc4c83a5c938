"""What an engine says was too long: the prompt, or the prompt and the limit of the answer's length together. Pure."""

import re

NO_LIMIT = 0
"""No limit has to be sent: the engine stops at the end of its context, before the requested limit."""

_MAX_WORDS_CHARS = 2_000
"""Only the beginning of a refusal is read, which an engine may make as long as it likes."""
_NUMBER = r"(?<![\w.,\-])(\d{1,12}(?:[,_]\d{3}){0,3})(?![\w\-]|[.,]\d)"
_ANSWER = re.compile(
    r"max_?(completion|new|output|total)?_?tokens|completion|output\ tokens|in\ the\ output|requested\ tokens",
    re.IGNORECASE | re.VERBOSE,
)
_SUM = re.compile(rf"{_NUMBER}\s*\+\s*{_NUMBER}\s*>\s*{_NUMBER}")
"""Anthropic: "180000 + 32000 > 200000"."""
_OF_PROMPT = re.compile(
    rf"{_NUMBER}(?!\s(?:output|completion))[^\d,.;:>()]{{0,25}}?(?:input|prompt|message)"
    rf"|(?:input|prompt|messages)[^\d+]{{0,25}}?{_NUMBER}",
    re.IGNORECASE,
)
_OF_CONTEXT = re.compile(
    rf"(?:context|model_len|seq_len|\blimit)[^\d>+]{{0,40}}?{_NUMBER}|{_NUMBER}\s(?:token|maximum)?\s?context|<=\s*{_NUMBER}",
    re.IGNORECASE,
)
_ABOUT_CONTEXT = re.compile(r"context|model_len|seq_len", re.IGNORECASE)


def blames_answer_limit(words: str) -> bool:
    """Whether an engine's refusal says that the limit of the answer does not fit, and not that the prompt does not."""
    words = words[:_MAX_WORDS_CHARS]
    prompt, context = _prompt_and_context(words)
    is_too_long = prompt is not None and context is not None and prompt >= context
    return _ANSWER.search(words) is not None and not is_too_long


def room_for_answer(words: str, limit: int) -> int | None:
    """Returns the limit of the answer that fits, by an engine's refusal of a request with `limit`.

    NO_LIMIT: the engine's context ends the answer before `limit`, and the engine does not say where. None: the limit is
    not at fault, or nothing is left.
    """
    if not blames_answer_limit(words):
        return None
    words = words[:_MAX_WORDS_CHARS]
    numbers = [_value(text) for text in re.findall(_NUMBER, words)]
    prompt, context = _prompt_and_context(words)
    if context is not None and not _SUM.search(words):
        # A total also has what is neither messages nor answer, such as functions.
        totals = [each - limit for each in numbers if each >= limit + (prompt or 1) and each != context]
        prompt = max(totals, default=prompt)
    if prompt is not None and context is not None:
        return _room(context - prompt, limit)
    if _ABOUT_CONTEXT.search(words) is not None:
        return NO_LIMIT
    return _room(max((each for each in numbers if each < limit), default=0), limit)


def _prompt_and_context(words: str) -> tuple[int | None, int | None]:
    if (found := _SUM.search(words)) is not None:
        return _value(found[1]), _value(found[3])
    return _first(_OF_PROMPT, words), _first(_OF_CONTEXT, words)


def _room(tokens: int, limit: int) -> int | None:
    return tokens if 0 < tokens < limit else None


def _first(pattern: re.Pattern[str], words: str) -> int | None:
    found = pattern.search(words)
    return None if found is None else next(_value(text) for text in found.groups() if text)


def _value(text: str) -> int:
    return int(re.sub(r"\D", "", text))
