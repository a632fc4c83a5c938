"""The command line of the program that hosts vLLM: from a model's settings and a load's order."""

from collections.abc import Mapping
from pathlib import Path

from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_plan import LoadParameter
from runner_svc.policy.memory_estimate import ModelShape
from runner_svc.runtimes.vllm.settings import VllmLibraryModel
from runner_svc.runtimes.vllm_engine.arguments import (
    ENGINE_FLAGS,
    engine_arguments,
    engine_variables,
    load_parameters,
    model_location,
    sleeps_in_place,
)
from runner_svc.runtimes.vllm_engine.settings import local_or_id

HOST_PROGRAM = "runner_svc.runtimes.vllm.host"
ENGINE_SEPARATOR = "--"
"""What follows it are vLLM's own flags."""
OWN_FLAGS: Mapping[str, str] = {"--model": "it is `model`", "--disable-log-stats": "weft reads them", **ENGINE_FLAGS}
"""Flags that are not taken as `extra_arguments`, and why."""
_FOR_IMAGES = "max_pixels"


def text_load_parameters(model: VllmLibraryModel, trained_context_tokens: int = 0) -> tuple[LoadParameter, ...]:
    """Returns the load parameters of a model, without those of images."""
    found = load_parameters(model, trained_context_tokens)
    return tuple(parameter for parameter in found if parameter.name != _FOR_IMAGES)


def host_arguments(
    model: VllmLibraryModel, socket: Path, order: LoadOrder, shape: ModelShape | None = None
) -> list[str]:
    """Returns the command line of the host program after its command.

    `shape` is that of the model's files; None: unknown.
    """
    own = ["--socket", str(socket)]
    # Under the empty name: it answers every request.
    modules = {"": model.lora_path} if model.lora_path is not None else {}
    for name, path in {**modules, **{adapter.name: adapter.path for adapter in model.adapters}}.items():
        own += ["--adapter", f"{name}={local_or_id(path)}"]
    if sleeps_in_place(model, order):
        own += ["--sleep-level", str(model.sleep_level)]
    return [
        *own,
        *(ENGINE_SEPARATOR, "--model", model_location(model, order), "--served-model-name", model.name),
        # It is given text alone, so that an encoder of images would only take memory.
        "--language-model-only",
        *engine_arguments(model, order, shape),
        *model.extra_arguments,
    ]


def host_environment(model: VllmLibraryModel, order: LoadOrder, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables to add to those that are given, which win except over the choice of devices."""
    variables = engine_variables(model, order, given)
    # As its own server has it: the program has threads, which a fork would lose.
    name = "VLLM_WORKER_MULTIPROCESSING_METHOD"
    return variables if name in given else {name: "spawn", **variables}
