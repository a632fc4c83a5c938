"""The metrics of a runner: its models, the figures of its engines, and the metrics of the engines themselves."""

from prometheus_client.parser import text_string_to_metric_families

from runner_svc.backend.port import EnginePage
from runner_svc.runner_metrics import add_runner_metrics
from weft.api.registry.v1.runner_pb2 import EngineLoad, InstanceState
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.settings.metric_limits import MetricLimits
from weft.kernel.telemetry.metrics_page import MetricsPage

GIB = 1024**3
LLAMA = EnginePage("# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 2\n")


def _description() -> pb.DescribeResponse:
    load = EngineLoad(running_count=3, waiting_count=0, other_count=2, kv_cache_share=0.12, preemption_count=7)
    vllm = InstanceState(model="vllm", phase=InstanceState.PHASE_READY, slots_total=8, slots_used=1, engine_load=load)
    vllm.memory.measured_bytes, vllm.memory.resident_bytes, vllm.tokens_per_second = 2 * GIB, 1024, 41.5
    llama = InstanceState(model="llama", phase=InstanceState.PHASE_HIBERNATING, fault_count=2)
    adapter = InstanceState(model="lora", base_model="vllm", phase=InstanceState.PHASE_READY, engine_load=load)
    found = pb.DescribeResponse()
    found.runner.capability.instances.extend([vllm, llama, adapter])
    cache = pb.CacheFigures(
        hit_count=3, miss_count=1, prompt_token_count=400, cached_token_count=200, prewarmed_token_count=90
    )
    cache.restored_prompt_count, cache.stored_bytes = 2, 4_096
    found.instances.add(model="vllm", cache=cache)
    found.instances.add(model="llama")
    return found


async def _lines(pages: dict[str, EnginePage], limits: MetricLimits | None = None) -> list[str]:
    page = MetricsPage(limits)
    add_runner_metrics(page, "titan", _description, lambda: pages)
    text = (await page.render()).body.decode()
    list(text_string_to_metric_families(text))
    return [line for line in text.splitlines() if not line.startswith("#")]


async def test_model_metrics_have_slots_memory_faults_and_caches() -> None:
    lines = await _lines({})
    assert 'weft_runner_requests_running{model="vllm"} 1.0' in lines
    assert 'weft_runner_slots{model="vllm"} 8.0' in lines
    assert f'weft_runner_model_memory_bytes{{model="vllm"}} {float(2 * GIB)}' in [
        line.replace("2.147483648e+09", str(float(2 * GIB))) for line in lines
    ]
    assert 'weft_runner_resident_memory_bytes{model="vllm"} 1024.0' in lines
    assert 'weft_runner_tokens_per_second{model="vllm"} 41.5' in lines
    assert 'weft_runner_tokens_per_second{model="llama"} 0.0' in lines
    assert 'weft_runner_models{phase="ready"} 2.0' in lines
    assert 'weft_runner_models{phase="hibernating"} 1.0' in lines
    assert 'weft_runner_faults_total{model="llama"} 2.0' in lines
    assert 'weft_runner_cache_hit_rate{model="vllm"} 0.75' in lines
    assert 'weft_runner_cached_prompt_tokens_total{model="vllm"} 200.0' in lines
    assert 'weft_runner_prewarmed_prompt_tokens_total{model="vllm"} 90.0' in lines
    assert 'weft_runner_restored_prompts_total{model="vllm"} 2.0' in lines
    assert 'weft_runner_stored_prompt_bytes{model="vllm"} 4096.0' in lines
    # Without requests there is no hit rate.
    assert not [line for line in lines if line.startswith('weft_runner_cache_hit_rate{model="llama"')]


async def test_only_figures_reported_by_an_engine_are_on_the_page() -> None:
    words = ("engine_requests", "kv_cache", "preemptions", "prefix_")
    assert [line for line in await _lines({}) if any(word in line for word in words)] == [
        'weft_runner_engine_requests_running{model="vllm"} 3.0',
        'weft_runner_engine_requests_waiting{model="vllm"} 0.0',
        'weft_runner_engine_requests_of_others{model="vllm"} 2.0',
        'weft_runner_kv_cache_share{model="vllm"} 0.12',
        'weft_runner_preemptions_total{model="vllm"} 7.0',
    ]


async def test_engine_metrics_are_forwarded_with_their_runner_and_model() -> None:
    lines = await _lines({"llama": LLAMA, "other": LLAMA})
    assert 'llamacpp:requests_processing{model="llama",runner="titan"} 2.0' in lines
    assert 'llamacpp:requests_processing{model="other",runner="titan"} 2.0' in lines


async def test_dropped_engine_metrics_are_counted() -> None:
    rogue = EnginePage(
        "# TYPE weft_router_waiting gauge\nweft_router_waiting 9\n" + "".join(f"g{n} 1\n" for n in range(20))
    )
    rogue.failed_count = 4
    lines = await _lines({"llama": rogue}, MetricLimits(max_engine_series=5))
    assert not [line for line in lines if line.startswith("weft_router_waiting")]
    assert len([line for line in lines if line.startswith("g")]) == 5
    assert 'weft_runner_engine_metrics_left_out{model="llama"} 16.0' in lines
    assert 'weft_runner_failed_engine_scrapes_total{model="llama"} 4.0' in lines


async def test_zero_series_bound_forwards_no_engine_metrics() -> None:
    lines = await _lines({"llama": LLAMA}, MetricLimits(max_engine_series=0))
    assert not [line for line in lines if line.startswith("llamacpp")]


async def test_unchanged_page_is_not_parsed_again() -> None:
    page = MetricsPage()
    engine = EnginePage(LLAMA.text)
    add_runner_metrics(page, "titan", _description, lambda: {"llama": engine})
    first = [family for family in page.collect() if family.name.startswith("llamacpp")]
    second = [family for family in page.collect() if family.name.startswith("llamacpp")]
    assert first[0] is second[0]
    engine.text = LLAMA.text.replace(" 2", " 5")
    third = [family for family in page.collect() if family.name.startswith("llamacpp")]
    assert third[0].samples[0].value == 5
