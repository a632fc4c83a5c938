"""The runtime comfyui: workflows of images in a ComfyUI that runs already, or that weft starts."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from runner_svc.runtimes.comfyui.parameters import PARAMETERS
from runner_svc.runtimes.comfyui.settings import ComfyUiModel
from runner_svc.runtimes.runtime import ModelFault, Runtime

if TYPE_CHECKING:
    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine


def _build(model: ComfyUiModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.memory.estimate import DeclaredForecast, manifest_bytes_of  # noqa: PLC0415
    from runner_svc.openai_upstream.address import base_url, require_known_place  # noqa: PLC0415
    from runner_svc.runtimes.comfyui.backend import ComfyUiBackend  # noqa: PLC0415
    from runner_svc.runtimes.comfyui.workflow_file import read_workflow  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import ModelEngine  # noqa: PLC0415
    from weft.kernel.request import Operation  # noqa: PLC0415

    command = _checked_command(model, context)
    if model.url is not None:
        url = base_url(model.url, f"{context.where}.url")
        require_known_place(url, remote=model.remote, field=f"{context.where}.remote")
    workflow = None if model.workflow is None else read_workflow(model.workflow, f"{context.where}.workflow")
    return ModelEngine(
        make_backend=lambda: ComfyUiBackend(model, context, command, workflow),
        operations=frozenset({Operation.IMAGE}),
        slots=model.slots,
        forecast=DeclaredForecast(manifest_bytes_of(model.memory_mb)),
        remote=bool(model.remote),
        timeouts=context.timeouts,
        unload_keeps_process=model.unload_keeps_process or model.url is not None,
    )


def _checked_command(model: ComfyUiModel, context: "ModelContext") -> tuple[str, ...]:
    """Returns the command line with its placeholders; empty for one that runs already. Raises INVALID_ARGUMENT."""
    from runner_svc.runtimes.comfyui.placeholders import PORT, check_placeholders, placeholders_of  # noqa: PLC0415

    if model.url is not None:
        return ()
    command = model.command or tuple(context.command or ())
    if not command:
        raise context.refuse("url", "must be set, or command to the command line that starts ComfyUI")
    try:
        for word in command:
            check_placeholders(word)
    except ValueError as error:
        raise context.refuse("command", str(error)) from None
    words = (*command, *model.extra_arguments)
    if PORT not in placeholders_of(words):
        raise context.refuse("command", "must hold {port}: weft chooses the port")
    folder = model.working_folder
    if folder is not None and not folder.expanduser().is_dir():
        raise context.refuse("working_folder", f"there is no folder {folder}")
    return words


def _find_program_fault(
    model: ComfyUiModel, command: tuple[str, ...] | None, environment: Mapping[str, str]
) -> ModelFault | None:
    import shutil  # noqa: PLC0415 - for doctor alone

    words = () if model.url is not None else model.command or command or ()
    if not words or shutil.which(words[0], path=environment.get("PATH")) is not None:
        return None
    return ModelFault(message=f"there is no program {words[0]}", remedy="install ComfyUI, or correct `command`")


RUNTIME = Runtime(
    name="comfyui",
    summary="workflows of images in ComfyUI, which runs already or which weft starts",
    docs="docs/media.md",
    settings=ComfyUiModel,
    build=_build,
    parameters=PARAMETERS,
    find_program_fault=_find_program_fault,
    advice={
        "path": "the workflow says what ComfyUI loads; set workflow to the file of one",
        "source": "the workflow says what ComfyUI loads; set workflow to the file of one",
        "api_key_env": "ComfyUI has no key; let it listen on the loopback, or in a network of your own",
    },
)
