"""`weft get` and `weft ps`: what the mesh knows, and what runs."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import grpc
import typer

from weft.api.registry.v1 import model_pb2, registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, reporting
from weft.cli.output import Column, print_resources, seconds_ago
from weft.client import mesh_address
from weft.kernel.reasons import Reason
from weft.kernel.rpc import CHANNEL_OPTIONS, error_from_call

CALL_TIMEOUT_SECONDS = 5.0
PAGE_SIZE = 500

app = typer.Typer(help="List resources of the mesh.", no_args_is_help=True)

_MODEL_COLUMNS = (
    Column("NAME", lambda model: model.manifest.name),
    Column("POOL", lambda model: model.manifest.pool_name or "-"),
    Column("STATUS", lambda model: _enum(model_pb2.Model.Status, model.status)),
    Column("RUNNER", lambda model: model.runner),
    Column("OPERATIONS", lambda model: ",".join(_operations(model))),
    Column("CONTEXT", lambda model: str(model.manifest.context_tokens or "-")),
)
_RUNNER_COLUMNS = (
    Column("NAME", lambda runner: runner.name),
    Column("STATUS", lambda runner: _enum(runner_pb2.Runner.Status, runner.status)),
    Column("HOST", lambda runner: runner.host),
    Column("RUNTIME", lambda runner: runner.runtime),
    Column("MODELS", lambda runner: ",".join(state.model for state in runner.capability.instances) or "-"),
    Column("SLOTS", lambda runner: _slots(runner.capability.instances)),
    Column("HEARTBEAT", lambda runner: f"{_age(runner.last_heartbeat_time)} ago"),
)
_PROCESS_COLUMNS = (
    Column("MODEL", lambda row: row["model"]),
    Column("RUNNER", lambda row: row["runner"]),
    Column("HOST", lambda row: row["host"]),
    Column("RUNTIME", lambda row: row["runtime"]),
    Column("STATE", lambda row: row["state"]),
    Column("SLOTS", lambda row: f"{row['slotsUsed']}/{row['slotsTotal']}"),
    Column("CONTEXT", lambda row: str(row["contextTokens"] or "-")),
    Column("PID", lambda row: str(row["pid"] or "-")),
    Column("RESTARTS", lambda row: str(row["restarts"])),
)


@app.command("models")
@app.command("model", hidden=True)
def get_models(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the models of the mesh.

    Example: weft get models -o json
    """
    with reporting(), _channel(home) as channel:
        stub = registry_service_pb2_grpc.RegistryServiceStub(channel)
        request = registry_service_pb2.ListModelsRequest(page_size=PAGE_SIZE)
        models = list(_pages(stub.ListModels, request, "models"))
        print_resources("ModelList", models, _MODEL_COLUMNS, output)


@app.command("runners")
@app.command("runner", hidden=True)
def get_runners(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """List the runners of the mesh.

    Example: weft get runners -o yaml
    """
    with reporting(), _channel(home) as channel:
        print_resources("RunnerList", _runners(channel), _RUNNER_COLUMNS, output)


def ps(home: HomeOption = DEFAULT_HOME, output: OutputOption = OutputFormat.TABLE) -> None:
    """Show what runs: each model on each runner, with its process and its slots.

    Example: weft ps
    """
    with reporting(), _channel(home) as channel:
        rows = [row for runner in _runners(channel) for row in _processes(runner)]
        print_resources("ProcessList", rows, _PROCESS_COLUMNS, output)


def _channel(home: Any) -> grpc.Channel:
    return grpc.insecure_channel(mesh_address(home, "registry"), options=CHANNEL_OPTIONS)


def _runners(channel: grpc.Channel) -> list[runner_pb2.Runner]:
    stub = registry_service_pb2_grpc.RegistryServiceStub(channel)
    return list(_pages(stub.ListRunners, registry_service_pb2.ListRunnersRequest(page_size=PAGE_SIZE), "runners"))


def _pages(call: Callable[..., Any], request: Any, field: str) -> Iterator[Any]:
    """Every item of every page."""
    while True:
        try:
            response = call(request, timeout=CALL_TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        yield from getattr(response, field)
        if not response.next_page_token:
            return
        request.page_token = response.next_page_token


def _processes(runner: runner_pb2.Runner) -> Iterator[dict[str, Any]]:
    """One row per instance; the runner itself is asked for process ids, and may be unreachable."""
    described = {instance.model: instance for instance in _describe(runner)}
    for state in runner.capability.instances:
        instance = described.get(state.model)
        active = runner.status == runner_pb2.Runner.STATUS_ACTIVE
        yield {
            "model": state.model,
            "runner": runner.name,
            "host": runner.host,
            "runtime": runner.runtime,
            "state": _enum(runner_pb2.InstanceState.Phase, state.phase) if active else "gone",
            "detail": state.detail,
            "slotsUsed": len(instance.active_request_ids) if instance is not None else state.slots_used,
            "slotsTotal": state.slots_total,
            "contextTokens": state.context_tokens,
            "pid": instance.process_id if instance is not None else 0,
            "restarts": instance.restart_count if instance is not None else 0,
        }


def _describe(runner: runner_pb2.Runner) -> list[runner_service_pb2.InstanceDescription]:
    if runner.status != runner_pb2.Runner.STATUS_ACTIVE:
        return []
    with grpc.insecure_channel(runner.address, options=CHANNEL_OPTIONS) as channel:
        try:
            stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
            response = stub.Describe(runner_service_pb2.DescribeRequest(), timeout=CALL_TIMEOUT_SECONDS)
        except grpc.RpcError:
            return []
        return list(response.instances)


def _enum(enum: Any, number: int) -> str:
    """The last word of an enum value's name, in lower case: PHASE_CRASH_LOOP is crash-loop."""
    name: str = enum.Name(number)
    return name.partition("_")[2].lower().replace("_", "-")


def _operations(model: model_pb2.Model) -> list[str]:
    prefix = "MODEL_OPERATION_"
    return [model_pb2.ModelOperation.Name(op).removeprefix(prefix).lower() for op in model.manifest.operations]


def _slots(instances: Any) -> str:
    return f"{sum(state.slots_used for state in instances)}/{sum(state.slots_total for state in instances)}"


def _age(moment: Any) -> str:
    then = moment.ToDatetime(tzinfo=UTC)
    return seconds_ago((datetime.now(UTC) - then).total_seconds())
