"""The figures of a running vLLM, from its page /metrics. Pure, with bounds on every count."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from weft.api.registry.v1 import runner_pb2

MAX_PAGE_BYTES = 2 * 1024 * 1024
"""Maximum size of a page that is read; vLLM's has under 100 KiB per engine."""
MAX_COUNT = 2**53
_WHOLE_SHARES = 100
"""Shares are reported in steps of one percent, so that a report changes only with the load."""
_SAMPLE = re.compile(r"vllm:([a-z_]{1,64})(?:\{([^}]{0,4096})\})? ([0-9.eE+-]{1,32})$")
_LABEL = re.compile(r'([a-z_]{1,64})="([^"]{0,256})"')


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page."""

    name: str
    labels: str
    value: float


def read_load(page: str) -> runner_pb2.EngineLoad:
    """Returns the figures on a page; what it lacks is left unset. Several engines are added up."""
    samples = list(_samples(page))

    def total(*names: str) -> int | None:
        found = [sample.value for sample in samples if sample.name in names]
        return min(round(sum(found)), MAX_COUNT) if found else None

    shares = [sample.value for sample in samples if sample.name in ("kv_cache_usage_perc", "gpu_cache_usage_perc")]
    share = round(min(1.0, max(shares)) * _WHOLE_SHARES) / _WHOLE_SHARES if shares else None
    return runner_pb2.EngineLoad(
        running_count=total("num_requests_running"),
        waiting_count=total("num_requests_waiting"),
        kv_cache_share=share,
        kv_cache_tokens=_cache_tokens(samples),
        preemption_count=total("num_preemptions_total"),
        prefix_query_tokens=total("prefix_cache_queries_total"),
        prefix_hit_tokens=total("prefix_cache_hits_total"),
    )


def _cache_tokens(samples: list[Sample]) -> int | None:
    """Returns the capacity of the KV cache in tokens; None: the page does not tell."""
    found = 0
    for sample in samples:
        if sample.name == "cache_config_info":
            labels = dict(_LABEL.findall(sample.labels))
            size, count = (_whole(labels.get(name, "")) for name in ("block_size", "num_gpu_blocks"))
            found += size * count
    return min(found, MAX_COUNT) or None


def _samples(page: str) -> Iterator[Sample]:
    for line in page.splitlines():
        if (found := _SAMPLE.match(line)) is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if 0 <= value <= MAX_COUNT:
            yield Sample(found[1], found[2] or "", value)


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MAX_COUNT)) else 0
