"""Resolution of workflows: a request for `workflow/<name>` becomes a request for its model, with the workflow. Pure."""

from dataclasses import dataclass, replace

from weft.api.common.v1 import image_pb2, workflow_pb2
from weft.api.registry.v1 import workflow_pb2 as registered_pb2
from weft.dispatch.fleet import FleetView
from weft.dispatch.request_trace import RequestContext
from weft.dispatch.workflow_graph import input_values
from weft.kernel.errors import WeftError
from weft.kernel.names import WORKFLOW_PREFIX
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation
from weft.kernel.unknown_names import unknown_target


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRequest:
    """A request for a workflow, translated to a request for its model."""

    context: RequestContext
    workflow: workflow_pb2.Workflow
    """The graph that the runner fills. Read-only."""


def workflow_name_of(model: str) -> str | None:
    """Returns the name of the requested workflow; None: `model` names no workflow."""
    return model.removeprefix(WORKFLOW_PREFIX) if model.startswith(WORKFLOW_PREFIX) else None


def require_images(context: RequestContext) -> None:
    """Raises UNSUPPORTED_OPERATION if the target is a workflow and the operation is not images."""
    name = workflow_name_of(context.model)
    if name is not None and context.operation is not Operation.IMAGE:
        raise WeftError(
            Reason.UNSUPPORTED_OPERATION,
            "a workflow answers requests for images only",
            metadata={"workflow": name, "field": "model"},
        )


def resolve_workflow(
    view: FleetView, context: RequestContext, payload: image_pb2.ImagePayload
) -> WorkflowRequest | None:
    """Returns the request to a workflow's model; None: `context` names no workflow.

    Raises MODEL_NOT_FOUND for an unknown workflow or one without its model, SERVICE_UNAVAILABLE before the first
    snapshot of the mesh, INVALID_ARGUMENT for a payload that does not fit its inputs.
    """
    name = workflow_name_of(context.model)
    if name is None:
        return None
    found = view.workflows.get(name)
    if found is None and view.revision == 0:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "no workflow is known yet; try again in a moment")
    if found is None:
        raise unknown_target(context.model)
    input_values(found.manifest.workflow, payload, name=name)
    target = _require_model(view, found)
    return WorkflowRequest(context=replace(context, model=target), workflow=found.manifest.workflow)


def _require_model(view: FleetView, workflow: registered_pb2.RegisteredWorkflow) -> str:
    manifest = workflow.manifest
    if not view.pool_members(manifest.model):
        raise WeftError(
            Reason.MODEL_NOT_FOUND,
            f"workflow {manifest.name} is run by {manifest.model}, which is not known to the mesh",
            metadata={"workflow": manifest.name, "model": manifest.model, "field": "model"},
        )
    return manifest.model
