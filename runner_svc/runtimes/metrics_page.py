"""Parses load figures from a server's metrics page in Prometheus' text format. Pure, with limits.

The metrics of programs without a separate runtime are claims of their presets, with sources there.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.api.registry.v1 import runner_pb2

MAX_PAGE_BYTES = 2 * 1024 * 1024
"""Maximum size of a page; vLLM's is below 100 KiB per engine."""
MAX_COUNT = 2**53
_WHOLE_SHARES = 100
"""Shares are rounded to one percent, so that reports change only with the load."""
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]{0,127})(?:\{([^}]{0,4096})\})? ([0-9.eE+-]{1,32})$")


@dataclass(frozen=True, slots=True)
class Sample:
    """A line of a page."""

    name: str
    labels: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Names of a server's metrics, with alternatives for different versions; empty: there is none."""

    running: Sequence[str] = ()
    waiting: Sequence[str] = ()
    cache_share: Sequence[str] = ()
    """Share of the KV cache that is in use, 0 to 1."""
    preemptions: Sequence[str] = ()
    prefix_queries: Sequence[str] = ()
    prefix_hits: Sequence[str] = ()
    cache_held: Sequence[str] = ()
    """Share of the KV cache that may include prefixes no request uses; not reported."""

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all its metrics."""
        return tuple(name for field in fields(self) for name in getattr(self, field.name))


NO_METRICS = MetricNames()
METRICS = "/metrics"
VLLM = MetricNames(
    running=("vllm:num_requests_running",),
    waiting=("vllm:num_requests_waiting",),
    cache_share=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    preemptions=("vllm:num_preemptions_total",),
    prefix_queries=("vllm:prefix_cache_queries_total",),
    prefix_hits=("vllm:prefix_cache_hits_total",),
)
# Without the KV cache usage that older versions report, since it includes cached prompts of idle slots.
LLAMA_CPP = MetricNames(running=("llamacpp:requests_processing",), waiting=("llamacpp:requests_deferred",))
SGLANG = MetricNames(
    running=("sglang:num_running_reqs",), waiting=("sglang:num_queue_reqs",), cache_share=("sglang:token_usage",)
)
TEXT_GENERATION_INFERENCE = MetricNames(running=("tgi_batch_current_size",), waiting=("tgi_queue_size",))
LMDEPLOY = MetricNames(
    running=("lmdeploy:num_requests_running",),
    waiting=("lmdeploy:num_requests_waiting",),
    cache_held=("lmdeploy:gpu_cache_usage_perc",),
)
_KNOWN = (VLLM, LLAMA_CPP, SGLANG, TEXT_GENERATION_INFERENCE, LMDEPLOY)
ANY_SERVER = MetricNames(
    **{
        field.name: tuple(name for names in _KNOWN for name in getattr(names, field.name))
        for field in fields(MetricNames)
    }
)
"""All names combined, which is unambiguous because servers share none."""


def samples_of(page: str) -> list[Sample]:
    """Returns the lines of a page with a count or a share."""
    found = filter(None, map(_SAMPLE.match, page.splitlines()))
    samples = [Sample(each[1], each[2] or "", _number(each[3])) for each in found]
    return [sample for sample in samples if 0 <= sample.value <= MAX_COUNT]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def read_any_load(page: str) -> "runner_pb2.EngineLoad":
    """Returns the figures on the page of an unknown server; empty if its metrics have other names."""
    return load_of(samples_of(page), ANY_SERVER)


def load_of(samples: Sequence[Sample], names: MetricNames) -> "runner_pb2.EngineLoad":
    """Returns the figures in a page's lines; missing ones are unset. Several engines are added up."""
    # Imported here because presets are also read by commands that do not need the generated messages.
    from weft.api.registry.v1 import runner_pb2  # noqa: PLC0415

    def total(wanted: Sequence[str]) -> int | None:
        found = [sample.value for sample in samples if sample.name in wanted]
        return min(round(sum(found)), MAX_COUNT) if found else None

    shares = [sample.value for sample in samples if sample.name in names.cache_share]
    share = round(min(1.0, max(shares)) * _WHOLE_SHARES) / _WHOLE_SHARES if shares else None
    return runner_pb2.EngineLoad(
        running_count=total(names.running),
        waiting_count=total(names.waiting),
        kv_cache_share=share,
        preemption_count=total(names.preemptions),
        prefix_query_tokens=total(names.prefix_queries),
        prefix_hit_tokens=total(names.prefix_hits),
    )
