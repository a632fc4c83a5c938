"""The kinds of resources and the words that name them."""

from collections.abc import Container, Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.errors.removed_features import removed_kind

_MODULES = sorted(path.stem for path in Path(__file__).with_name("kinds").glob("[a-z]*.py"))


class ResourceKind(StrEnum):
    """A kind of resource; the value is its name in documents and in `KIND/NAME`.

    Each module of `weft/documents/kinds` adds one. Members that other code refers to are listed here, in display order.
    """

    _ignore_ = ["module"]  # noqa: RUF012 - enum configuration, not a member
    MODEL = "model"
    AGENT = "agent"
    RUNNER = "runner"
    POOL = "pool"
    ROUTE = "route"
    ALIAS = "alias"
    WORKFLOW = "workflow"
    TENANT = "tenant"
    TRIAL = "trial"
    for module in _MODULES:
        if module.upper() not in vars():
            vars()[module.upper()] = module

    @property
    def plural(self) -> str:
        """The plural, as in `weft get models` and `/api/v1/models`."""
        return f"{self.value}es" if self.value.endswith("s") else f"{self.value}s"

    @property
    def list_kind(self) -> str:
        """The `kind` of a list document, such as "ModelList"."""
        return f"{self.value.capitalize()}List"


ALIASES = {"llm": ResourceKind.MODEL, "llms": ResourceKind.MODEL}
"""Synonyms of a kind besides its singular and plural."""


def listed_kinds(*, plural: bool, off: Container[str] = ()) -> str:
    """Returns the kinds as a text for help, such as "models, agents, runners", without those that are off."""
    return ", ".join(kind.plural if plural else kind.value for kind in ResourceKind if kind not in off)


@cache
def kind_words() -> Mapping[str, ResourceKind]:
    """Returns every word that names a kind."""
    singular = {kind.value: kind for kind in ResourceKind}
    return MappingProxyType(singular | {kind.plural: kind for kind in ResourceKind} | ALIASES)


def parse_kind(word: str, field: str = "KIND") -> ResourceKind:
    """Returns the kind that a word names in any case. Raises INVALID_ARGUMENT naming `field` and the valid kinds."""
    kind = kind_words().get(word.lower())
    if kind is None:
        if removed := removed_kind(word.lower()):
            raise invalid_field(field, removed)
        known = ", ".join(kind.plural for kind in ResourceKind)
        raise invalid_field(field, f"{word[:64]!r} is not a kind of resource; there are {known}")
    return kind
