"""What each rpc asks of its caller. One that is missing here is refused to everybody who is not local."""

from weft.kernel.principal import MESH_ACCESS, Access, Resource, Role

_OPEN = frozenset({"grpc.health.v1.Health"})
"""Services that answer strangers."""
_REFLECTION = frozenset({"grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection"})

_INFERENCE = Access(Resource.INFERENCE, Role.CREATE)
_REGISTRY, _ROUTER, _RUNNER = "weft.api.registry.v1", "weft.api.router.v1", "weft.api.runner.v1"


def _reads(resource: Resource, *methods: str) -> dict[str, Access]:
    return dict.fromkeys(methods, Access(resource, Role.VIEW))


def _creates(resource: Resource, *methods: str) -> dict[str, Access]:
    return dict.fromkeys(methods, Access(resource, Role.CREATE))


def _edits(resource: Resource, *methods: str) -> dict[str, Access]:
    return dict.fromkeys(methods, Access(resource, Role.EDIT))


def _mesh(*methods: str) -> dict[str, Access]:
    return dict.fromkeys(methods, MESH_ACCESS)


_SERVICES: dict[str, dict[str, Access]] = {
    f"{_ROUTER}.InferenceService": dict.fromkeys(
        ("Chat", "Complete", "Embed", "Rerank", "Tokenize", "GenerateImages", "Transcribe", "Speak"), _INFERENCE
    ),
    f"{_ROUTER}.PlacementService": _mesh("Place") | _reads(Resource.TELEMETRY, "ListQueues"),
    f"{_ROUTER}.RequestService": _reads(Resource.INFERENCE, "GetRequest", "ListRequests")
    | _reads(Resource.TELEMETRY, "ListClients"),
    f"{_ROUTER}.StoredResponseService": _mesh("SaveResponse", "GetResponse", "ListChain", "DeleteResponse"),
    f"{_ROUTER}.TaskService": _reads(Resource.INFERENCE, "GetTask", "ListTasks", "WatchTask")
    | _creates(Resource.INFERENCE, "SubmitTask")
    | _edits(Resource.INFERENCE, "CancelTask", "DeleteTask"),
    f"{_ROUTER}.FileService": _reads(Resource.INFERENCE, "GetFile", "ListFiles", "ReadFile")
    | _creates(Resource.INFERENCE, "UploadFile")
    | _edits(Resource.INFERENCE, "DeleteFile"),
    f"{_ROUTER}.BatchService": _reads(Resource.INFERENCE, "GetBatch", "ListBatches", "ReadBatchResults")
    | _creates(Resource.INFERENCE, "CreateBatch")
    | _edits(Resource.INFERENCE, "CancelBatch")
    | _mesh("FinishBatch"),
    f"{_ROUTER}.RelayService": _mesh("Attach"),
    f"{_RUNNER}.GenerationService": _mesh("Generate"),
    f"{_RUNNER}.EmbeddingService": _mesh("Embed"),
    f"{_RUNNER}.ModelCallService": _mesh("Rerank", "Tokenize", "GenerateImages", "Transcribe", "Speak"),
    f"{_RUNNER}.RunnerService": _reads(Resource.RUNNERS, "Describe", "GetRequest", "TailLogs")
    | _mesh("Wake", "Load", "Unload", "YieldMemory", "FlushCache"),
    f"{_REGISTRY}.RegistryService": _reads(
        Resource.MODELS,
        *("ListModels", "GetModel", "GetModelMembers", "ListPools", "GetPool", "ListAgents", "GetAgent"),
        *("ListRoutes", "GetRoute", "Watch"),
    )
    | _reads(Resource.RUNNERS, "ListRunners", "GetRunner")
    | _reads(Resource.TELEMETRY, "ListEvents", "WatchEvents"),
    f"{_REGISTRY}.DeclarationService": _edits(Resource.MODELS, "Apply", "Delete"),
    f"{_REGISTRY}.SettingsService": _reads(Resource.SETTINGS, "GetSettings")
    | _edits(Resource.SETTINGS, "UpdateSettings"),
    f"{_REGISTRY}.RunnerSessionService": _mesh("OpenSession", "Heartbeat", "CloseSession", "RetireSession"),
    f"{_REGISTRY}.LeaseService": _reads(Resource.RUNNERS, "ListHostMemory")
    | _creates(Resource.RUNNERS, "AcquireLease", "RenewLeases", "ReleaseLease")
    | _mesh("ReleaseEarlierLives"),
    f"{_REGISTRY}.JoinTokenService": _reads(Resource.RUNNERS, "ListJoinTokens")
    | _creates(Resource.RUNNERS, "CreateJoinToken")
    | _edits(Resource.RUNNERS, "RevokeJoinToken")
    | _mesh("CheckJoinToken"),
    f"{_REGISTRY}.KeyService": _reads(Resource.KEYS, "ListKeys")
    | _creates(Resource.KEYS, "CreateKey")
    | _edits(Resource.KEYS, "RevokeKey", "RotateKey")
    | _mesh("WatchKeys"),
    "weft.api.operations.v1.OperationService": _reads(
        Resource.OPERATIONS, "GetOperation", "ListOperations", "WatchOperation", "GetGovernance", "ListAuditEntries"
    )
    | _creates(Resource.OPERATIONS, "CreateOperation")
    | _edits(Resource.OPERATIONS, "CancelOperation"),
    **dict.fromkeys(_REFLECTION, _reads(Resource.TELEMETRY, "ServerReflectionInfo")),
}


def access_of(method: str) -> Access | None:
    """What a method such as `/package.Service/Method` asks for; None: nothing, strangers may call it."""
    service, _, name = method.removeprefix("/").partition("/")
    if service in _OPEN:
        return None
    return _SERVICES.get(service, {}).get(name, MESH_ACCESS)
