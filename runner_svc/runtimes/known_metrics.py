"""Names of the metrics of known servers. Pure.

Those of programs without a separate runtime are claims of their presets, with sources there.
"""

from dataclasses import fields
from typing import TYPE_CHECKING

from runner_svc.runtimes.metrics_page import MetricNames, load_of, samples_of

if TYPE_CHECKING:
    from weft.api.registry.v1 import runner_pb2

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


def read_any_load(page: str) -> "runner_pb2.EngineLoad":
    """Returns the figures on the page of an unknown server; empty if its metrics have other names."""
    return load_of(samples_of(page), ANY_SERVER)
