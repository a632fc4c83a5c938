"""What is kept of a report whose words are too many."""

from registry_svc.mesh.records import Held, detail_bytes, kept
from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1.runner_pb2 import Capability, InstanceFault, InstanceState, Runner

DIED = error_reason_pb2.ERROR_REASON_SERVER_DIED
FAULT = InstanceFault(reason=DIED, detail="signal SIGKILL")
INSTANCE = InstanceState(
    model="m", phase=InstanceState.PHASE_READY, slots_total=1, detail="fine", fault_count=2, last_fault=FAULT
)
REPORT = Capability(instances=[INSTANCE])


def test_fault_text_counts_towards_report_size_like_phase_text() -> None:
    assert detail_bytes(REPORT) == len("fine") + len("signal SIGKILL")


def test_oversized_report_keeps_fault_counts_and_short_reasons() -> None:
    assert kept(REPORT, {"m"}, detail_bytes(REPORT)) == REPORT
    (instance,) = kept(REPORT, {"m"}, detail_bytes(REPORT) - 1).instances
    assert (instance.detail, instance.fault_count) == ("", 2)
    assert instance.last_fault == InstanceFault(reason=DIED)


def test_report_drops_models_its_runner_does_not_publish() -> None:
    both = Capability(instances=[INSTANCE, InstanceState(model="other", phase=InstanceState.PHASE_READY)])
    assert kept(both, {"m"}, detail_bytes(both)) == REPORT
    assert [instance.model for instance in both.instances] == ["m", "other"], "what arrived stays as it is"


def test_held_message_is_isolated_from_later_changes() -> None:
    report = Capability(instances=[INSTANCE])
    held = Held(report)
    report.draining = True
    held.message().instances[0].detail = "changed"
    assert held.message() == REPORT
    assert (held == Held(REPORT), held == Held(report), held == REPORT) == (True, False, False)


def test_empty_held_message_is_still_set_when_added() -> None:
    runner = Runner()
    Held(Capability()).add_to(runner.capability)
    assert runner.HasField("capability")
    Held(REPORT).add_to(runner.capability)
    assert runner.capability == REPORT
