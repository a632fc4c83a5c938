"""The figures of a running vLLM, from its page /metrics. Pure."""

import re
from collections.abc import Sequence

from runner_svc.runtimes.known_metrics import VLLM
from runner_svc.runtimes.metrics_page import MAX_COUNT, Sample, load_of, samples_of
from weft.api.registry.v1 import runner_pb2

_LABEL = re.compile(r'([a-z_]{1,64})="([^"]{0,256})"')


def read_load(page: str, devices: int = 1) -> runner_pb2.EngineLoad:
    """Returns the figures on a page; what it lacks is left unset. Several engines, each on `devices`, are added up."""
    samples = samples_of(page)
    load = load_of(samples, VLLM)
    if tokens := _cache_tokens(samples):
        load.kv_cache_tokens = tokens
    if (size := _cache_bytes(samples)) is not None:
        load.kv_cache_bytes = min(size * devices, MAX_COUNT)
    return load


def _cache_tokens(samples: Sequence[Sample]) -> int:
    """Returns the capacity of the KV cache in tokens; 0: the page does not tell."""
    found = 0
    for sample in samples:
        if sample.name == "vllm:cache_config_info":
            labels = dict(_LABEL.findall(sample.labels))
            size, count = (_whole(labels.get(name, "")) for name in ("block_size", "num_gpu_blocks"))
            found += size * count
    return min(found, MAX_COUNT)


def _cache_bytes(samples: Sequence[Sample]) -> int | None:
    """Returns the memory of the KV cache where it was set in bytes; None: the page does not tell."""
    found = [
        _whole(dict(_LABEL.findall(sample.labels)).get("kv_cache_memory_bytes", ""))
        for sample in samples
        if sample.name == "vllm:cache_config_info"
    ]
    return min(sum(found), MAX_COUNT) if found and all(found) else None


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_COUNT)) else 0
