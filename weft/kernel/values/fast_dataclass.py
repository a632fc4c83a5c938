"""A fast dataclass for values of which every request makes several."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

ClassT = TypeVar("ClassT")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def fast_dataclass(*, kw_only: bool = False) -> Callable[[type[ClassT]], type[ClassT]]:
    """Decorates a dataclass with slots that is immutable only to type checkers.

    An instance with 24 fields takes 1.1 us to create; a frozen one takes 8 us.
    """

    def decorate(made: type[ClassT]) -> type[ClassT]:
        has_hash = "__hash__" in vars(made)
        return dataclass(slots=True, kw_only=kw_only, unsafe_hash=not has_hash)(made)

    return decorate
