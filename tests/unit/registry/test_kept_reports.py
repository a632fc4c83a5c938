"""What is kept of a report whose words are too many."""

from registry_svc.mesh.records import detail_bytes, kept
from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1.runner_pb2 import Capability, InstanceFault, InstanceState

DIED = error_reason_pb2.ERROR_REASON_SERVER_DIED
FAULT = InstanceFault(reason=DIED, detail="signal SIGKILL")
INSTANCE = InstanceState(
    model="m", phase=InstanceState.PHASE_READY, slots_total=1, detail="fine", fault_count=2, last_fault=FAULT
)
REPORT = Capability(instances=[INSTANCE])


def test_the_words_of_a_fault_count_as_those_of_a_phase_do() -> None:
    assert detail_bytes(REPORT) == len("fine") + len("signal SIGKILL")


def test_a_report_without_room_for_its_words_keeps_how_often_and_why_in_short() -> None:
    assert kept(REPORT, {"m"}, detail_bytes(REPORT)) == REPORT
    (instance,) = kept(REPORT, {"m"}, detail_bytes(REPORT) - 1).instances
    assert (instance.detail, instance.fault_count) == ("", 2)
    assert instance.last_fault == InstanceFault(reason=DIED)
