"""A consistent-hash ring: the owner of a key stays the same when other members join and leave."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from hashlib import blake2b

_MASK = (1 << 64) - 1


def mix(number: int) -> int:
    """Return 64 pseudo-random bits of an integer of any size.

    The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def hash_bytes(text: bytes) -> int:
    """Return a 64-bit hash of a text that is the same in every process."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


POINTS_PER_MEMBER = 16
"""So few points spread unevenly; the load bound of each member compensates that."""
MAX_SINGLE_INSERTS = 32
"""Points that are inserted one by one; more are appended and sorted."""


class Ring:
    """Members by name. A member that leaves and returns gets the same points."""

    def __init__(self) -> None:
        self._hashes: list[int] = []
        self._owners: dict[int, str] = {}
        self._members: set[str] = set()
        self._placed: set[str] = set()
        """Members whose points are in the ring; some of them may have left."""
        self._pending: list[int] = []

    def add(self, member: str) -> None:
        """Add a member; no effect if it is present."""
        self._members.add(member)
        if member in self._placed:
            return
        self._placed.add(member)
        for number in range(POINTS_PER_MEMBER):
            point = hash_bytes(f"{number}\n{member}".encode())
            if point not in self._owners:
                self._owners[point] = member
                self._pending.append(point)

    def remove(self, member: str) -> None:
        """Remove a member; no effect if it is absent."""
        self._members.discard(member)
        if len(self._placed) > 2 * len(self._members) + POINTS_PER_MEMBER:
            self._sweep()

    def walk(self, key: int, most: int) -> Iterator[str]:
        """Yield the owner of a 64-bit key and the members after it, each once, at most `most`."""
        self._settle()
        seen: set[str] = set()
        size = len(self._hashes)
        begin = bisect_left(self._hashes, key)
        for step in range(min(size, most * POINTS_PER_MEMBER)):
            owner = self._owners[self._hashes[(begin + step) % size]]
            if owner in seen or owner not in self._members:
                continue
            seen.add(owner)
            yield owner
            if len(seen) == most:
                return

    def _settle(self) -> None:
        if not self._pending:
            return
        if len(self._pending) <= MAX_SINGLE_INSERTS:
            for point in self._pending:
                insort(self._hashes, point)
        else:
            self._hashes.extend(self._pending)
            self._hashes.sort()
        self._pending.clear()

    def _sweep(self) -> None:
        """Remove the points of members that left."""
        self._settle()
        self._placed = set(self._members)
        self._owners = {point: owner for point, owner in self._owners.items() if owner in self._members}
        self._hashes = [point for point in self._hashes if point in self._owners]
