"""What a runner tells people about its instances and requests, as messages."""

from collections.abc import Callable
from datetime import datetime, timedelta

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from runner_svc.instance import Instance
from runner_svc.load_messages import duration_message, options_message, parameter_message
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.records import RequestRecord
from runner_svc.restart_log import Restart
from weft.api.runner.v1 import runner_service_pb2 as pb

MIN_CRASH_LINES = 20
"""Told of the last crash even where no lines of the log were asked for."""

Tellable = Callable[[str], str]
"""Words of an engine or about it, as they may leave the runner."""


def of_instance(
    instance: Instance, log_line_count: int, tellable: Tellable, cache: pb.CacheFigures | None = None
) -> pb.InstanceDescription:
    """One instance, with the last `log_line_count` lines of its log and of its last crash."""
    crash_lines = instance.crash_lines[-max(log_line_count, MIN_CRASH_LINES) :]
    return pb.InstanceDescription(
        model=instance.model,
        process_id=instance.backend.process_id or 0,
        restart_count=instance.restart_count,
        last_restart_reason=tellable(instance.last_restart_reason),
        log_lines=map(tellable, instance.backend.log_lines(log_line_count)),
        active_request_ids=instance.slots.holders,
        restarts=[_restart(restart, tellable) for restart in instance.restarts],
        requests=map(of_request, instance.records.all),
        last_crash_lines=map(tellable, crash_lines),
        last_ready_time=timestamp(instance.last_ready_at),
        containment=instance.backend.containment,
        timeouts=_timeouts(instance.timeouts),
        load_parameters=map(parameter_message, instance.backend.load_parameters),
        quantizations=sorted(instance.quantizations),
        load_options=options_message(instance.plan, instance.load_keep_alive_seconds, pin=instance.memory.pinned),
        cache_isolation=instance.backend.cache_isolation.value,  # type: ignore[arg-type]  # same numbers
        cache=cache,
        vision_input=instance.vision_input,
        model_path="" if instance.model_path is None else str(instance.model_path),
    )


def of_request(record: RequestRecord) -> pb.RequestRecord:
    """One request, without its output."""

    def at(seconds: float | None) -> Timestamp | None:
        return None if seconds is None else timestamp(record.started_at + timedelta(seconds=seconds - record.started))

    return pb.RequestRecord(
        request_id=record.request_id,
        model=record.model,
        state=record.state.value,  # type: ignore[arg-type]  # same numbers
        reason=record.reason.value,  # type: ignore[arg-type]  # same numbers
        start_time=at(record.started),
        first_content_time=at(record.first_content),
        last_progress_time=at(record.last_progress),
        end_time=at(record.ended),
        output_chars=record.output_chars,
        tool_iterations_left=record.tool_iterations_left,
        signals=record.signals,
    )


def _restart(restart: Restart, tellable: Tellable) -> pb.Restart:
    return pb.Restart(
        time=timestamp(restart.at),
        reason=restart.reason.value,  # type: ignore[arg-type]  # same numbers
        detail=tellable(restart.detail),
        recovery=duration(restart.recovery_seconds),
    )


def _timeouts(profile: TimeoutProfile) -> pb.TimeoutProfile:
    return pb.TimeoutProfile(
        connect=duration(profile.connect_seconds),
        headers=duration(profile.headers_seconds),
        first_token=duration(profile.first_token_seconds),
        prefill_liveness=duration(profile.prefill_liveness_seconds),
        idle_stream=duration(profile.idle_stream_seconds),
        absolute=duration(profile.absolute_seconds),
        probe_interval=duration(profile.probe_interval_seconds),
    )


def timestamp(at: datetime | None) -> Timestamp | None:
    """A moment; None: not set."""
    if at is None:
        return None
    stamp = Timestamp()
    stamp.FromDatetime(at)
    return stamp


def duration(seconds: float | None) -> Duration | None:
    """A length of time; None: not set."""
    return None if seconds is None else duration_message(seconds)
