"""The command line and the environment of `vllm serve`: from a model's settings and a load's order.

Flags are those of vLLM 0.32 (`vllm serve --help=all`, November 2026).
"""

from collections.abc import Mapping

from runner_svc.backend.port import LoadOrder
from runner_svc.policy.memory_estimate import ModelShape
from runner_svc.runtimes.vllm_engine.arguments import ENGINE_FLAGS, engine_arguments, engine_variables, model_location
from runner_svc.runtimes.vllm_engine.settings import local_or_id
from runner_svc.runtimes.vllm_serve.settings import VllmServeModel

OWN_FLAGS: Mapping[str, str] = {
    "--host": "it is weft's",
    "--port": "it is weft's; see port_range of the runner",
    "--uds": "it is weft's",
    "--api-key": "it is weft's",
    **ENGINE_FLAGS,
}
"""Flags that are not taken as `extra_arguments`, and why."""
NO_STATISTICS = "--disable-log-stats"
"""With this flag vLLM measures nothing, and refuses to start where times per request are wanted."""


def server_arguments(model: VllmServeModel, order: LoadOrder, shape: ModelShape | None = None) -> list[str]:
    """Returns the command line after the program, without where it listens.

    `shape` is that of the model's files; None: unknown.
    """
    arguments = [
        *("serve", model_location(model, order), "--served-model-name", model.name, "--disable-uvicorn-access-log"),
        *engine_arguments(model, order, shape),
        *_generation_arguments(model),
    ]
    for flag, value in (("--chat-template", model.chat_template_file), ("--reasoning-parser", model.reasoning_parser)):
        if value is not None:
            arguments += [flag, str(value)]
    return [*arguments, *model.extra_arguments]


def _generation_arguments(model: VllmServeModel) -> list[str]:
    if model.kind != "generation":
        return []
    # Without it usage does not tell what came from the cache.
    arguments = ["--enable-prompt-tokens-details"]
    if NO_STATISTICS not in model.extra_arguments:
        arguments.append("--enable-per-request-metrics")
    if model.tool_call_parser is not None:
        arguments += ["--enable-auto-tool-choice", "--tool-call-parser", model.tool_call_parser]
    modules = {adapter.name: adapter.path for adapter in model.adapters}
    if model.lora_path is not None:
        modules[adapter_name(model)] = model.lora_path
    if modules:
        arguments += ["--lora-modules", *(f"{name}={local_or_id(path)}" for name, path in modules.items())]
    return arguments


def adapter_bodies(model: VllmServeModel) -> dict[str, dict[str, object]]:
    """Returns what the body of a generation says in addition, by the adapter that answers; see `Endpoint.adapters`."""
    if not model.adapters:
        return {}
    return {"": {"model": model.name}, **{adapter.name: {"model": adapter.name} for adapter in model.adapters}}


def adapter_name(model: VllmServeModel) -> str:
    """Returns the server's name of the model with its adapter; its name without one is that of the base model."""
    return f"{model.name}-adapter"


def server_environment(model: VllmServeModel, order: LoadOrder, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to those that are given, which win except over what weft itself needs."""
    return {
        **engine_variables(model, order, given),
        # The routes to sleep, to empty the cache and to abort a request. No other user can reach the server.
        "VLLM_SERVER_DEV_MODE": "1",
    }
