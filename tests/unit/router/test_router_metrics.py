"""What a router counts, and what it shows with each scrape."""

import re

from kit.fleet import model_view
from kit.request_endings import ending
from kit.scheduling import placement_request
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router_svc.observer import RouterState
from router_svc.policy.decisions import Rejects, Waits
from router_svc.policy.endpoints.candidates import HostMemory, MemoryHolder
from router_svc.policy.quotes import Coverage
from router_svc.router_metrics import RouterMetrics
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue
from weft.kernel.settings.metric_limits import MetricLimits
from weft.kernel.telemetry.metrics_page import MetricsPage
from weft.kernel.telemetry.tracing import NO_TRACING

MODEL = model_view(pool="chat")
VIEW = FleetView(1, {}, {"qwen": MODEL})


def _request(model: str = "chat") -> PlacementRequest:
    return placement_request("r1", tenant="secret-tenant", model=model)


def _receipt(
    outcome: "receipt_pb2.Outcome.ValueType", *, waited: float = 0.0, loaded: float = 0.0
) -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(outcome=outcome)
    receipt.attempts.add(runner="titan")
    receipt.queue_wait.FromMilliseconds(int(waited * 1e3))
    receipt.load_wait.FromMilliseconds(int(loaded * 1e3))
    return receipt


def _samples(metrics: RouterMetrics) -> dict[str, float]:
    """Values by name and labels, in the order of the labels."""
    text = generate_latest(metrics.page).decode()
    return {
        f"{sample.name}{{{','.join(f'{name}={value}' for name, value in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_ends_are_counted_by_outcome_and_reason_with_their_waits() -> None:
    metrics = RouterMetrics()
    completed = _receipt(receipt_pb2.OUTCOME_COMPLETED, waited=2.0)
    metrics.note_end(ending(_request(), reason=Reason.UNSPECIFIED, receipt=completed, view=VIEW))
    loaded = _receipt(receipt_pb2.OUTCOME_FAILED, waited=0.2, loaded=20.0)
    metrics.note_end(ending(_request(), reason=Reason.SERVER_DIED, receipt=loaded, view=VIEW))
    metrics.note_end(ending(_request(), reason=Reason.CANCELLED, view=VIEW))
    found = _samples(metrics)
    assert found["weft_router_requests_total{model=chat,outcome=completed,reason=completed}"] == 1
    assert found["weft_router_requests_total{model=chat,outcome=failed,reason=server_died}"] == 1
    assert found["weft_router_requests_total{model=chat,outcome=unknown,reason=cancelled}"] == 1
    assert found["weft_router_queue_wait_seconds_count{model=chat}"] == 2
    assert found["weft_router_queue_wait_seconds_bucket{le=0.25,model=chat}"] == 1
    assert found["weft_router_load_wait_seconds_count{model=chat}"] == 1
    assert found["weft_router_load_wait_seconds_sum{model=chat}"] == 20.0


def test_request_refused_over_grpc_is_counted_as_rejected_with_the_reason() -> None:
    """Regression: its dispatcher leaves without a receipt, and it counted as unknown and cancelled."""
    metrics = RouterMetrics()
    metrics.note_end(ending(_request(), last_error=Reason.QUEUE_FULL, view=VIEW))
    metrics.note_end(ending(_request(), last_error=Reason.SERVER_DIED, was_placed=True, view=VIEW))
    metrics.note_end(ending(_request(), last_error=Reason.CANCELLED, view=VIEW))
    metrics.note_end(ending(_request(), last_error=Reason.SERVICE_UNAVAILABLE, view=VIEW))
    assert {name: value for name, value in _samples(metrics).items() if "requests_total" in name} == {
        "weft_router_requests_total{model=chat,outcome=rejected,reason=queue_full}": 1,
        "weft_router_requests_total{model=chat,outcome=failed,reason=server_died}": 1,
        "weft_router_requests_total{model=chat,outcome=cancelled,reason=cancelled}": 1,
    }, "the last one is placed again, by another router"


def test_request_that_never_got_a_slot_is_not_in_the_wait_histogram() -> None:
    metrics = RouterMetrics()
    refused = _receipt(receipt_pb2.OUTCOME_REJECTED, waited=30.0)
    refused.ClearField("attempts")
    metrics.note_end(ending(_request(), reason=Reason.QUEUE_TIMEOUT, receipt=refused, view=VIEW))
    assert "weft_router_queue_wait_seconds_count{model=chat}" not in _samples(metrics)


def test_refusals_and_failed_attempts_are_counted_and_a_wait_status_is_not() -> None:
    metrics = RouterMetrics()
    metrics.note_decision(Waits(key=1, position=1, reason="slots"), _request(), VIEW)
    metrics.note_decision(Rejects(key=1, reason=Reason.QUEUE_FULL, message=""), _request("qwen"), VIEW)
    metrics.note_failed_attempt(Reason.NO_SLOT_AVAILABLE)
    found = _samples(metrics)
    assert found["weft_router_refusals_total{model=qwen,reason=queue_full}"] == 1
    assert found["weft_router_failed_attempts_total{reason=no_slot_available}"] == 1
    assert not [name for name in found if "grants" in name]


def test_caller_supplied_names_add_no_labels() -> None:
    metrics = RouterMetrics()
    for number in range(1000):
        metrics.note_end(
            ending(
                _request(f"made-up-{number}"),
                reason=Reason.MODEL_NOT_FOUND,
                view=VIEW,
                refusal=WeftError(Reason.MODEL_NOT_FOUND, "x"),
            )
        )
    names = list(_samples(metrics))
    assert [name for name in names if "refusals" in name] == [
        "weft_router_refusals_total{model=unknown,reason=model_not_found}"
    ]
    assert not re.search("secret-tenant|made-up", " ".join(names))


def test_queue_and_memory_gauges_reflect_the_scrape_time() -> None:
    metrics = RouterMetrics()
    queues = [PoolQueue(pool="chat", waiting=3, max_waiting=64, running=2)]
    holders = (
        MemoryHolder(name="qwen", is_model=True, held_bytes=40),
        MemoryHolder(name="train.py", is_model=False, held_bytes=20),
        MemoryHolder(name="other.py", is_model=False, held_bytes=5),
    )
    hosts = {"box": HostMemory(host="box", total_bytes=100, free_bytes=30, holders=holders)}
    metrics.show(
        RouterState(queues=lambda: queues, hosts=lambda: hosts, memory_age_seconds=lambda: 1.5, tracing=NO_TRACING)
    )
    found = _samples(metrics)
    assert found["weft_router_waiting{pool=chat}"] == 3
    assert found["weft_router_running{pool=chat}"] == 2
    assert found["weft_memory_total_bytes{host=box}"] == 100
    assert found["weft_memory_free_bytes{host=box}"] == 30
    assert found["weft_memory_held_bytes{holder=qwen,host=box}"] == 40
    assert found["weft_memory_held_bytes{holder=program,host=box}"] == 25
    assert found["weft_router_memory_age_seconds{}"] == 1.5
    queues.clear()
    assert "weft_router_waiting{pool=chat}" not in _samples(metrics)


def test_tenants_have_a_label_only_if_configured() -> None:
    metrics = RouterMetrics(MetricsPage(MetricLimits(tenants=("team-a", "idle"))))
    accounts = {"team-a": 120.0, "secret-tenant": 7.0}
    metrics.show(
        RouterState(
            queues=list,
            hosts=dict,
            memory_age_seconds=lambda: None,
            view_revision=lambda: 9,
            watch_lag_seconds=lambda: 2.5,
            fair_share=accounts.get,
            active_tenants=lambda: 2,
            quotes=lambda: {"max_wait": Coverage(kept=3, answers=4)},
        )
    )
    found = _samples(metrics)
    assert {name: value for name, value in found.items() if "fair_share" in name} == {
        "weft_router_fair_share_tokens{tenant=team-a}": 120.0
    }
    assert found["weft_router_active_tenants{}"] == 2
    quotes = [found[f"weft_router_quotes_total{{kept={kept},time=max_wait}}"] for kept in ("yes", "no")]
    assert quotes == [3, 1]
    assert found["weft_router_view_revision{}"] == 9
    assert found["weft_router_watch_lag_seconds{}"] == 2.5


def test_shown_wait_estimate_is_counted_by_its_error() -> None:
    metrics = RouterMetrics()
    metrics.note_estimate(_request(), 0.4, VIEW)
    found = _samples(metrics)
    assert found["weft_router_wait_estimate_error_ratio_bucket{le=0.25,model=chat}"] == 0
    assert found["weft_router_wait_estimate_error_ratio_bucket{le=0.5,model=chat}"] == 1
