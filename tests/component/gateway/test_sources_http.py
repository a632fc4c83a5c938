"""Models by their source over HTTP: what is asked of the registry, and who may name what."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from admin_script import ScriptedOperations as AdminOperations
from admin_script import admin_ports
from gateway_script import RunningGateway, serving
from kit.keys import KEY, Keys, bearer
from runner_api_stage import Operation, RunnerApiStage, facts, runner_api

from weft.api.runner.v1.model_store_pb2 import STORED_FORM_FOLDER

SOURCE = "hf:acme/tiny-GGUF:Q4_0"
PATH, URL = "/models/tiny.gguf", "https://host.example/tiny.gguf"


@asynccontextmanager
async def adding(*scopes: str) -> AsyncIterator[RunnerApiStage]:
    """The API of a runner that serves models by their source, for one key with these scopes."""
    async with runner_api(keys=Keys(scopes)) as stage:
        stage.runner.told = replace(facts(), adds_models=True)
        yield stage


async def load(stage: RunnerApiStage, body: Mapping[str, object]) -> tuple[int, str]:
    answer = await stage.post("/v1/models/load", body, **bearer())
    return answer.status, "" if answer.status == 202 else str(answer.error["param"])


async def test_hub_id_becomes_a_load_by_source_on_this_runner() -> None:
    async with adding("operations:*") as stage:
        body = {"modelId": "acme/tiny-GGUF", "quantization": "Q4_0", "maxContextLength": 4096, "evictModel": "small"}
        assert await load(stage, body) == (202, "")
    asked = stage.operations.asked[0].action.load_model
    assert (asked.model, asked.source, asked.runner, asked.evict_model) == ("", SOURCE, "gpu-0", "small")
    assert (asked.options.parameters["context_tokens"].integer, asked.options.quantization) == (4096, "")


async def test_source_load_task_has_the_model_name_and_reasons() -> None:
    async with adding("operations:*") as stage:
        await load(stage, {"modelId": "acme/tiny-GGUF"})
        (operation,) = stage.operations.known.values()
        task = operation.name.removeprefix("operations/")
        operation.state = Operation.STATE_SUCCEEDED
        operation.result.added.name = "tiny"
        operation.result.added.reasons.append("because")
        found = (await stage.ask("GET", f"/v1/models/load/{task}", headers=bearer())).json
    assert (found["status"], found["modelId"], found["reasons"]) == ("completed", "tiny", ["because"])


async def test_invalid_source_is_rejected_and_error_names_the_field() -> None:
    async with adding("operations:*", "models:edit") as stage:
        for body, param in (
            ({"modelId": f"{SOURCE}", "quantization": "Q8_0"}, "quantization"),
            ({"modelId": "acme/tiny", "quantization": "../x"}, "quantization"),
            ({"modelId": "s3://bucket/x"}, "modelId"),
            ({"modelId": "https://host.example/x.zip"}, "modelId"),
            ({"modelId": "acme/tiny", "evictModel": "nothing"}, "evictModel"),
        ):
            assert await load(stage, body) == (400, param)
    assert stage.operations.asked == []


async def test_name_that_is_no_source_returns_404() -> None:
    async with adding("operations:*") as stage:
        assert (await load(stage, {"modelId": "nothing"}))[0] == 404


async def test_runner_without_dynamic_models_accepts_only_its_own_models() -> None:
    async with runner_api() as stage:
        assert (await stage.post("/v1/models/load", {"modelId": "acme/tiny"})).status == 404
    assert stage.operations.asked == []


@pytest.mark.parametrize("source", [PATH, URL])
async def test_path_or_url_needs_the_model_edit_scope(source: str) -> None:
    async with adding("operations:*") as stage:
        assert (await load(stage, {"modelId": source}))[0] == 403
        assert stage.operations.asked == []
    async with adding("operations:*", "models:edit") as stage:
        assert (await load(stage, {"modelId": source}))[0] == 202


@asynccontextmanager
async def admin(*scopes: str) -> AsyncIterator[tuple[RunningGateway, AdminOperations]]:
    operations = AdminOperations()
    async with serving(keys=Keys(scopes), admin=admin_ports(operations)) as gateway:
        yield gateway, operations


async def post(gateway: RunningGateway, path: str, body: dict[str, object], status: int) -> Any:
    return (await gateway.request("POST", f"/v1/admin/{path}", body, key=KEY)).of(status)


async def test_source_load_pull_and_remove_create_operations() -> None:
    async with admin("operations:*") as (gateway, operations):
        wanted = {"source": SOURCE, "name": "mine", "runner": "gpu-0", "contextTokens": 512, "evictModel": "old"}
        answer = await post(gateway, "models", wanted, 202)
        await post(gateway, "pulls", {"source": SOURCE, "runner": "gpu-0", "form": "folder"}, 202)
        await post(gateway, "models/mine/remove", {}, 202)
    assert (answer["action"]["type"], answer["action"]["source"]) == ("load", SOURCE)
    load_model, pull_model, remove_model = (
        operations.created[0].action.load_model,
        operations.created[1].action.pull_model,
        operations.created[2].action.remove_model,
    )
    assert (load_model.model, load_model.source, load_model.runner) == ("mine", SOURCE, "gpu-0")
    assert (load_model.evict_model, load_model.options.parameters["context_tokens"].integer) == ("old", 512)
    assert (pull_model.source, pull_model.runner, pull_model.form) == (SOURCE, "gpu-0", STORED_FORM_FOLDER)
    assert remove_model.model == "mine"


@pytest.mark.parametrize("path", ["models", "pulls"])
@pytest.mark.parametrize("source", [PATH, URL])
async def test_operator_needs_the_model_edit_scope_for_a_path_or_url(path: str, source: str) -> None:
    async with admin("operations:*") as (gateway, operations):
        await post(gateway, path, {"source": source}, 403)
        assert operations.created == []
    async with admin("operations:*", "models:edit") as (gateway, operations):
        await post(gateway, path, {"source": source}, 202)


async def test_operations_view_scope_cannot_load() -> None:
    async with admin("operations:view", "models:edit") as (gateway, operations):
        for path, body in (("models", {"source": SOURCE}), ("pulls", {"source": SOURCE}), ("models/x/remove", {})):
            await post(gateway, path, dict(body), 403)
    assert operations.created == []


async def test_operator_detaches_a_server_by_an_operation() -> None:
    async with admin("operations:*") as (gateway, operations):
        answer = await post(gateway, "servers/box/detach", {}, 202)
        await post(gateway, "servers/box/detach", {"model": "x"}, 400)
        # A path does not reach beyond the name.
        await post(gateway, "servers/..%2Fmodels/detach", {}, 404)
    assert (answer["action"]["type"], answer["action"]["model"]) == ("remove", "box")
    (created,) = operations.created
    assert created.action.remove_model.model == "box"
    assert created.requested_by == f"key:{KEY}"


@pytest.mark.parametrize("scopes", [("operations:view", "models:edit"), ("inference:*",)])
async def test_no_other_scope_detaches_a_server(scopes: tuple[str, ...]) -> None:
    async with admin(*scopes) as (gateway, operations):
        await post(gateway, "servers/box/detach", {}, 403)
    async with serving(keys=Keys(["operations:*"]), admin=admin_ports(operations)) as gateway:
        assert (await gateway.request("POST", "/v1/admin/servers/box/detach", {})).status == 401
    assert operations.created == []
