"""The metrics of usage: what was written, by names that the mesh knows, and by tenant where that is set."""

from dataclasses import dataclass, field

from kit.fleet import model_view
from prometheus_client import generate_latest

from router_svc.durable.task_metrics import UsageMetrics
from router_svc.policy.usage_rows import UsageKey
from router_svc.usage import UsageSums
from weft.dispatch.fleet import FleetView
from weft.kernel.telemetry.metrics_page import MetricsPage


@dataclass
class OneModel:
    """A mesh with the model qwen."""

    view: FleetView = field(default_factory=lambda: FleetView(1, {}, {"qwen": model_view()}))


ANN, BOB = UsageKey(1, "ann", "key:a", "qwen", ""), UsageKey(1, "bob", "key:b", "some caller's text", "")


def lines_after(*, by_tenant: bool) -> set[str]:
    page = MetricsPage()
    metrics = UsageMetrics(page, OneModel(), by_tenant=by_tenant)
    worked = UsageSums(
        completed_count=2,
        prompt_tokens=30,
        cached_prompt_tokens=10,
        completion_tokens=5,
        gpu_nanoseconds=1_500_000_000,
        energy_millijoules=2_500,
        measured_energy_count=2,
        remote_count=1,
        price_nanodollars=2_500_000,
        priced_count=1,
        image_steps=40,
        image_pixels=2_097_152,
        audio_milliseconds=12_500,
    )
    metrics({ANN: worked, BOB: UsageSums(failed_count=1, unknown_tokens_count=1, unknown_gpu_count=1)})
    metrics({ANN: UsageSums(completed_count=1)})
    text = generate_latest(page).decode()
    return {line for line in text.splitlines() if line.startswith("weft_usage")}


def test_usage_is_counted_by_model_and_caller_text_is_not_a_label() -> None:
    assert lines_after(by_tenant=False) == {
        'weft_usage_requests_total{model="qwen",outcome="completed"} 3.0',
        'weft_usage_requests_total{model="unknown",outcome="failed"} 1.0',
        'weft_usage_tokens_total{model="qwen",type="input"} 30.0',
        'weft_usage_tokens_total{model="qwen",type="cached"} 10.0',
        'weft_usage_tokens_total{model="qwen",type="output"} 5.0',
        'weft_usage_accelerator_seconds_total{model="qwen"} 1.5',
        'weft_usage_energy_joules_total{model="qwen"} 2.5',
        'weft_usage_price_dollars_total{model="qwen"} 0.0025',
        'weft_usage_image_steps_total{model="qwen"} 40.0',
        'weft_usage_image_pixels_total{model="qwen"} 2.097152e+06',
        'weft_usage_audio_seconds_total{model="qwen"} 12.5',
        'weft_usage_remote_requests_total{model="qwen"} 1.0',
        'weft_usage_unknown_total{model="unknown",what="tokens"} 1.0',
        'weft_usage_unknown_total{model="unknown",what="accelerator_time"} 1.0',
    }
