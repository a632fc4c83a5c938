"""Classes of values of which every request makes several."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

ClassT = TypeVar("ClassT")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_class(*, kw_only: bool = False) -> Callable[[type[ClassT]], type[ClassT]]:
    """Returns the decorator of a dataclass with slots whose instances nothing may change, which type checkers enforce.

    At run time nothing does: making a frozen instance with 24 fields takes 8 us, making one of these 1.1 us.
    """

    def decorate(made: type[ClassT]) -> type[ClassT]:
        has_hash = "__hash__" in vars(made)
        return dataclass(slots=True, kw_only=kw_only, unsafe_hash=not has_hash)(made)

    return decorate
