"""Endpoints of earlier prompts, which a dispatcher tells a router that takes over the lead. Digests only."""

from collections import OrderedDict
from collections.abc import Sequence

from weft.kernel.requests.placement_request import PrefixHolder

MAX_PREFIX_HOLDERS = 16_384
"""Maximum number of prompts; the least recently used is dropped first."""


class PrefixHolders:
    """Maps the digest of a prompt's longest prefix to its endpoint."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, PrefixHolder] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, digests: Sequence[int], holder: PrefixHolder) -> None:
        """Records the endpoint of a prompt with these digests."""
        if digests:
            self._holders[digests[-1]] = holder
            self._holders.move_to_end(digests[-1])
            if len(self._holders) > MAX_PREFIX_HOLDERS:
                self._holders.popitem(last=False)

    def find(self, digests: Sequence[int]) -> PrefixHolder | None:
        """Returns the endpoint of the longest earlier prompt that this one extends; None: unknown."""
        return next((found for each in reversed(digests) if (found := self._holders.get(each)) is not None), None)
