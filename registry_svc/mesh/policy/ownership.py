"""The owner of a declared model or agent: who it is after a declaration, and who may change it."""

from dataclasses import dataclass

from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """Who declares."""

    name: str = ""
    """The name that becomes the owner of what is created; empty: of the machine or of a service, which own nothing."""
    own_only: bool = False
    """Whether it may only set itself as an owner, and only of what it owns or creates."""


def settled_owner(given: str, author: Author, *, earlier: str | None, field: str) -> str:
    """Returns the owner after a declaration that names `given`; empty: it names none.

    `earlier` is the owner until now; None: nothing of this name is there. Raises PERMISSION_DENIED naming the field.
    """
    if not given:
        return author.name if earlier is None else earlier
    if given == earlier or not author.own_only:
        return given
    if earlier in (None, author.name) and given == author.name:
        return given
    if earlier == author.name and author.name:
        # Its owner may hand it over.
        return given
    whose = f"it is {earlier}'s" if earlier else "it has no owner"
    why = whose if earlier is not None else "the key may own what it creates itself, and name no other owner"
    raise FieldError(field, f"{why}; only a key with the scope models:edit sets owners", Reason.PERMISSION_DENIED)
