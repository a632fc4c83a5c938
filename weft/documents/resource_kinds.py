"""The kinds of resources and the words that name them."""

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from types import MappingProxyType

from weft.kernel.errors import invalid_field


class ResourceKind(StrEnum):
    """A kind of thing with a name; the value is its name in documents and in `KIND/NAME`."""

    MODEL = "model"
    AGENT = "agent"
    RUNNER = "runner"
    POOL = "pool"
    ROUTE = "route"
    ALIAS = "alias"
    PROFILE = "profile"
    WORKFLOW = "workflow"
    TENANT = "tenant"

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
