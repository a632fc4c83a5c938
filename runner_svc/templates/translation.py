"""Languages of requests to translation models with a chat template like TranslateGemma's. Pure.

Such a template accepts one user message with one part: the text with source and target language codes. It does not
accept instructions.
"""

import re
from dataclasses import dataclass
from typing import Any

from weft.kernel.errors.error_tree import invalid_field

Json = dict[str, Any]

SOURCE, TARGET = "source_lang_code", "target_lang_code"
LANGUAGES = (SOURCE, TARGET)
_UNKNOWN_SOURCES = frozenset({None, "auto", "mixed"})
_CODE = re.compile(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8}){0,3}")
_FALLBACK_SOURCE, _FALLBACK_FOR_ENGLISH = "en", "fr"
_DETECT = "The text may be in several languages. Detect the language of each segment, and translate all of it.\n\n"


@dataclass(frozen=True, slots=True)
class Languages:
    """The languages of a translation."""

    target: str
    source: str | None = None
    """None: unknown, or several languages."""

    @property
    def named_source(self) -> str:
        """The source language; if unknown, a language other than the target, since the template requires one."""
        if self.source is not None:
            return self.source
        is_english = re.split("[-_]", self.target.lower())[0] == _FALLBACK_SOURCE
        return _FALLBACK_FOR_ENGLISH if is_english else _FALLBACK_SOURCE


def translates(template: str) -> bool:
    """Whether a chat template is that of a translation model."""
    return SOURCE in template and TARGET in template and "content" in template


def languages_of(given: Json) -> Languages:
    """Returns the languages in a request's parameters; null counts as absent.

    Raises INVALID_ARGUMENT if the target is missing or a code is invalid.
    """
    target, source = given.get(TARGET), given.get(SOURCE)
    if target is None:
        raise invalid_field(TARGET, "is required: the language to translate to, such as en")
    for name, code in ((TARGET, target), (SOURCE, source)):
        if code is not None and not (isinstance(code, str) and _CODE.fullmatch(code)):
            raise invalid_field(name, "must be the code of a language, such as en or pt-BR")
    if target in _UNKNOWN_SOURCES:
        raise invalid_field(TARGET, "must be one language")
    return Languages(target, None if source in _UNKNOWN_SOURCES else source)


def translation_messages(messages: list[Json], languages: Languages) -> list[Json]:
    """Converts the messages of a text-only request to the template's format.

    Raises INVALID_ARGUMENT for anything but one user message.
    """
    for index, message in enumerate(messages):
        if message["role"] == "system":
            raise invalid_field(
                f"messages[{index}]",
                "this model only translates and does not support instructions; omit the system message",
            )
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise invalid_field("messages", "must be one message of the user: this model translates its text")
    text = messages[0]["content"]
    if languages.source is None:
        text = _DETECT + text
    part = {"type": "text", SOURCE: languages.named_source, TARGET: languages.target, "text": text}
    return [{"role": "user", "content": [part]}]
