"""Requests for workflows: which model they become a request for, and which are refused before they wait."""

from dataclasses import replace

import pytest

from weft.api.common.v1 import chat_pb2, image_pb2
from weft.api.registry.v1.workflow_pb2 import RegisteredWorkflow, WorkflowManifest
from weft.dispatch.agents import models_behind, name_asked_for, require_model_name, resolve
from weft.dispatch.fleet import FleetView, expected_model
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

GRAPH = '{"6":{"class_type":"A","inputs":{"steps":4}}}'


def view(**given: object) -> FleetView:
    manifest = WorkflowManifest(name="turbo", model="pictures")
    manifest.workflow.graph = GRAPH
    manifest.workflow.outputs.append("6")
    manifest.workflow.inputs.add(name="steps", type=2, node="6", input="steps", source=6, maximum=8)
    models = {"comfy": expected_model("comfy", "pictures", "box")}
    found = FleetView(revision=1, models=models, workflows={"turbo": RegisteredWorkflow(manifest=manifest)})
    return replace(found, **given)  # type: ignore[arg-type]


def context(model: str = "workflow/turbo", operation: Operation = Operation.IMAGE) -> RequestContext:
    return RequestContext(request_id="req-1", traceparent="", tenant="t", model=model, operation=operation)


def test_workflow_request_becomes_a_model_request_with_the_graph() -> None:
    found = resolve(view(), context(), image_pb2.ImagePayload(steps=8))
    assert found is not None
    assert found.workflow is not None
    assert (found.context.model, found.workflow.graph) == ("pictures", GRAPH)


def test_model_request_is_unchanged() -> None:
    assert resolve(view(), context("comfy"), image_pb2.ImagePayload()) is None


def test_out_of_range_value_is_refused_before_the_request_is_queued() -> None:
    with pytest.raises(FieldError, match="from"):
        resolve(view(), context(), image_pb2.ImagePayload(steps=9))


def test_unknown_workflow_or_one_without_its_model_is_not_found() -> None:
    for seen, words in ((view(workflows={}), "there is no workflow turbo"), (view(models={}), "run by pictures")):
        with pytest.raises(WeftError, match=words) as caught:
            resolve(seen, context(), image_pb2.ImagePayload())
        assert caught.value.reason is Reason.MODEL_NOT_FOUND


def test_no_workflow_is_known_before_the_first_snapshot() -> None:
    with pytest.raises(WeftError) as caught:
        resolve(FleetView(), context(), image_pb2.ImagePayload())
    assert caught.value.reason is Reason.SERVICE_UNAVAILABLE


def test_workflow_accepts_image_requests_only() -> None:
    with pytest.raises(WeftError) as caught:
        resolve(view(), context(operation=Operation.CHAT), chat_pb2.ChatPayload())
    assert caught.value.reason is Reason.UNSUPPORTED_OPERATION


def test_workflows_are_requestable_names_and_permissions_use_their_bare_names() -> None:
    assert "workflow/turbo" in view().targets
    assert name_asked_for("workflow/turbo") == "turbo"
    assert require_model_name("workflow/turbo", "model") == "workflow/turbo"
    assert [each.name for each in models_behind(view(), "workflow/turbo")] == ["comfy"]
