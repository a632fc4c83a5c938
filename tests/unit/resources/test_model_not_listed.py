"""The condition of a model whose server lists other models only."""

from datetime import UTC, datetime

from weft.documents.statuses import InstanceStatus, ModelStatus, model_conditions

WORDS = "the server has no model llama; it has llama3.2:3b (set upstream_model)"


def ready_of(detail: str) -> tuple[str, str, str | None]:
    instance = InstanceStatus(model="llama", phase="failed", slots_total=4, slots_used=0, detail=detail)
    now = datetime.now(UTC)
    status = ModelStatus.model_construct(
        kind="virtual",
        pool="llama",
        state="active",
        runner="box",
        instance=instance,
        created_at=now,
        inactive_since=None,
    )
    ready = next(each for each in model_conditions(status) if each.type == "Ready")
    return ready.status, ready.reason, ready.message


def test_a_model_that_its_server_does_not_list_is_not_ready_for_that_reason_and_no_other() -> None:
    assert ready_of(WORDS) == ("False", "ModelNotListed", WORDS)
    assert ready_of("no such device")[:2] == ("False", "Failed")
