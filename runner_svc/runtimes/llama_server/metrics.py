"""The figures of a running llama.cpp server, from its page /metrics. Pure."""

from runner_svc.runtimes.metrics_page import MetricNames, load_of, samples_of
from weft.api.registry.v1 import runner_pb2

# Its share of the KV cache in use, which older versions report, has cached prompts of idle slots in it.
NAMES = MetricNames(running=("llamacpp:requests_processing",), waiting=("llamacpp:requests_deferred",))
_COMPUTED, _CACHED = "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"


def read_load(page: str) -> runner_pb2.EngineLoad:
    """Returns the figures on a page; what it lacks is left unset."""
    samples = samples_of(page)
    load = load_of(samples, NAMES)
    tokens = {sample.name: round(sample.value) for sample in samples if sample.name in (_COMPUTED, _CACHED)}
    if len(tokens) == len((_COMPUTED, _CACHED)):
        load.prefix_hit_tokens = tokens[_CACHED]
        load.prefix_query_tokens = tokens[_COMPUTED] + tokens[_CACHED]
    return load
