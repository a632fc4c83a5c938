"""A stand-in for transformers, which is imported to be quiet."""

from types import SimpleNamespace
from typing import Any

utils = SimpleNamespace(logging=SimpleNamespace(disable_progress_bar=lambda: None, set_verbosity_error=lambda: None))


def __getattr__(name: str) -> Any:
    raise AttributeError(name)
