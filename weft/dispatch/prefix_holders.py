"""Where prompts were placed, as a dispatcher remembers it for a router that takes over the lead. Digests alone."""

from collections import OrderedDict
from collections.abc import Sequence

from weft.kernel.placement_request import PrefixHolder

MAX_PREFIX_HOLDERS = 16_384
"""Prompts that are remembered; the least recently used is dropped first."""


class PrefixHolders:
    """The endpoint of each prompt, by the digest of its longest prefix."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, PrefixHolder] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, digests: Sequence[int], holder: PrefixHolder) -> None:
        """Record that a prompt with these digests goes to an endpoint."""
        if digests:
            self._holders[digests[-1]] = holder
            self._holders.move_to_end(digests[-1])
            if len(self._holders) > MAX_PREFIX_HOLDERS:
                self._holders.popitem(last=False)

    def find(self, digests: Sequence[int]) -> PrefixHolder | None:
        """Returns the endpoint of the longest prompt that this one continues; None: unknown."""
        return next((found for each in reversed(digests) if (found := self._holders.get(each)) is not None), None)
