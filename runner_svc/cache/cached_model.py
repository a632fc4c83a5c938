"""A model as seen by its prefix cache."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from runner_svc.backend.port import Backend
from runner_svc.memory.estimate import read_model_facts
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import CACHE_TYPE_BYTES, MemorySettings
from weft.kernel.models.load_parameters import LoadValue


class CachedModel(Protocol):
    """A model as seen by its prefix cache."""

    @property
    def model(self) -> str:
        """The model's name in the mesh."""
        ...

    @property
    def names(self) -> Sequence[str]:
        """The names it serves: the model's first, then those of its adapters."""
        ...

    @property
    def backend(self) -> Backend:
        """The engine."""
        ...

    @property
    def model_path(self) -> Path | None:
        """The model's file; None: there is none, or weft does not manage it."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the model's file; empty: not known yet, or it has none."""
        ...

    @property
    def plan(self) -> LoadPlan:
        """The plan of the current or next load."""
        ...

    def expects(self, prompt: KeptPrompt) -> bool:
        """Whether a saved prompt is expected again."""
        ...

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Forgets expected prompts when their tenant and tag are flushed; None: any."""
        ...


async def kv_bytes_per_token(model_path: Path | None, parameters: Mapping[str, LoadValue]) -> int | None:
    """Returns the KV cache size per token in bytes, from the model file and a load's cache types; None: unknown."""
    if model_path is None:
        return None
    shape = (await asyncio.to_thread(read_model_facts, model_path)).shape
    usual = MemorySettings(context_tokens=0)
    keys = CACHE_TYPE_BYTES.get(str(parameters.get("cache_type_k", usual.cache_type_k)))
    values = CACHE_TYPE_BYTES.get(str(parameters.get("cache_type_v", usual.cache_type_v)))
    if shape is None or keys is None or values is None:
        return None
    return round(shape.keys_per_token * keys + shape.values_per_token * values)
