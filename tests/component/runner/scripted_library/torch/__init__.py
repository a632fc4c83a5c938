"""A stand-in for torch, with what the engines call of it: tensors of token ids, and whether there is a CUDA device."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

SWITCHES: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_EXLLAMAV3", "{}"))
long = "long"
cuda = SimpleNamespace(is_available=lambda: not SWITCHES.get("without_device"))


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

    def __getitem__(self, place: int) -> "Tensor":
        return Tensor(self._content[place])


def tensor(content: list[Any], dtype: str) -> Tensor:
    assert dtype == long
    return Tensor(content)


@contextmanager
def inference_mode() -> Iterator[None]:
    yield
