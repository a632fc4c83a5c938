"""The engines' own figures on a runner's /metrics."""

from kit.runner_facts import model_facts
from prometheus_client import CollectorRegistry, generate_latest

from gateway.runner_api.metrics import StateCollector
from gateway.runner_api.ports import RunnerFacts, RunnerStage
from weft.api.registry.v1.runner_pb2 import EngineLoad


def test_only_figures_that_an_engine_reports_are_on_the_page() -> None:
    load = EngineLoad(running_count=3, waiting_count=0, other_count=2, kv_cache_share=0.12, preemption_count=7)
    models = (model_facts("vllm", engine_load=load), model_facts("llama"))
    facts = RunnerFacts(name="a", kind="k", stage=RunnerStage.SERVING, models=models)
    registry = CollectorRegistry()
    registry.register(StateCollector(facts=lambda: facts, devices=lambda: (), load=lambda: (0, 0)))
    lines = generate_latest(registry).decode().splitlines()
    words = ("engine_", "kv_cache", "preemptions", "prefix_")
    assert [line for line in lines if any(word in line for word in words) and not line.startswith("#")] == [
        'weft_runner_engine_requests_running{model="vllm"} 3.0',
        'weft_runner_engine_requests_waiting{model="vllm"} 0.0',
        'weft_runner_engine_requests_of_others{model="vllm"} 2.0',
        'weft_runner_kv_cache_share{model="vllm"} 0.12',
        'weft_runner_preemptions_total{model="vllm"} 7.0',
    ]
