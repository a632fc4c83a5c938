"""Every rpc of a runner, and whether the mesh may call it over the link of a machine that joined."""

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import weft.api.runner.v1
from runner_svc.policy.joined_calls import JOINED_CALLS, require_callable
from weft.api.operations.v1 import process_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

ALWAYS = [
    "EmbeddingService/Embed",
    "GenerationService/Generate",
    "ModelCallService/Rerank",
    "ModelCallService/Speak",
    "ModelCallService/StreamImages",
    "ModelCallService/StreamTranscription",
    "ModelCallService/Tokenize",
    "ProcessService/GetHealth",
    "RunnerService/Describe",
    "RunnerService/FindStoredModel",
    "RunnerService/FlushCache",
    "RunnerService/GetRequest",
    "RunnerService/Load",
    "RunnerService/ReadModelFile",
    "RunnerService/TailLogs",
    "RunnerService/Unload",
    "RunnerService/Wake",
    "RunnerService/WatchPrefixes",
    "RunnerService/YieldMemory",
]
ACCEPTING = ["RunnerService/AddModel", "RunnerService/PullModel", "RunnerService/RemoveModel"]
NEVER = ["RunnerService/FetchPrompt"]


def _rpcs() -> Iterator[str]:
    """Every rpc of the services that a runner serves, as its path."""
    names = (info.name for info in pkgutil.iter_modules(weft.api.runner.v1.__path__, "weft.api.runner.v1."))
    found = [importlib.import_module(name) for name in names if name.endswith("_service_pb2")]
    for module in (process_service_pb2, *found):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


def _outcome(method: str, *, accepts_models: bool) -> str:
    try:
        require_callable(method, accepts_models=accepts_models)
    except WeftError as error:
        return error.reason.name
    return "ok"


def test_each_rpc_of_a_runner_has_a_row_and_is_callable_over_a_link_exactly_as_it_says() -> None:
    short = {method: method.partition(".v1.")[2] for method in _rpcs()}
    assert sorted(short) == sorted(JOINED_CALLS)
    found = {
        short[method]: tuple(_outcome(method, accepts_models=accepts) for accepts in (False, True)) for method in short
    }
    never = dict.fromkeys(NEVER, ("UNSUPPORTED_OPERATION", "UNSUPPORTED_OPERATION"))
    expected = dict.fromkeys(ALWAYS, ("ok", "ok")) | dict.fromkeys(ACCEPTING, ("PERMISSION_DENIED", "ok")) | never
    assert found == expected


@pytest.mark.parametrize(
    "method",
    [
        "/weft.api.runner.v1.RunnerService/",
        "/weft.api.runner.v1.RunnerService/Unknown",
        "/weft.api.operations.v1.ConfigurationService/ReloadConfiguration",
        "/weft.api.registry.v1.RunnerSessionService/OpenSession",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)
def test_method_without_a_row_is_refused_even_if_models_are_accepted(method: str) -> None:
    assert _outcome(method, accepts_models=True) == Reason.UNSUPPORTED_OPERATION.name
