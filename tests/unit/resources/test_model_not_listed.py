"""The condition of a model whose server lists other models only."""

from weft.api.registry.v1.model_pb2 import Model, ModelManifest
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.documents.conditions import model_conditions

WORDS = "the server has no model llama; it has llama3.2:3b (set upstream_model)"


def ready_of(detail: str) -> tuple[str, str, str | None]:
    instance = InstanceState(model="llama", phase=InstanceState.PHASE_FAILED, slots_total=4, detail=detail)
    model = Model(
        manifest=ModelManifest(name="llama"), kind=Model.KIND_VIRTUAL, status=Model.STATUS_FAILED, runner="box"
    )
    ready = next(each for each in model_conditions(model, instance) if each.type == "Ready")
    return ready.status, ready.reason, ready.message


def test_model_not_listed_by_its_server_is_not_ready_with_that_reason() -> None:
    assert ready_of(WORDS) == ("False", "ModelNotListed", WORDS)
    assert ready_of("no such device")[:2] == ("False", "Failed")
