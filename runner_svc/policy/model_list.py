"""Whether a server that weft did not start has the model that it is asked for, by its own list of models.

A server may list what it likes: a list is hostile input, and names in it are shown to people.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Any

import msgspec

from weft.kernel.reasons import MODEL_NOT_LISTED

MAX_LISTED = 2_000
"""Models of a list that are looked at."""
MAX_NAME_CHARS = 512
SHOWN_NAMES = 5
SHOWN_NAME_CHARS = 80
_DEFAULT_TAG = ":latest"
_FILE_SUFFIX = ".gguf"
_CLOSE = 0.5
_ALIASES = ("aliases", "name", "model", "root", "path")
# With one model loaded these answer for it, whatever it is called in a request.
_TAKES_ANY_NAME = frozenset({"llamacpp", "koboldcpp", "sglang", "tabbyAPI"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModels:
    """What a server says that it has."""

    names: tuple[str, ...]
    """Its names, in its order."""
    aliases: frozenset[str] = frozenset()
    """Other names of the same models: paths, aliases, what an adapter is based on."""
    takes_any_name: bool = False

    def has(self, name: str) -> bool:
        """Whether a request for `name` is for one of them."""
        known = {*self.names, *self.aliases}
        if self.takes_any_name or not known:
            return True
        asked = _forms(name)
        return any(asked & _forms(each) for each in known)


def listed_models(body: bytes) -> ListedModels:
    """Returns the models that an answer to GET /v1/models lists; none where it lists nothing that can be read."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return ListedModels(names=())
    entries = document.get("data") if isinstance(document, dict) else None
    models = [entry for entry in (entries if isinstance(entries, list) else [])[:MAX_LISTED] if _is_model(entry)]
    return ListedModels(
        names=tuple(entry["id"] for entry in models),
        aliases=frozenset(alias for entry in models for alias in _aliases(entry)),
        takes_any_name=len(models) == 1 and _takes_any_name(models[0]),
    )


def not_listed_message(name: str, listed: ListedModels) -> str:
    """Returns what is wrong and the names that the server has, those that are close to `name` first."""
    names = [_shown(each) for each in listed.names]
    close = get_close_matches(name, names, n=SHOWN_NAMES, cutoff=_CLOSE)
    rest = [each for each in dict.fromkeys(names) if each not in close]
    shown = (close + rest)[:SHOWN_NAMES]
    more = len(listed.names) - len(shown)
    others = f" and {more} more" if more > 0 else ""
    return f"{MODEL_NOT_LISTED}{_shown(name)}; it has {', '.join(shown)}{others} (set upstream_model)"


def _is_model(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("id"), str) and 0 < len(entry["id"]) <= MAX_NAME_CHARS


def _aliases(entry: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for key in _ALIASES:
        value = entry.get(key)
        found += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str) and each]
    return found[:MAX_LISTED]


def _takes_any_name(entry: dict[str, Any]) -> bool:
    owner = entry.get("owned_by")
    # Hugging Face's text-generation-inference names its one model as the owner too, and takes any name, such as "tgi".
    return owner in _TAKES_ANY_NAME or owner == entry["id"]


def _forms(name: str) -> set[str]:
    """The ways to write one name: Ollama's default tag, and a model file by its path."""
    plain = name.strip().lower().removesuffix(_DEFAULT_TAG)
    forms = {plain}
    if plain.endswith(_FILE_SUFFIX) or plain.startswith(("/", "./", "~")):
        forms.add(PurePosixPath(plain.replace("\\", "/")).name.removesuffix(_FILE_SUFFIX))
    return forms


def _shown(name: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in name)
    return printable if len(printable) <= SHOWN_NAME_CHARS else f"{printable[:SHOWN_NAME_CHARS]}..."
