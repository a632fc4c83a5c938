"""Compares model names at external servers: in the server's list of models and in its answers. Pure.

Servers add a folder or a provider before a model's name, or a file suffix, tag, date or quantization after it; it is
still the same model. A list of models is untrusted input, and its names are shown to people.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any

import msgspec

from weft.kernel.errors.reasons import MODEL_NOT_LISTED

MAX_NAME_CHARS = 80
"""Maximum length of a name in a warning."""
_FOLDERS = re.compile(r"[/\\]")
_BOUNDARIES = re.compile(r"[-:@_]")
_SAME_MODEL_SUFFIX = re.compile(
    r"\d{2}|\d{4}|\d{6}|\d{8}|latest|free|gguf|mlx|gptq|awq|i?q\d\w*|[kmsl]|x[sl]|x?xs|b?f16|fp(4|8|16)|int[48]|[48]bit|0|1"
)
"""Name suffixes that do not change the model: dates, tags other than sizes, quantizations."""


def is_another_model(requested: str, answered: str) -> bool:
    """Whether `answered` cannot be another spelling of `requested`."""
    left, right = plain_name(requested), plain_name(answered)
    if not left or not right or left == right:
        return False
    shorter, longer = sorted((left, right), key=len)
    rest = longer.removeprefix(shorter)
    if rest == longer or not _BOUNDARIES.match(rest):
        return True
    return not all(_SAME_MODEL_SUFFIX.fullmatch(part) for part in _BOUNDARIES.split(rest[1:]))


def plain_name(name: str) -> str:
    """Returns a model's name without folders, provider and file suffix, in lower case and printable."""
    last = _FOLDERS.split(name.rstrip("/\\"))[-1].casefold().removesuffix(".gguf")
    return "".join(sign for sign in last if sign.isprintable())[:MAX_NAME_CHARS]


MAX_LISTED = 2_000
"""Maximum number of list entries that are read."""
MAX_LISTED_NAME_CHARS = 512
SHOWN_NAMES = 5
SHOWN_NAME_CHARS = 80
_DEFAULT_TAG = ":latest"
_FILE_SUFFIX = ".gguf"
_CLOSE = 0.5
_ALIASES = ("aliases", "name", "model", "root", "path")
# With one loaded model these servers ignore the model name in requests.
_TAKES_ANY_NAME = frozenset({"llamacpp", "koboldcpp", "sglang", "tabbyAPI"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModels:
    """The models of a server's list."""

    names: tuple[str, ...]
    """Names in list order."""
    aliases: frozenset[str] = frozenset()
    """Other names of the same models: paths, aliases, base models of adapters."""
    takes_any_name: bool = False
    """Whether the server has a single model and accepts any name for it."""
    owners: frozenset[str] = frozenset()
    """Owners of the models, by which servers can be distinguished."""
    is_list: bool = True
    """Whether the answer was a list, even if empty."""

    def has(self, name: str) -> bool:
        """Whether a request for `name` reaches one of them; True for an empty list."""
        known = {*self.names, *self.aliases}
        if self.takes_any_name or not known:
            return True
        forms = _forms(name)
        return any(forms & _forms(each) for each in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerList:
    """A server's list of models, or why it is unknown."""

    models: ListedModels | None
    """None: unknown."""
    why: str = ""
    """Why it is unknown."""
    remedy: str = "start it, or correct url"
    """How to fix that."""


def listed_models(body: bytes) -> ListedModels:
    """Returns the models in an answer to GET /v1/models; an empty list for an unreadable answer."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ListedModels(names=(), is_list=False)
    entries = document.get("data") if isinstance(document, dict) else None
    # Ollama without models sends null instead of a list.
    is_list = isinstance(entries, list) or (isinstance(document, dict) and document.get("data", "") is None)
    models = [entry for entry in (entries if isinstance(entries, list) else [])[:MAX_LISTED] if _is_model(entry)]
    return ListedModels(
        names=tuple(entry["id"] for entry in models),
        aliases=frozenset(alias for entry in models for alias in _aliases(entry)),
        takes_any_name=len(models) == 1 and _takes_any_name(models[0]),
        owners=frozenset(owner for entry in models if isinstance(owner := entry.get("owned_by"), str)),
        is_list=is_list,
    )


def not_listed_message(name: str, listed: ListedModels) -> str:
    """Returns the error for an unlisted model, with the listed names, similar ones first."""
    names = [_shown(each) for each in listed.names]
    close = get_close_matches(name, names, n=SHOWN_NAMES, cutoff=_CLOSE)
    rest = [each for each in dict.fromkeys(names) if each not in close]
    shown = (close + rest)[:SHOWN_NAMES]
    more = len(listed.names) - len(shown)
    others = f" and {more} more" if more > 0 else ""
    return f"{MODEL_NOT_LISTED}{_shown(name)}; it has {', '.join(shown)}{others} (set upstream_model)"


def _is_model(entry: Any) -> bool:
    return (
        isinstance(entry, dict) and isinstance(entry.get("id"), str) and 0 < len(entry["id"]) <= MAX_LISTED_NAME_CHARS
    )


def _aliases(entry: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key in _ALIASES:
        value = entry.get(key)
        found += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str) and each]
    return found[:MAX_LISTED]


def _takes_any_name(entry: dict[str, Any]) -> bool:
    owner = entry.get("owned_by")
    # Hugging Face's text-generation-inference names its model as the owner too, and accepts any name, such as "tgi".
    return owner in _TAKES_ANY_NAME or owner == entry["id"]


def _forms(name: str) -> set[str]:
    """Returns the equivalent spellings of a name: without Ollama's default tag, and a path's file name."""
    plain = name.strip().lower().removesuffix(_DEFAULT_TAG)
    forms = {plain}
    if plain.endswith(_FILE_SUFFIX) or plain.startswith(("/", "./", "~")):
        forms.add(PurePosixPath(plain.replace("\\", "/")).name.removesuffix(_FILE_SUFFIX))
    return forms


def _shown(name: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in name)
    return printable if len(printable) <= SHOWN_NAME_CHARS else f"{printable[:SHOWN_NAME_CHARS]}..."
