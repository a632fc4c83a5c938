"""The schemas that are made from the protos demand what the hand-written ones before them did."""

import json
from pathlib import Path
from typing import Any

from schema_structure import differences, structure

from gateway.endpoints import GATEWAY_ROUTERS
from gateway.openapi import add_schemas
from gateway.routing import published_schemas
from weft.documents.schemas import schemas

BEFORE = json.loads((Path(__file__).parent / "schemas_before.json").read_text("utf-8"))
CHANGED = {
    # Added: what changed in a prompt since the earlier ones of its session.
    "ReceiptDocument.properties.promptChange",
    # Two forms of the same: a list of types, and one schema for each.
    "LoadParameterDocument.properties.default.anyOf",
    "LoadSettings.properties.keepAlive.anyOf",
    # The kinds and "mesh" are one list of words.
    "EventDocument.properties.resourceKind.$ref",
    "EventDocument.properties.resourceKind.anyOf",
    "EventDocument.properties.resourceKind.enum",
    "EventDocument.properties.resourceKind.type",
    # A device is only shown: its schema states none of the rules of those who report it.
    "DeviceDocument.properties.index.maximum",
    "DeviceDocument.properties.index.minimum",
    # What a registry of a later version may say.
    "LeaseDocument.properties.priority.enum",
    # The hosts of a model over several hosts are new.
    "RunnerStatus.properties.workerHosts",
    # What a model takes, and what its engine says of its load, is new.
    "InstanceStatus.properties.engineLoad",
    "InstanceStatus.properties.abilities",
    # Whether its engine reports what it has cached is new.
    "InstanceStatus.properties.reportsPrefixes",
    # That a model cannot be served by its runner is new.
    "ModelStatus.properties.state.enum",
    "MemberStatus.properties.state.enum",
    # What a failed attempt says of its cause, and the decision `failed`, are new.
    "AttemptDocument.properties.message",
    "AttemptDocument.properties.engineExit",
    "AttemptDocument.properties.engineLog",
    "DecisionDocument.properties.kind.enum",
    # The work on images and recordings is new.
    "ReceiptDocument.properties.imageSteps",
    "ReceiptDocument.properties.imagePixels",
    "ReceiptDocument.properties.audioMilliseconds",
    # The process of an engine is new.
    "ReplicaDocument.properties.processId",
    "ReplicaDocument.properties.restartCount",
    # Adapters of models are new.
    "InstanceStatus.properties.baseModel",
    "CandidateDocument.properties.engineLoad",
    # Models that a runner serves by their source are new.
    "RequestList.properties.unreachableRouters",
    # What routers remember over a restart, and requests that no router answered, are new.
    "RequestList.properties.historyMissing",
    "RequestList.properties.unwrittenCount",
    "ReceiptDocument.properties.lackedRouter",
    "InstanceStatus.properties.addedSource",
    "InstanceStatus.properties.runtime",
    "OperationActionDocument.properties.form",
    "OperationActionDocument.properties.source",
    "OperationActionDocument.properties.type.enum",
    "OperationResultDocument.properties.added",
    "OperationResultDocument.properties.pulled",
    "RunnerStatus.properties.addsModels",
    # Servers that are attached while a runner runs are new.
    "RunnerStatus.properties.attachesServers",
    "RunnerStatus.properties.attachedServers",
    "RunnerStatus.properties.followedServers",
    # What a model's files say of themselves, and the bytes of a pull, are new.
    "InstanceStatus.properties.modelFile",
    "OperationDocument.properties.doneBytes",
    "OperationDocument.properties.totalBytes",
    "OperationDocument.properties.digest",
    # Who waits for memory is new.
    "HostMemoryDocument.properties.waits",
    # The API of the provider that serves a model is new.
    "ModelDocument.properties.provider",
    # Tier, labels and owner, and what serves a model, are new.
    *(
        f"{kind}.properties.{name}"
        for kind in ("ModelDocument", "AgentDocument")
        for name in ("tier", "labels", "owner")
    ),
    "ModelDocument.properties.upstream",
    "ModelStatus.properties.type",
    # Whether requests are journaled by setting, and as which task, is new.
    "ModelDocument.properties.journal",
    "ReceiptDocument.properties.taskId",
    # Aliases, and the name that was asked for, are new.
    "ReceiptDocument.properties.askedModel",
    "RequestDocument.properties.askedModel",
    "ApplyResult.properties.after.anyOf",
    "ApplyResult.properties.before.anyOf",
    "ApplyResult.properties.kind.enum",
    # A switch to a profile deletes what the one before declared.
    "ApplyResult.properties.outcome.enum",
    *(f"{kind}Status.properties.id" for kind in ("Model", "Agent", "Route")),
    # The times of a request as a whole, and at its engine, are new.
    "ReceiptDocument.properties.engineTimings",
    "ReceiptDocument.properties.totalSeconds",
    # What devices draw, and the share of requests in their work, are new.
    "DeviceDocument.properties.energyMillijoules",
    "DeviceDocument.properties.powerMilliwatts",
    "ReceiptDocument.properties.deviceUsage",
    *(f"ClientDocument.properties.{name}" for name in ("deviceSeconds", "measuredCount", "energyMillijoules")),
    *(f"EngineLoadDocument.properties.{name}" for name in ("kvCacheBytes", "weightBytes")),
    # What an engine holds and generates, and how long it is kept, are shown.
    "MemoryStatus.properties.residentBytes",
    *(f"InstanceStatus.properties.{name}" for name in ("keepAliveSeconds", "tokensPerSecond")),
    # Who cancelled a request by its id is new.
    "ReceiptDocument.properties.cancelledBy",
    "RequestDocument.properties.cancelledBy",
    # Whether somebody answers for a lease is shown.
    "LeaseDocument.properties.unowned",
    # No runner hibernates.
    "RunnerStatus.properties.state.enum",
    # The names of models and pools may have an owner before them.
    "AgentDocument.properties.model.anyOf",
    "AgentDocument.properties.pool.anyOf",
    "LoadBody.properties.evictModel.anyOf",
    "ModelDocument.properties.name.pattern",
    "ModelDocument.properties.poolName.anyOf",
    "PoolDocument.properties.members.items.pattern",
    "PoolDocument.properties.name.pattern",
    "RouteDocument.properties.candidates.items.pattern",
    # The bound was that of a text, and held for nothing.
    "SamplingDocument.properties.logit_bias.maxLength",
    "SamplingDocument.properties.logit_bias.maxProperties",
}
"""The paths at which a schema differs from the one before, by name of the schema."""


def _openapi() -> dict[str, Any]:
    document: dict[str, Any] = {"paths": {}}
    add_schemas(document, published_schemas(GATEWAY_ROUTERS))
    found: dict[str, Any] = document["components"]["schemas"]
    return found


def test_http_api_schemas_have_unchanged_requirements() -> None:
    found = _openapi()
    after = {name: structure(found.get(name)) for name in BEFORE["openapi"] if name != "ResourceKind"}
    before = {name: own for name, own in BEFORE["openapi"].items() if name != "ResourceKind"}
    assert {path for path in differences(before, after) if path not in CHANGED} == set()


def test_published_schemas_have_unchanged_requirements() -> None:
    for name, before in BEFORE["files"].items():
        found = schemas()[f"{name}.json"]
        after = {part: structure(found if not part else found["$defs"].get(part)) for part in before}
        kind = f"{name.removesuffix('-list').capitalize()}{'List' if name.endswith('-list') else 'Document'}"
        changed = {path.removeprefix(f"{kind}.") for path in CHANGED}
        wrong = {path.removeprefix(".") for path in differences(before, after) if not path.startswith("ResourceKind")}
        assert wrong - changed - CHANGED == set(), name


def test_comparison_detects_a_widened_range() -> None:
    """The control."""
    wider = json.loads(json.dumps(BEFORE["openapi"]))
    wider["SamplingDocument"]["properties"]["temperature"]["anyOf"] = [{"type": "number"}]
    assert list(differences(BEFORE["openapi"], wider)) == ["SamplingDocument.properties.temperature.anyOf"]
