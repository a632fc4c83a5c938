"""Workflows in the registry: declared, checked, stored, shown, and in the way of what they need."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import a_route, an_alias, declare
from roster_harness import BareRegistry

from registry_svc.config import RegistryConfig
from registry_svc.mesh.requests import valid_batch
from registry_svc.mesh.store import SqlStore
from weft.api.common.v1 import workflow_pb2 as workflows
from weft.api.registry.v1.declaration_service_pb2 import ApplyRequest, ApplyResult
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.workflow_pb2 import RegisteredWorkflow, WorkflowManifest
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft_testing.fake_clock import FakeClock

GRAPH = {
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a hill", "clip": ["4", 1]}},
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny.safetensors"}},
}


def a_workflow(name: str = "turbo", model: str = "m1", *, node: str = "6", text: str = "") -> ResourceDocument:
    prompt = workflows.WorkflowInput(
        name="prompt",
        type=workflows.WORKFLOW_INPUT_TYPE_TEXT,
        node=node,
        input="text",
        source=workflows.WORKFLOW_SOURCE_PROMPT,
    )
    workflow = workflows.Workflow(graph=text or json.dumps(GRAPH), inputs=[prompt], outputs=["6"])
    return declared(workflow=WorkflowManifest(name=name, model=model, workflow=workflow))


@asynccontextmanager
async def registry_of(tmp_path: Path, **more: int) -> AsyncIterator[BareRegistry]:
    config = RegistryConfig(database_url=f"sqlite:///{tmp_path / 'registry.db'}", **more)  # type: ignore[arg-type]
    registry = BareRegistry(SqlStore(config.database_url), FakeClock(), config)
    await registry.start()
    try:
        yield registry
    finally:
        await registry.stop()


async def apply(registry: BareRegistry, *declarations: ResourceDocument) -> list[str]:
    request = valid_batch(ApplyRequest(declarations=declarations), registry.core.config)
    results = await registry.declarations.apply(request)
    return [ApplyResult.Outcome.Name(each.outcome).removeprefix("OUTCOME_").lower() for each in results]


async def test_workflow_is_created_unchanged_configured_and_survives_a_restart(tmp_path: Path) -> None:
    async with registry_of(tmp_path) as registry:
        assert await apply(registry, declare("m1"), a_workflow()) == ["created", "created"]
        # Equal but for spaces in its graph.
        assert await apply(registry, a_workflow(text=json.dumps(GRAPH, indent=2))) == ["unchanged"]
        other = json.dumps(GRAPH | {"7": {"class_type": "X", "inputs": {}}})
        assert await apply(registry, a_workflow(text=other)) == ["configured"]
    async with registry_of(tmp_path) as registry:
        found = registry.catalogue.get(ResourceKind.WORKFLOW, "turbo")
        assert set(json.loads(found.manifest.workflow.graph)) == {"4", "6", "7"}
        assert found.status == RegisteredWorkflow.STATUS_INACTIVE


async def test_workflow_without_its_node_is_rejected_and_error_names_the_field(tmp_path: Path) -> None:
    async with registry_of(tmp_path) as registry:
        with refused(field="declarations[1].workflow.workflow.inputs[0].node"):
            await apply(registry, declare("m1"), a_workflow(node="66"))


async def test_workflows_share_the_namespace_of_models_and_routes(tmp_path: Path) -> None:
    async with registry_of(tmp_path) as registry:
        await apply(registry, declare("m1"), a_workflow("turbo"), a_route("ladder"))
        for taken in (a_workflow("m1"), a_workflow("ladder"), a_route("turbo"), declare("turbo")):
            with refused(Reason.ALREADY_EXISTS):
                await apply(registry, taken)


async def test_model_used_by_a_workflow_and_workflow_used_by_an_alias_cannot_be_deleted(
    tmp_path: Path,
) -> None:
    async with registry_of(tmp_path) as registry:
        await apply(registry, declare("m1"), a_workflow(), an_alias("pictures", "workflow/turbo"))
        for kind, name, user in (
            (ResourceKind.MODEL, "m1", "workflows: turbo"),
            (ResourceKind.WORKFLOW, "turbo", "aliases: pictures"),
        ):
            with pytest.raises(WeftError, match=user) as caught:
                await registry.declarations.delete(kind, name)
            assert caught.value.reason is Reason.RESOURCE_IN_USE
        await registry.declarations.delete(ResourceKind.ALIAS, "pictures")
        await registry.declarations.delete(ResourceKind.WORKFLOW, "turbo")
        await registry.declarations.delete(ResourceKind.MODEL, "m1")
        assert not list(registry.core.mesh.names_of(ResourceKind.WORKFLOW))
