"""`weft describe` on an instance: what its runner told is all there, in words."""

from datetime import UTC, datetime, timedelta

from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft_app.cli.description import instance_lines, reason_name

STATE = InstanceState(model="m", phase=InstanceState.PHASE_READY, slots_total=4, slots_used=1, context_tokens=2048)


def described() -> pb.InstanceDescription:
    instance = pb.InstanceDescription(model="m", process_id=77, restart_count=2, containment="guardian (sub-reaper)")
    an_hour_ago = datetime.now(UTC) - timedelta(hours=1, seconds=5)
    restart = instance.restarts.add(reason=error_reason_pb2.ERROR_REASON_STALL_TIMEOUT, detail="no token for 120 s")
    restart.time.FromDatetime(an_hour_ago)
    restart.recovery.FromMilliseconds(1500)
    instance.restarts.add(reason=error_reason_pb2.ERROR_REASON_OUT_OF_MEMORY, detail="too big").time.CopyFrom(
        restart.time
    )
    record = instance.requests.add(request_id="req-1", state=pb.RequestRecord.STATE_RUNNING_TOOL, output_chars=12)
    record.start_time.FromDatetime(an_hour_ago)
    record.last_progress_time.FromDatetime(an_hour_ago)
    record.tool_iterations_left = 3
    record.signals.add(name="LOW_CONFIDENCE")
    instance.timeouts.connect.FromSeconds(5)
    instance.timeouts.idle_stream.FromSeconds(120)
    instance.last_crash_lines.append("ggml_abort\x1b[31m")
    instance.log_lines.append("ready")
    return instance


def test_restarts_requests_timeouts_and_the_last_crash_are_told() -> None:
    text = "\n".join(instance_lines(STATE, described()))
    assert "77, contained by guardian (sub-reaper)" in text
    assert "stall_timeout 1.5s no token for 120 s" in " ".join(text.split())
    assert "out_of_memory not yet too big" in " ".join(text.split())
    assert "running tool" in text
    assert "LOW_CONFIDENCE" in text
    assert "connect 5.0s, headers off" in text
    assert "idle stream 2m" in text
    assert "ggml_abort [31m" in text, "an engine's output cannot steer the terminal"
    assert text.endswith("ready")


def test_an_instance_whose_runner_cannot_be_asked_says_so() -> None:
    assert list(instance_lines(STATE, None))[-1].split(maxsplit=1) == ["Process:", "its runner is unreachable"]


def test_a_request_in_a_state_of_a_newer_runner_is_shown_with_its_number() -> None:
    instance = described()
    instance.requests[0].state = 99  # type: ignore[assignment]  # as it comes from the wire
    assert "state 99" in "\n".join(instance_lines(STATE, instance))


def test_a_runner_older_than_restarts_and_requests_is_described_without_them() -> None:
    old = pb.InstanceDescription(model="m", process_id=77, restart_count=1, last_restart_reason="it died")
    lines = list(instance_lines(STATE, old))
    assert lines[-1].split(maxsplit=1) == ["Restarts:", "1; last reason: it died"]


def test_a_reason_of_a_newer_runner_is_shown_as_its_number() -> None:
    assert reason_name(999) == "reason 999"
