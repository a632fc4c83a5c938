r"""Rewrites JSON schemas in the words that llama.cpp's grammars hold.

llama.cpp silently leaves out a `pattern` that it cannot convert. Its patterns have anchors at both ends and neither
classes such as `\d` nor other escapes of letters; their characters are those of the JSON text, so quotation marks,
backslashes and control characters are excluded. A rewritten schema may allow less than the given one, never more.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from weft.kernel.schemas.json_schema import LIST_KEYS, MAP_KEYS, WITH_SCHEMAS

_CHARACTER: Final = r"\\u(?P<code>[0-9A-Fa-f]{4})|\\x(?P<byte>[0-9A-Fa-f]{2})|\\(?P<escaped>.)|(?P<other>.)"
_MEMBER: Final = re.compile(rf"\\(?P<set>[dws])(?P<after>-?)|(?P<dash>^-|-$|\\-)|(?P<range>-)|{_CHARACTER}", re.DOTALL)
_TOKEN: Final = re.compile(
    r"\[(?P<negation>\^?)(?P<members>(?:\\.|[^\]\\])*)\]|(?P<group>\(\?:)|(?P<unheld>\(\?|[\[^$])|(?P<any>\.)"
    # A brace that begins no repetition is a literal in regular expressions, and an error in llama.cpp.
    r"|(?P<brace>\{(?![0-9]+(?:,[0-9]*)?\}))"
    # A repetition is lazy only for a matcher.
    rf"|(?P<kept>[()|{{}}*+?])(?:(?<=[*+?}}])\?)?|{_CHARACTER}",
    re.DOTALL,
)
_SETS: Final[Mapping[str, str]] = MappingProxyType({"d": "0-9", "w": "A-Za-z0-9_", "s": " "})
_NOT_IN_TEXT: Final = r"\"\\\x00-\x1F"
_ANY: Final = f"[^{_NOT_IN_TEXT}]"
_SPECIAL: Final = "^$.[]()|{}*+?"
"""Characters that llama.cpp reads with a backslash."""


class _UnheldError(Exception):
    """A pattern that a grammar cannot hold."""


def fitted_schema(schema: Any) -> Any:
    """Returns a copy of a schema for llama.cpp, which ignores the parts that its grammars cannot express."""
    if not isinstance(schema, Mapping):
        return schema
    fitted: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            fitted[key] = fitted_pattern(value) or value
        elif key in MAP_KEYS and isinstance(value, Mapping):
            fitted[key] = {name: fitted_schema(inner) for name, inner in value.items()}
        elif key in LIST_KEYS and isinstance(value, list):
            fitted[key] = [fitted_schema(inner) for inner in value]
        else:
            fitted[key] = fitted_schema(value) if key in WITH_SCHEMAS else value
    if "prefixItems" in fitted and fitted.get("items") in (False, {"not": {}}):
        # Read instead of `prefixItems`. Without it the list has exactly these items.
        del fitted["items"]
    return fitted


def fitted_pattern(pattern: str) -> str | None:
    """Returns a pattern in llama.cpp's words; None: it cannot be converted."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    try:
        body = _TOKEN.sub(_converted, pattern[begins : len(pattern) - ends])
    except _UnheldError:
        return None
    if _has_alternatives(body):
        if begins or ends:
            return None  # an anchor belongs to one alternative
        body = f"({body})"
    return f"^{'' if begins else _ANY + '*'}{body}{'' if ends else _ANY + '*'}$"


def _has_alternatives(body: str) -> bool:
    """Whether a converted pattern has alternatives outside of groups."""
    depth = 0
    for token in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", body):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if token[0] == "|" and not depth:
            return True
    return False


def _converted(token: re.Match[str]) -> str:
    escaped = token["escaped"] or ""
    if token["unheld"] or token["brace"]:
        raise _UnheldError
    if token["members"] is not None:
        return _class(token["members"], is_negated=bool(token["negation"]))
    if token["any"]:
        return _ANY
    if token["group"] or token["kept"]:
        return "(" if token["group"] else token["kept"]
    if (known := _SETS.get(escaped.lower())) is not None:
        return f"[^{known}{_NOT_IN_TEXT}]" if escaped.isupper() else f"[{known}]"
    character = _character(token)
    return f"\\{character}" if character in _SPECIAL else character


def _class(members: str, *, is_negated: bool) -> str:
    """Returns a class of characters; one that is a hyphen comes last."""
    kept, dash = "", ""
    for token in _MEMBER.finditer(members):
        if token["dash"] or token["after"]:
            dash = "-"
        if token["set"]:
            kept += _SETS[token["set"]]
        elif token["range"]:
            kept += "-"
        elif not token["dash"] and not (is_negated and token[0] in {'"', r"\"", r"\\"}):
            character = _character(token)
            if character == "^":
                raise _UnheldError
            kept += f"\\{character}" if character in "[]" else character
    return f"[{'^' if is_negated else ''}{kept}{_NOT_IN_TEXT if is_negated else ''}{dash}]"


def _character(token: re.Match[str]) -> str:
    """Returns the literal character of a token."""
    if (token["escaped"] or "").isalnum():
        raise _UnheldError
    code = token["code"] or token["byte"]
    character = chr(int(code, 16)) if code else token["escaped"] or token["other"]
    if character in '"\\' or not character.isprintable():
        raise _UnheldError
    return character
