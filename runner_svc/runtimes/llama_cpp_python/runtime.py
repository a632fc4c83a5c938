"""The runtime llama_cpp_python: the library in a child process of its own, one per model (docs/decisions/0011)."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.runtimes.llama_cpp_python.parameters import PARAMETERS
from runner_svc.runtimes.llama_cpp_python.settings import LlamaCppPythonModel
from runner_svc.runtimes.runtime import Requirement, Runtime
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
    from weft.kernel.load_parameters import LoadValue


def _find(command: tuple[str, ...] | None) -> str:
    if command:
        return " ".join(command)
    if find_spec("llama_cpp") is None:
        raise WeftError(Reason.INVALID_ARGUMENT, "llama-cpp-python is not installed for this interpreter")
    return "installed for this interpreter"


def _load_values(model: LlamaCppPythonModel) -> "Mapping[str, LoadValue]":
    from runner_svc.runtimes.llama_cpp_python.arguments import configured_parameters  # noqa: PLC0415 - see Runtime

    return configured_parameters(model.extra_arguments)


def _build(model: LlamaCppPythonModel, context: "ModelContext") -> "ModelEngine":
    # Imported here: only a process that serves models needs these.
    from runner_svc.runtimes.library_server import program_command  # noqa: PLC0415
    from runner_svc.runtimes.llama_cpp_python.arguments import SERVER_PROGRAM, operations_of  # noqa: PLC0415
    from runner_svc.runtimes.llama_cpp_python.backend import LlamaCppPythonBackend  # noqa: PLC0415
    from runner_svc.runtimes.model_engine import file_context, file_engine, text_abilities  # noqa: PLC0415

    if model.slots != 1:
        raise context.refuse("slots", "must be 1: llama-cpp-python works on one request at a time")
    command = context.command or program_command(SERVER_PROGRAM)
    context = file_context(model, context, command)
    return file_engine(
        model,
        context,
        lambda: LlamaCppPythonBackend(model, context),
        operations=operations_of(model),
        habits=RUNTIME.habits,
        load_values=_load_values(model),
        abilities=text_abilities(context.templates),
    )


RUNTIME = Runtime(
    name="llama_cpp_python",
    summary="llama-cpp-python in a process that weft starts",
    docs="docs/engines.md",
    settings=LlamaCppPythonModel,
    build=_build,
    formats=frozenset({WeightFormat.GGUF}),
    parameters=PARAMETERS,
    habits=EngineHabits(flash_attention=False, computes_whole_batches=True),
    load_values=_load_values,
    requirement=Requirement(name="llama-cpp-python", find=_find, remedy="pip install llama-cpp-python"),
    advice={"operations": "the library's operations are fixed"},
)
