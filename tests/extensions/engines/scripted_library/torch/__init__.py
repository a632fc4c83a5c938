"""A stand-in for torch, with what the engines call of it: tensors of token ids, latents of images, and whether there is
a CUDA device."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

SWITCHES: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_EXLLAMAV3", "{}"))
long = "long"
cuda = SimpleNamespace(is_available=lambda: not SWITCHES.get("without_device"), empty_cache=lambda: None)
if "SCRIPTED_DIFFUSERS" in os.environ and not json.loads(os.environ["SCRIPTED_DIFFUSERS"]).get("with_device"):
    cuda.is_available = lambda: False
float32, float16, bfloat16 = "torch.float32", "torch.float16", "torch.bfloat16"


class OutOfMemoryError(RuntimeError):
    pass


def set_num_threads(count: int) -> None:
    assert count > 0


class Generator:
    def __init__(self, device: str) -> None:
        assert device == "cpu"
        self.seed = 0

    def manual_seed(self, seed: int) -> "Generator":
        self.seed = seed
        return self


class Latents:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dtype = float32

    def float(self) -> "Latents":
        return self

    def to(self, dtype: str) -> "Latents":
        del dtype
        return self

    def __truediv__(self, other: object) -> "Latents":
        return self

    def __add__(self, other: object) -> "Latents":
        return self


def _interpolate(latents: Latents, size: tuple[int, int], mode: str) -> Latents:
    assert mode == "bilinear"
    return Latents((*latents.shape[:-2], *size))


nn = SimpleNamespace(functional=SimpleNamespace(interpolate=_interpolate))


class Tensor:
    def __init__(self, content: list[Any]) -> None:
        self._content = content
        self.device = SimpleNamespace(type="cpu")

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self._content[0] if self._content else None
        return (len(self._content), len(inner)) if isinstance(inner, list) else (len(self._content),)

    def tolist(self) -> list[Any]:
        return self._content

    def __getitem__(self, index: int) -> "Tensor":
        return Tensor(self._content[index])


def tensor(content: list[Any], dtype: str) -> Tensor:
    assert dtype == long
    return Tensor(content)


@contextmanager
def inference_mode() -> Iterator[None]:
    yield
