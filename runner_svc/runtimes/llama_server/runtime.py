"""The runtime llama_server: llama.cpp's HTTP server, one process per model, started and ended by weft."""

import shutil
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.runtimes.llama_server.parameters import PARAMETERS
from runner_svc.runtimes.llama_server.settings import LlamaServerModel
from runner_svc.runtimes.runtime import Requirement, Runtime
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
    from weft.kernel.load_parameters import LoadValue


PROGRAM = "llama-server"
LAUNCHER = "runner_svc.runtimes.llama_server.xllamacpp_launcher"


def llama_command(configured: tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the server to start: the configured one, a native one on PATH, or the one in the xllamacpp wheel.

    Raises INVALID_ARGUMENT with the next step when there is none.
    """
    if configured:
        return configured
    native = shutil.which(PROGRAM)
    if native is not None:
        return (native,)
    if find_spec("xllamacpp") is None:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"there is no {PROGRAM} on PATH and xllamacpp is not installed; "
            f"run: {sys.executable} -m pip install xllamacpp",
        )
    return (sys.executable, "-m", LAUNCHER)


def _find(command: tuple[str, ...] | None) -> str:
    return " ".join(llama_command(command))


def _load_values(model: LlamaServerModel) -> "Mapping[str, LoadValue]":
    from runner_svc.runtimes.llama_server.arguments import configured_parameters  # noqa: PLC0415 - see Runtime

    return configured_parameters(model.extra_arguments)


def _build(model: LlamaServerModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.runtimes.llama_server.abilities import file_abilities  # noqa: PLC0415
    from runner_svc.runtimes.llama_server.adapters import check_adapters  # noqa: PLC0415
    from runner_svc.runtimes.llama_server.arguments import (  # noqa: PLC0415
        DRAFT_BY_MODEL,
        DRAFT_FLAGS,
        PROJECTOR_FLAGS,
        SETTING_FLAGS,
        habits_of,
        names_flag,
        operations_of,
    )
    from runner_svc.runtimes.llama_server.backend import LlamaServerBackend  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import file_context, file_engine  # noqa: PLC0415

    context = file_context(model, context, llama_command(context.command))
    for setting, file, flags in (
        ("mmproj_path", model.projector_file, PROJECTOR_FLAGS),
        ("draft_model_path", model.draft_file, DRAFT_FLAGS),
    ):
        if file is not None and names_flag(model.extra_arguments, flags):
            raise context.refuse(setting, f"is also given by {flags[0]} among extra_arguments; leave one of them out")
        if file is not None and not file.is_file():
            raise context.refuse(setting, f"there is no file {file}")
    for setting, flag in SETTING_FLAGS.items():
        if getattr(model, setting) is not None and names_flag(model.extra_arguments, (flag,)):
            raise context.refuse(setting, f"is also given by {flag} among extra_arguments; leave one of them out")
    if model.spec_type == DRAFT_BY_MODEL and model.draft_file is None:
        raise context.refuse("spec_type", f"{DRAFT_BY_MODEL} needs draft_model_path")
    check_adapters(model, context)
    return file_engine(
        model,
        context,
        lambda: LlamaServerBackend(model, context),
        operations=operations_of(model),
        habits=habits_of(model),
        load_values=_load_values(model),
        abilities=file_abilities(model, context.templates),
    )


RUNTIME = Runtime(
    name="llama_server",
    summary="llama.cpp's server, which weft starts",
    docs="docs/engines.md",
    settings=LlamaServerModel,
    build=_build,
    formats=frozenset({WeightFormat.GGUF}),
    parameters=PARAMETERS,
    habits=EngineHabits(embeds=True),
    load_values=_load_values,
    requirement=Requirement(name="llama.cpp server", find=_find, remedy="pip install xllamacpp"),
    advice={
        "operations": "llama.cpp's server offers what it is started with (reranking: extra_arguments [--reranking])",
        "url": "a server that runs already is a model of a runner with `runtime: openai_http`",
    },
)
