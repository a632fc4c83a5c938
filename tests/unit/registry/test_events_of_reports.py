"""Which events a capability report makes: the death of an engine comes before what follows it."""

from itertools import pairwise

import pytest

from registry_svc.mesh.events import report_events, waking_after
from weft.api.registry.v1 import event_pb2
from weft.api.registry.v1.runner_pb2 import Capability, InstanceFault, InstanceState
from weft.kernel.errors.reasons import Reason


def _fault(reason: Reason, detail: str) -> InstanceFault:
    return InstanceFault(reason=reason.value, detail=detail)  # type: ignore[arg-type]  # same numbers


KILLED = _fault(Reason.SERVER_DIED, "signal SIGKILL")


def _report(
    phase: InstanceState.Phase.ValueType, fault_count: int = 0, last_fault: InstanceFault | None = None
) -> Capability:
    instance = InstanceState(
        model="m",
        phase=phase,
        slots_total=1,
        fault_count=fault_count,
        last_fault=last_fault,
    )
    return Capability(instances=[instance])


def _events(*reports: Capability, reported_before: bool = True) -> list[tuple[event_pb2.EventReason.ValueType, str]]:
    """The events of a row of reports, the first of which is known already."""
    events, waking = list[tuple[event_pb2.EventReason.ValueType, str]](), frozenset[str]()
    for earlier, report in pairwise(reports):
        drafts = report_events(
            earlier.instances, report.instances, {"m"}, waking=waking, reported_before=reported_before
        )
        events += [(draft.reason, draft.message) for draft in drafts]
        waking = waking_after(earlier.instances, report.instances, waking)
    return events


READY = (event_pb2.EVENT_REASON_READY, "its engine takes requests")
DIED = (event_pb2.EVENT_REASON_DIED, "signal SIGKILL (restart 1)")


def test_failure_is_reported_before_the_following_ready() -> None:
    reports = (
        _report(InstanceState.PHASE_READY),
        _report(InstanceState.PHASE_STOPPING, 1, KILLED),
        _report(InstanceState.PHASE_READY, 1, KILLED),
    )
    assert _events(*reports) == [DIED, READY]


def test_failure_and_ready_between_two_reports_are_both_reported() -> None:
    assert _events(_report(InstanceState.PHASE_READY), _report(InstanceState.PHASE_READY, 1, KILLED)) == [DIED, READY]


def test_report_without_a_new_fault_emits_no_failure() -> None:
    assert _events(_report(InstanceState.PHASE_READY, 1, KILLED), _report(InstanceState.PHASE_READY, 1, KILLED)) == []


def test_several_failures_between_two_reports_are_counted() -> None:
    events = _events(_report(InstanceState.PHASE_READY, 1, KILLED), _report(InstanceState.PHASE_LOADING, 4, KILLED))
    assert events == [(event_pb2.EVENT_REASON_DIED, "signal SIGKILL (restarts 2 to 4, the last one)")]


@pytest.mark.parametrize(
    ("fault", "event"),
    [
        (
            _fault(Reason.OUT_OF_MEMORY, "exit code 1"),
            (event_pb2.EVENT_REASON_DIED, "out of memory: exit code 1 (restart 1)"),
        ),
        (
            _fault(Reason.OUT_OF_MEMORY, "signal SIGKILL: its memory limit was reached"),
            (event_pb2.EVENT_REASON_DIED, "signal SIGKILL: its memory limit was reached (restart 1)"),
        ),
        (
            _fault(Reason.STALL_TIMEOUT, "no token for 120 s"),
            (event_pb2.EVENT_REASON_RESTARTED, "no token for 120 s (restart 1)"),
        ),
        (_fault(Reason.SERVER_DIED, ""), (event_pb2.EVENT_REASON_DIED, "server_died (restart 1)")),
    ],
    ids=["out of memory", "killed for memory", "stalled", "without words"],
)
def test_failure_event_has_the_exit_reason(
    fault: InstanceFault, event: tuple[event_pb2.EventReason.ValueType, str]
) -> None:
    assert _events(_report(InstanceState.PHASE_READY), _report(InstanceState.PHASE_LOADING, 1, fault)) == [event]


WOKE = (event_pb2.EVENT_REASON_WOKE, "it woke up")
HIBERNATED = (event_pb2.EVENT_REASON_HIBERNATED, "it went to sleep")
ASLEEP, LOADING = _report(InstanceState.PHASE_HIBERNATING), _report(InstanceState.PHASE_LOADING)


@pytest.mark.parametrize("between", [(), (LOADING,), (LOADING, _report(InstanceState.PHASE_STOPPING), LOADING)])
def test_model_wakes_when_it_accepts_requests(between: tuple[Capability, ...]) -> None:
    assert _events(ASLEEP, *between, _report(InstanceState.PHASE_READY), ASLEEP) == [WOKE, READY, HIBERNATED]


def test_failure_is_reported_once_until_the_model_wakes() -> None:
    phases = (
        InstanceState.PHASE_CRASH_LOOP,
        InstanceState.PHASE_FAILED,
        InstanceState.PHASE_READY,
        InstanceState.PHASE_READY,
    )
    failed = (event_pb2.EVENT_REASON_FAILED, "its engine is in a crash loop")
    assert _events(ASLEEP, LOADING, *map(_report, phases)) == [failed, WOKE, READY]


def test_failed_load_is_not_a_wake() -> None:
    """It was told as a model that woke up and went to sleep."""
    assert _events(ASLEEP, LOADING, ASLEEP, LOADING, _report(InstanceState.PHASE_STOPPING), ASLEEP) == []
    assert _events(ASLEEP, LOADING, ASLEEP, LOADING, _report(InstanceState.PHASE_READY)) == [WOKE, READY]


def test_model_that_never_hibernated_is_ready_without_a_wake() -> None:
    assert _events(_report(InstanceState.PHASE_IDLE), LOADING, _report(InstanceState.PHASE_READY)) == [READY]


def test_model_that_never_ran_has_no_failure() -> None:
    fault = _fault(Reason.TEMPLATE_FAILED, "bad template")
    events = _events(_report(InstanceState.PHASE_LOADING), _report(InstanceState.PHASE_FAILED, 1, fault))
    assert [reason for reason, _ in events] == [event_pb2.EVENT_REASON_FAILED]


def test_faults_from_before_a_registry_restart_are_not_reported() -> None:
    assert _events(Capability(), _report(InstanceState.PHASE_READY, 3, KILLED), reported_before=False) == []
