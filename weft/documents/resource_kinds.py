"""The kinds of resources and the words that name them."""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType

from weft.kernel.errors import invalid_field

_MODULES = sorted(path.stem for path in Path(__file__).with_name("kinds").glob("[a-z]*.py"))


class ResourceKind(StrEnum):
    """A kind of thing with a name; the value is its name in documents and in `KIND/NAME`.

    Each module of `weft/documents/kinds` is one. Those that other code is about are named here, in the order of lists.
    """

    _ignore_ = ["module"]  # noqa: RUF012 - not a member
    MODEL = "model"
    AGENT = "agent"
    RUNNER = "runner"
    POOL = "pool"
    ROUTE = "route"
    ALIAS = "alias"
    PROFILE = "profile"
    WORKFLOW = "workflow"
    TENANT = "tenant"
    for module in _MODULES:
        if module.upper() not in vars():
            vars()[module.upper()] = module

    @property
    def plural(self) -> str:
        """As in `weft get models` and `/api/v1/models`."""
        return f"{self.value}es" if self.value.endswith("s") else f"{self.value}s"

    @property
    def list_kind(self) -> str:
        """The `kind` of a document with several of them, such as "ModelList"."""
        return f"{self.value.capitalize()}List"


ALIASES = {"llm": ResourceKind.MODEL, "llms": ResourceKind.MODEL}
"""Other words for a kind, besides its singular and its plural."""


def listed_kinds(*, plural: bool) -> str:
    """Returns the kinds for a help text, such as "models, agents, runners"."""
    return ", ".join(kind.plural if plural else kind.value for kind in ResourceKind)


@cache
def kind_words() -> Mapping[str, ResourceKind]:
    """Every word that names a kind."""
    singular = {kind.value: kind for kind in ResourceKind}
    return MappingProxyType(singular | {kind.plural: kind for kind in ResourceKind} | ALIASES)


def parse_kind(word: str, field: str = "KIND") -> ResourceKind:
    """The kind that `word` names, in any case. Raises INVALID_ARGUMENT naming `field` and the kinds there are."""
    kind = kind_words().get(word.lower())
    if kind is None:
        known = ", ".join(kind.plural for kind in ResourceKind)
        raise invalid_field(field, f"{word[:64]!r} is not a kind of resource; there are {known}")
    return kind
