"""How much memory one cached token takes, from the head of the model's file."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from runner_svc.memory.estimate import read_model_facts
from runner_svc.policy.load_parameters import LoadValue
from runner_svc.policy.memory_estimate import CACHE_TYPE_BYTES, MemorySettings


async def kv_bytes_per_token(model_path: Path | None, parameters: Mapping[str, LoadValue]) -> int | None:
    """Keys and values of one token in bytes, with the cache types of a load; None: the file does not say."""
    if model_path is None:
        return None
    shape = (await asyncio.to_thread(read_model_facts, model_path)).shape
    usual = MemorySettings(context_tokens=0)
    keys = CACHE_TYPE_BYTES.get(str(parameters.get("cache_type_k", usual.cache_type_k)))
    values = CACHE_TYPE_BYTES.get(str(parameters.get("cache_type_v", usual.cache_type_v)))
    if shape is None or keys is None or values is None:
        return None
    return round(shape.keys_per_token * keys + shape.values_per_token * values)
