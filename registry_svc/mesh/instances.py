"""One model on one runner, from the wire and to it."""

import math
from datetime import UTC, datetime

from google.protobuf import duration_pb2, timestamp_pb2

from registry_svc.checks import cleaned_words, require_at_most, require_count, require_text
from registry_svc.mesh.domain import Instance, InstanceFault, InstanceMemory, Phase
from weft.api.registry.v1 import runner_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_name
from weft.kernel.reasons import Reason

MAX_DETAIL_CHARS = 4096
MAX_SOURCE_CHARS = 32
MAX_DEVICES = 64
MAX_LOAD_SECONDS = 86_400.0


def instance_of(state: runner_pb2.InstanceState, field: str) -> Instance:
    """A report about one model. Raises INVALID_ARGUMENT naming what is wrong below `field`."""
    if state.phase not in {phase.value for phase in Phase}:
        raise invalid_field(f"{field}.phase", "must be a known phase")
    progress = state.load_progress if state.HasField("load_progress") else None
    if progress is not None and (math.isnan(progress) or not 0.0 <= progress <= 1.0):
        raise invalid_field(f"{field}.load_progress", "must be from 0 to 1")
    return Instance(
        model=require_name(state.model, f"{field}.model"),
        phase=Phase(state.phase),
        slots_total=require_count(state.slots_total, f"{field}.slots_total"),
        slots_used=require_count(state.slots_used, f"{field}.slots_used"),
        load_progress=progress,
        context_tokens=require_count(state.context_tokens, f"{field}.context_tokens"),
        detail=cleaned_words(state.detail, f"{field}.detail", MAX_DETAIL_CHARS),
        memory=_memory_of(state.memory, f"{field}.memory") if state.HasField("memory") else None,
        unload_at=_moment_of(state.unload_time, f"{field}.unload_time") if state.HasField("unload_time") else None,
        pinned=state.pinned,
        load_eta_seconds=_seconds_of(state.load_eta, f"{field}.load_eta") if state.HasField("load_eta") else None,
        usual_load_seconds=_seconds_of(state.usual_load, f"{field}.usual_load")
        if state.HasField("usual_load")
        else None,
        fault_count=require_count(state.fault_count, f"{field}.fault_count"),
        last_fault=_fault_of(state.last_fault, f"{field}.last_fault") if state.HasField("last_fault") else None,
    )


def instance_message(instance: Instance) -> runner_pb2.InstanceState:
    """The same, to the wire."""
    message = runner_pb2.InstanceState(
        model=instance.model,
        phase=runner_pb2.InstanceState.Phase.ValueType(instance.phase.value),
        slots_total=instance.slots_total,
        slots_used=instance.slots_used,
        load_progress=instance.load_progress,
        context_tokens=instance.context_tokens,
        detail=instance.detail,
        pinned=instance.pinned,
        fault_count=instance.fault_count,
    )
    fault = instance.last_fault
    if fault is not None:
        message.last_fault.reason = fault.reason.value  # type: ignore[assignment]  # same numbers
        message.last_fault.detail = fault.detail
    memory = instance.memory
    if memory is not None:
        message.memory.CopyFrom(
            runner_pb2.InstanceMemory(
                leased_bytes=memory.leased_bytes,
                measured_bytes=memory.measured_bytes,
                estimated_bytes=memory.estimated_bytes,
                estimate_source=memory.estimate_source,
                device_indexes=memory.device_indexes,
            )
        )
    if instance.unload_at is not None:
        message.unload_time.FromDatetime(instance.unload_at)
    if instance.load_eta_seconds is not None:
        message.load_eta.FromNanoseconds(int(instance.load_eta_seconds * 1e9))
    if instance.usual_load_seconds is not None:
        message.usual_load.FromNanoseconds(int(instance.usual_load_seconds * 1e9))
    return message


def _memory_of(memory: runner_pb2.InstanceMemory, field: str) -> InstanceMemory:
    require_at_most(memory.device_indexes, f"{field}.device_indexes", MAX_DEVICES)
    measured = memory.measured_bytes if memory.HasField("measured_bytes") else None
    return InstanceMemory(
        leased_bytes=require_count(memory.leased_bytes, f"{field}.leased_bytes"),
        measured_bytes=None if measured is None else require_count(measured, f"{field}.measured_bytes"),
        estimated_bytes=require_count(memory.estimated_bytes, f"{field}.estimated_bytes"),
        estimate_source=require_text(memory.estimate_source, f"{field}.estimate_source", MAX_SOURCE_CHARS),
        device_indexes=tuple(require_count(index, f"{field}.device_indexes") for index in memory.device_indexes),
    )


def _fault_of(fault: runner_pb2.InstanceFault, field: str) -> InstanceFault:
    known = fault.reason in {reason.value for reason in Reason}
    return InstanceFault(
        reason=Reason(fault.reason) if known else Reason.UNSPECIFIED,
        detail=cleaned_words(fault.detail, f"{field}.detail", MAX_DETAIL_CHARS),
    )


def _moment_of(moment: timestamp_pb2.Timestamp, field: str) -> datetime:
    try:
        return moment.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise invalid_field(field, "must be a moment between the years 1 and 9999") from None


def _seconds_of(duration: duration_pb2.Duration, field: str) -> float:
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0.0 <= seconds <= MAX_LOAD_SECONDS:
        raise invalid_field(field, f"must be from 0 to {MAX_LOAD_SECONDS:g} s")
    return seconds
