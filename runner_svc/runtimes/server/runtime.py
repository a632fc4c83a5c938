"""The runtime server: any OpenAI-compatible server program, one process per model, started and ended by weft."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner_svc.runtimes.runtime import ModelFault, Runtime
from runner_svc.runtimes.server.parameters import PARAMETERS
from runner_svc.runtimes.server.settings import ServerModel

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
    from runner_svc.runtimes.server.presets import ServerPreset


def _build(model: ServerModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.memory.estimate import DeclaredForecast, manifest_bytes_of  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import ModelEngine  # noqa: PLC0415
    from runner_svc.runtimes.server.backend import ServerBackend, operations_of  # noqa: PLC0415

    _check(model, context)
    return ModelEngine(
        make_backend=lambda: ServerBackend(model, context),
        operations=operations_of(model),
        slots=model.slots,
        context_tokens=model.slot_context_tokens,
        forecast=DeclaredForecast(manifest_bytes_of(model.memory_mb)),
        remote=bool(model.remote),
        timeouts=context.timeouts,
        unload_keeps_process=model.unload_keeps_process,
    )


def _check(model: ServerModel, context: "ModelContext") -> None:
    """Raise INVALID_ARGUMENT naming a setting that is missing, or that contradicts another one."""
    from runner_svc.runtimes.server.backend import operations_of  # noqa: PLC0415
    from runner_svc.runtimes.server.placeholders import check_placeholders, placeholders_of  # noqa: PLC0415
    from runner_svc.runtimes.server.program import command_of, preset_of  # noqa: PLC0415

    preset, command = preset_of(model), command_of(model, context.command)
    if not command:
        raise context.refuse("command", "must be set, or preset to a program that weft knows")
    for setting, texts in (("command", command), ("environment", tuple(model.environment.values()))):
        try:
            for text in texts:
                check_placeholders(text)
        except ValueError as error:
            raise context.refuse(setting, str(error)) from None
    used = placeholders_of((*command, *preset.environment.values(), *model.environment.values()))
    if "port" not in used:
        raise context.refuse("command", "must hold {port}, here or in environment: weft chooses the port")
    if "model" in used and not model.model:
        raise context.refuse("model", "must be set: the command line has {model}")
    known = preset.operations | preset.other_operations
    if not operations_of(model) <= known:
        names = ", ".join(sorted(operation.name.lower() for operation in known))
        raise context.refuse("operations", f"{preset.title} offers: {names}")
    if (model.key_variable or preset.key_variable) in model.environment:
        raise context.refuse("environment", "must not have the variable of the key, which weft sets in each start")
    _check_sleep(model, preset, context)
    folder = model.working_folder
    if folder is not None and not folder.expanduser().is_dir():
        raise context.refuse("working_folder", f"there is no folder {folder}")


def _check_sleep(model: ServerModel, preset: "ServerPreset", context: "ModelContext") -> None:
    if model.sleeps_in_place and (preset.sleep is None or (preset.wake or preset.load) is None):
        raise context.refuse("sleeps_in_place", f"needs a preset with routes to sleep and to wake, not {preset.title}")
    if model.unload_keeps_process and not model.sleeps_in_place:
        raise context.refuse("unload_keeps_process", "needs sleeps_in_place: its process is ended otherwise")


def _find_program_fault(
    model: ServerModel, command: tuple[str, ...] | None, environment: Mapping[str, str]
) -> ModelFault | None:
    from runner_svc.runtimes.server.program import (  # noqa: PLC0415 - for doctor alone
        command_of,
        find_program,
        lacks_module,
        preset_of,
    )

    words, preset = command_of(model, command), preset_of(model)
    if not words:
        return ModelFault(message="it has no command and no preset", remedy="set command or preset")
    remedy = preset.install or "install it, or correct `command`"
    path = find_program(words, environment)
    if path is None:
        return ModelFault(message=f"there is no program {words[0]}", remedy=remedy)
    if module := lacks_module(path, words):
        return ModelFault(message=f"{path} has no module {module}", remedy=remedy)
    return None


RUNTIME = Runtime(
    name="server",
    summary="any OpenAI-compatible server program, which weft starts: SGLang, TGI, LMDeploy, TabbyAPI, mlx-lm, Ollama",
    docs="docs/engines.md",
    settings=ServerModel,
    build=_build,
    parameters=PARAMETERS,
    find_program_fault=_find_program_fault,
    advice={
        "path": "this runtime starts a program of its own choice: set model, and command or preset",
        "url": "a server that runs already is a model of a runner with `runtime: openai_http`",
        "api_key_env": "weft makes a key for each start: set key_variable to the variable that the program reads",
    },
)
