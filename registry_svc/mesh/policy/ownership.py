"""The owner of a declared model or agent, and who may change it."""

from dataclasses import dataclass

from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """The author of a declaration."""

    name: str = ""
    """Becomes the owner of created resources; empty: the machine or a service, which own nothing."""
    own_only: bool = False
    """Whether it may only set itself as the owner, and only of resources that it owns or creates."""


def settled_owner(given: str, author: Author, *, earlier: str | None, field: str) -> str:
    """Returns the owner after a declaration with the owner `given`; empty: none given.

    `earlier` is the current owner; None: the resource does not exist. Raises PERMISSION_DENIED naming the field.
    """
    if not given:
        return author.name if earlier is None else earlier
    if given == earlier or not author.own_only:
        return given
    if earlier in (None, author.name) and given == author.name:
        return given
    if earlier == author.name and author.name:
        # The owner may transfer it.
        return given
    whose = f"it is {earlier}'s" if earlier else "it has no owner"
    why = whose if earlier is not None else "the key may own what it creates itself, and name no other owner"
    raise FieldError(field, f"{why}; only a key with the scope models:edit sets owners", Reason.PERMISSION_DENIED)
