"""What a runner reports of one model, in and out again."""

from collections.abc import Callable

import pytest

from registry_svc.mesh.requests import valid_heartbeat
from registry_svc.registry_config import RegistryConfig
from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1 import runner_pb2
from weft.api.registry.v1.runner_session_service_pb2 import HeartbeatRequest

State = runner_pb2.InstanceState
CONFIG = RegistryConfig(database_url="sqlite://")


def valid_instance(state: State) -> State:
    report = runner_pb2.Capability(instances=[state])
    beat = HeartbeatRequest(session_id="s", incarnation="i", capability=report)
    assert not valid_heartbeat(beat, CONFIG)
    return beat.capability.instances[0]


def _state() -> State:
    state = State(
        model="qwen",
        phase=State.PHASE_READY,
        slots_total=4,
        slots_used=1,
        context_tokens=2048,
        detail="fine",
        pinned=True,
        fault_count=3,
        last_fault=runner_pb2.InstanceFault(reason=error_reason_pb2.ERROR_REASON_SERVER_DIED, detail="signal SIGKILL"),
        memory=runner_pb2.InstanceMemory(
            leased_bytes=5 << 30,
            measured_bytes=4 << 30,
            estimated_bytes=6 << 30,
            estimate_source="header",
            device_indexes=[0, 3],
        ),
    )
    state.unload_time.FromNanoseconds(1_700_000_000_250_000_000)
    state.load_eta.FromNanoseconds(1_500_000_000)
    state.usual_load.FromNanoseconds(47_250_000_000)
    return state


def test_report_round_trips_through_the_registry() -> None:
    assert valid_instance(_state()) == _state()


def test_report_without_memory_keeps_it_unset() -> None:
    plain = State(model="qwen", phase=State.PHASE_READY)
    assert valid_instance(plain) == plain


def test_unmeasured_memory_is_distinguished_from_zero() -> None:
    unknown, empty = _state(), _state()
    unknown.memory.ClearField("measured_bytes")
    empty.memory.measured_bytes = 0
    assert not valid_instance(unknown).memory.HasField("measured_bytes")
    assert valid_instance(empty).memory.HasField("measured_bytes")


def test_fault_kind_of_a_newer_runner_keeps_its_message() -> None:
    state = State(model="qwen", phase=State.PHASE_READY, fault_count=1)
    state.last_fault.reason = 9999  # type: ignore[assignment]  # as it comes from the wire
    state.last_fault.detail = "bit rot"
    instance = valid_instance(state)
    assert instance.last_fault == runner_pb2.InstanceFault(detail="bit rot")


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda state: setattr(state.memory, "leased_bytes", -1), "memory.leased_bytes"),
        (lambda state: setattr(state.memory, "measured_bytes", -1), "memory.measured_bytes"),
        (lambda state: setattr(state.memory, "estimated_bytes", -1), "memory.estimated_bytes"),
        (lambda state: setattr(state.memory, "estimate_source", "x" * 33), "memory.estimate_source"),
        (lambda state: setattr(state.memory, "estimate_source", "a\nb"), "memory.estimate_source"),
        (lambda state: state.memory.device_indexes.append(-1), "memory.device_indexes[2]"),
        (lambda state: state.memory.device_indexes.extend(range(63)), "memory.device_indexes"),
        (lambda state: setattr(state, "fault_count", -1), "fault_count"),
        (lambda state: setattr(state.last_fault, "detail", "x" * 4097), "last_fault.detail"),
        (lambda state: setattr(state.unload_time, "seconds", 1 << 60), "unload_time"),
        (lambda state: setattr(state.load_eta, "seconds", -1), "load_eta"),
        (lambda state: setattr(state.load_eta, "seconds", 86_401), "load_eta"),
        (lambda state: setattr(state.usual_load, "seconds", -1), "usual_load"),
        (lambda state: setattr(state.usual_load, "seconds", 86_401), "usual_load"),
    ],
)
def test_invalid_figure_is_left_out_with_its_path_and_the_rest_of_the_report_is_used(
    spoil: Callable[[State], None], field: str
) -> None:
    state = _state()
    spoil(state)
    beat = HeartbeatRequest(session_id="s", incarnation="i", capability=runner_pb2.Capability(instances=[state]))
    [item] = valid_heartbeat(beat, CONFIG)
    assert item.name == "qwen"
    assert item.message.startswith(f"{field}: ")
    [kept] = beat.capability.instances
    assert (kept.phase, kept.slots_total) == (State.PHASE_READY, 4)
