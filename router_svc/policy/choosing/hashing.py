"""Hashes that are the same in every process, and numbers that look like chance."""

from hashlib import blake2b

_MASK = (1 << 64) - 1


def mix(number: int) -> int:
    """64 bits that look like chance, from an integer of any size.

    The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def hash_bytes(text: bytes) -> int:
    """64 bits of a text."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")
