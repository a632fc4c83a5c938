"""A stand-in for NumPy in the host process of faster-whisper: arrays of samples without the samples."""

from collections.abc import Sequence
from typing import Any


class Samples:
    """So many samples, of which the loudest is known."""

    def __init__(self, count: int, peak: float = 0.0) -> None:
        self.shape = (count,)
        self.peak = peak

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> "Samples":
        return Samples(len(range(*part.indices(len(self)))), self.peak)

    def __abs__(self) -> "Samples":
        return self

    def max(self, *, initial: float) -> float:
        return max(self.peak, initial)

    def reshape(self, _: int) -> "Samples":
        return self

    def copy(self) -> "Samples":
        return self

    def astype(self, kind: str) -> "Samples":
        assert kind == "float32"
        return self

    def __truediv__(self, scale: float) -> "Samples":
        assert scale == 32_768
        return self


def zeros(count: int, dtype: str) -> Samples:
    assert dtype == "float32"
    return Samples(count)


def concatenate(parts: Sequence[Any]) -> Samples:
    return Samples(sum(map(len, parts)), max(part.peak for part in parts))
