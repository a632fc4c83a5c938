"""Models that translate: the languages of a request, for chat templates as that of TranslateGemma. Pure.

Such a template takes one message of the user, with one part that has the text and the codes of its language and of the
wanted one. It has no place for instructions.
"""

import re
from dataclasses import dataclass
from typing import Any

from weft.kernel.errors import invalid_field

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
    """None: it is not known, or there are several."""

    @property
    def named_source(self) -> str:
        """A source for the template, which needs one; another language than the target where it is not known."""
        if self.source is not None:
            return self.source
        is_english = re.split("[-_]", self.target.lower())[0] == _FALLBACK_SOURCE
        return _FALLBACK_FOR_ENGLISH if is_english else _FALLBACK_SOURCE


def translates(template: str) -> bool:
    """Whether a chat template is one of a model that translates."""
    return SOURCE in template and TARGET in template and "content" in template


def languages_of(given: Json) -> Languages:
    """Returns the languages among the parameters of a request; null counts as absent.

    Raises INVALID_ARGUMENT where there is no target, or a code is none.
    """
    target, source = given.get(TARGET), given.get(SOURCE)
    if target is None:
        raise invalid_field(TARGET, "is required: this model translates into the language that it names, such as en")
    for name, code in ((TARGET, target), (SOURCE, source)):
        if code is not None and not (isinstance(code, str) and _CODE.fullmatch(code)):
            raise invalid_field(name, "must be the code of a language, such as en or pt-BR")
    if target in _UNKNOWN_SOURCES:
        raise invalid_field(TARGET, "must be one language")
    return Languages(target, None if source in _UNKNOWN_SOURCES else source)


def translation_messages(messages: list[Json], languages: Languages) -> list[Json]:
    """Returns the conversation as the template takes it, from that of a request with texts alone.

    Raises INVALID_ARGUMENT for anything but one message of the user.
    """
    for index, message in enumerate(messages):
        if message["role"] == "system":
            raise invalid_field(
                f"messages[{index}]", "this model translates and takes no instructions; leave the system message out"
            )
    if len(messages) != 1 or messages[0]["role"] != "user":
        raise invalid_field("messages", "must be one message of the user: this model translates its text")
    text = messages[0]["content"]
    if languages.source is None:
        text = _DETECT + text
    part = {"type": "text", SOURCE: languages.named_source, TARGET: languages.target, "text": text}
    return [{"role": "user", "content": [part]}]
