"""The figures of a running llama.cpp server, from its page /metrics. Pure."""

from runner_svc.runtimes.known_metrics import LLAMA_CPP
from runner_svc.runtimes.metrics_page import load_of, samples_of
from weft.api.registry.v1 import runner_pb2

_COMPUTED, _CACHED = "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"


def read_load(page: str) -> runner_pb2.EngineLoad:
    """Returns the figures on a page; what it lacks is left unset."""
    samples = samples_of(page)
    load = load_of(samples, LLAMA_CPP)
    tokens = {sample.name: round(sample.value) for sample in samples if sample.name in (_COMPUTED, _CACHED)}
    if len(tokens) == len((_COMPUTED, _CACHED)):
        load.prefix_hit_tokens = tokens[_CACHED]
        load.prefix_query_tokens = tokens[_COMPUTED] + tokens[_CACHED]
    return load
