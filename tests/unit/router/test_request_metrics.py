"""The metrics of finished requests, by OpenTelemetry's names."""

import pytest
from kit.fleet import model_view
from kit.request_endings import ending
from kit.scheduling import placement_request
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from router_svc.observer import RouterState
from router_svc.policy.decisions import WaitKind
from router_svc.router_metrics import RouterMetrics
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.settings.metric_limits import MetricLimits
from weft.kernel.telemetry.metrics_page import OTHER, MetricsPage
from weft.kernel.telemetry.tracing import NO_TRACING, Sampling, Tracing

TRACE = "ab" * 16
SAMPLED = f"00-{TRACE}-{'cd' * 8}-01"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def _view(*names: str) -> FleetView:
    models = {name: model_view(name, pool="chat") for name in names}
    return FleetView(1, {}, models)


VIEW = _view("qwen")


def _request(model: str = "chat", traceparent: str = "") -> PlacementRequest:
    return placement_request("r1", tenant="t", model=model, traceparent=traceparent)


def _receipt(outcome: "receipt_pb2.Outcome.ValueType", model: str = "qwen") -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(outcome=outcome, model=model)
    receipt.attempts.add(runner="titan")
    receipt.time_to_first_token.FromMilliseconds(500)
    receipt.total_time.FromMilliseconds(1500)
    receipt.usage.prompt_tokens, receipt.usage.completion_tokens = 30, 11
    if outcome != receipt_pb2.OUTCOME_COMPLETED:
        receipt.reason = Reason.SERVER_DIED.value  # type: ignore[assignment]  # same numbers
    return receipt


async def _text(metrics: RouterMetrics) -> str:
    return (await metrics.page.render(OPENMETRICS)).body.decode()


async def _found(metrics: RouterMetrics) -> dict[str, dict[tuple[str, ...], float]]:
    """By name of a sample: values by the labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(await _text(metrics)):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            labels = tuple(f"{name.removeprefix('gen_ai_')}={value}" for name, value in sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


COMMON = ("operation_name=chat", "provider_name=weft", "request_model=chat", "response_model=qwen")


async def test_completed_request_records_duration_speed_and_tokens() -> None:
    metrics = RouterMetrics()
    metrics.note_end(
        ending(_request(), reason=Reason.UNSPECIFIED, receipt=_receipt(receipt_pb2.OUTCOME_COMPLETED), view=VIEW)
    )
    found = await _found(metrics)
    assert found["gen_ai_server_request_duration_seconds_sum"] == {("error_type=", *COMMON): 1.5}
    assert found["gen_ai_server_time_to_first_token_seconds_sum"] == {COMMON: 0.5}
    # Ten tokens came in the second after the first one.
    assert found["gen_ai_server_time_per_output_token_seconds_sum"] == {COMMON: pytest.approx(0.1)}
    assert found["gen_ai_client_token_usage_tokens_sum"] == {
        (*COMMON, "token_type=input"): 30.0,
        (*COMMON, "token_type=output"): 11.0,
    }
    assert "weft_cut_off_answers_total" not in found
    assert set(found["weft_inconsistent_receipts_total"].values()) == {0.0}


async def test_answer_failed_after_its_first_content_is_cut_off_and_has_no_speed() -> None:
    metrics = RouterMetrics()
    metrics.note_end(
        ending(_request(), reason=Reason.SERVER_DIED, receipt=_receipt(receipt_pb2.OUTCOME_FAILED), view=VIEW)
    )
    found = await _found(metrics)
    assert found["weft_cut_off_answers_total"] == {("model=chat", "reason=server_died"): 1.0}
    assert found["gen_ai_server_request_duration_seconds_count"] == {("error_type=server_died", *COMMON): 1.0}
    assert "gen_ai_server_time_to_first_token_seconds_count" not in found


async def test_answer_cancelled_by_its_caller_is_not_cut_off() -> None:
    metrics = RouterMetrics()
    metrics.note_end(
        ending(_request(), reason=Reason.CANCELLED, receipt=_receipt(receipt_pb2.OUTCOME_CANCELLED), view=VIEW)
    )
    assert "weft_cut_off_answers_total" not in await _found(metrics)


async def test_inconsistent_receipt_is_counted_by_its_fault() -> None:
    metrics = RouterMetrics()
    receipt = _receipt(receipt_pb2.OUTCOME_COMPLETED)
    receipt.usage.cached_prompt_tokens = 31
    metrics.note_end(ending(_request(), reason=Reason.UNSPECIFIED, receipt=receipt, view=VIEW))
    found = await _found(metrics)
    faults = {labels: count for labels, count in found["weft_inconsistent_receipts_total"].items() if count}
    assert faults == {("fault=cached_exceeds_prompt",): 1.0}


async def test_request_without_a_runner_has_no_response_model() -> None:
    metrics = RouterMetrics()
    receipt = receipt_pb2.Receipt(
        outcome=receipt_pb2.OUTCOME_REJECTED,
        model="chat",
        reason=Reason.QUEUE_FULL.value,  # type: ignore[arg-type]
    )
    receipt.total_time.FromMilliseconds(5)
    metrics.note_end(ending(_request(), reason=Reason.QUEUE_FULL, receipt=receipt, view=VIEW))
    [labels] = (await _found(metrics))["gen_ai_server_request_duration_seconds_count"]
    assert "response_model=" in labels
    assert "error_type=queue_full" in labels


RECORDING = Tracing(Sampling())


@pytest.mark.parametrize(
    ("tracing", "traceparent", "count"),
    [(RECORDING, SAMPLED, 5), (RECORDING, SAMPLED[:-1] + "0", 0), (RECORDING, "", 0), (NO_TRACING, SAMPLED, 0)],
)
async def test_only_recorded_and_sampled_requests_leave_their_trace_id_as_exemplar(
    tracing: Tracing, traceparent: str, count: int
) -> None:
    metrics = RouterMetrics()
    metrics.show(RouterState(queues=list, hosts=dict, memory_age_seconds=lambda: None, tracing=tracing))
    metrics.note_end(
        ending(
            _request(traceparent=traceparent),
            reason=Reason.UNSPECIFIED,
            receipt=_receipt(receipt_pb2.OUTCOME_COMPLETED),
            view=VIEW,
        )
    )
    text = [line for line in (await _text(metrics)).splitlines() if line.startswith("gen_ai_")]
    assert sum(f'# {{trace_id="{TRACE}"}}' in line for line in text) == count


async def test_histograms_are_bounded_for_any_number_of_models() -> None:
    metrics = RouterMetrics(MetricsPage(MetricLimits(max_label_sets=3)))
    names = [f"m{number}" for number in range(20)]
    view = _view(*names)
    for name in names:
        metrics.note_end(
            ending(
                _request(name),
                reason=Reason.UNSPECIFIED,
                receipt=_receipt(receipt_pb2.OUTCOME_COMPLETED, name),
                view=view,
            )
        )
    durations = (await _found(metrics))["gen_ai_server_request_duration_seconds_count"]
    asked = {label for labels in durations for label in labels if label.startswith("request_model")}
    assert asked == {"request_model=m0", "request_model=m1", "request_model=m2", f"request_model={OTHER}"}
    assert sum(durations.values()) == 20


async def test_unknown_model_names_share_one_label() -> None:
    metrics = RouterMetrics()
    for number in range(10):
        metrics.note_end(
            ending(
                _request(f"made-up-{number}"),
                reason=Reason.UNSPECIFIED,
                receipt=_receipt(receipt_pb2.OUTCOME_COMPLETED),
                view=VIEW,
            )
        )
    assert "made-up" not in await _text(metrics)


async def test_waits_are_counted_by_reason() -> None:
    metrics = RouterMetrics()
    metrics.note_wait(_request(), WaitKind.SLOT, VIEW)
    metrics.note_wait(_request(), WaitKind.MEMORY, VIEW)
    assert (await _found(metrics))["weft_router_waits_total"] == {
        ("model=chat", "reason=slot"): 1.0,
        ("model=chat", "reason=memory"): 1.0,
    }
