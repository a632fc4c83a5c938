"""ComfyUI workflows over a model or a pool."""

from weft.api.registry.v1.workflow_pb2 import RegisteredWorkflow, WorkflowManifest
from weft.dispatch.workflow_graph import to_canonical_workflow
from weft.documents.kind import DeclaredKind, PointsTo, ReferenceField, check_named
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.values.names import WORKFLOW_PREFIX


def check_workflow(manifest: WorkflowManifest, field: str) -> None:
    """Checks a workflow; see `DeclaredKind.check`. The error's field may be nested, such as "inputs[2].node"."""
    check_named(manifest, field)
    to_canonical_workflow(manifest.workflow, f"{field}.workflow")


KIND = DeclaredKind(
    kind=ResourceKind.WORKFLOW,
    declared=WorkflowManifest,
    record=RegisteredWorkflow,
    summary="A ComfyUI workflow for a model or a pool.",
    check=check_workflow,
    references=(ReferenceField(name="model", to=PointsTo.MODEL_OR_POOL, key="model", words="model"),),
    prefix=WORKFLOW_PREFIX,
)
