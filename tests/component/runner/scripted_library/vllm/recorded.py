"""What the stand-in takes: the arguments and fields of the library, as they are recorded."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from recorded_signatures import Signatures

RECORDED = Signatures(Path(__file__).with_name("signatures.json"))
checked = RECORDED.checked
FLAGS: list[str] = RECORDED.record["flags"]


def fields_of(*names: str) -> dict[str, bool]:
    """The recorded fields of classes, and whether each is true or false."""
    return {field: is_flag for name in names for field, _, is_flag in RECORDED.record["fields"][name]}


class Fields:
    """An object with the fields of a class of the library; absent ones are None. No others are taken."""

    recorded: tuple[str, ...] = ()

    def __init__(self, *values: Any, **given: Any) -> None:
        known = list(fields_of(*self.recorded))
        given |= dict(zip(known, values, strict=False))
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise TypeError(f"Unexpected keyword argument '{unknown[0]}'")
        for name in known:
            setattr(self, name, given.get(name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
