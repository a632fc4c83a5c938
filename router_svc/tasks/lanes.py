"""Who waits for what: tasks of one tenant for one model in one band go one after the other."""

from typing import NamedTuple

from weft.kernel.request import Priority


class Lane(NamedTuple):
    """A tuple, because it is a key of everything."""

    model: str
    """As it was asked for."""
    tenant: str
    band: Priority
