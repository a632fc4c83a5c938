"""The runtime llama_cpp_python: the library in its own child process, one per model (docs/decisions/0011)."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

from annotated_types import Ge, Le

from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.engine_variables import DEVICE_VARIABLES
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.policy.parameters import MIROSTAT, EngineParameters, Grammar, Number
from runner_svc.runtimes.runtime import Requirement, Runtime, deferred
from runner_svc.runtimes.runtime_settings import GgufModelSettings
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.reach import PROGRAM

PARAMETERS = EngineParameters(
    engine="llama-cpp-python",
    # Arguments of create_completion in version 0.3, without those of samplers that llama.cpp has removed.
    allowed={
        "grammar": Grammar(),
        "mirostat_mode": Number(0, 2, whole=True),
        **MIROSTAT,
        "typical_p": Number(0, 1),
    },
    untaken=frozenset({"parallel_tool_calls", "reasoning_effort"}),
    renamed={"temperature": "temp"},
    thinks_by_template=True,
    makes_gbnf=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaCppPythonModel(GgufModelSettings):
    """A model that llama-cpp-python serves from a GGUF file."""

    slots: Annotated[int, Ge(1), Le(1024)] = 1
    """Always 1, because the library processes one request at a time."""
    extra_arguments: Annotated[tuple[str, ...], PROGRAM] = ()
    """Additional arguments of the server program, such as `--gpu-layers 0`."""


def _find(command: tuple[str, ...] | None) -> str:
    if command:
        return " ".join(command)
    if find_spec("llama_cpp") is None:
        raise WeftError(Reason.INVALID_ARGUMENT, "llama-cpp-python is not installed for this interpreter")
    return "installed for this interpreter"


RUNTIME = Runtime(
    name="llama_cpp_python",
    summary="llama-cpp-python in a process that weft starts",
    docs="docs/engines.md",
    settings=LlamaCppPythonModel,
    build=deferred("weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend:build"),
    formats=frozenset({WeightFormat.GGUF}),
    parameters=PARAMETERS,
    variables=(*DEVICE_VARIABLES, "GGML_*", "LLAMA_*"),
    habits=EngineHabits(flash_attention=False, computes_whole_batches=True),
    load_values=deferred("weft_extensions.engines.llama_cpp_python.llama_cpp_python_backend:load_values"),
    requirement=Requirement(name="llama-cpp-python", find=_find, remedy="pip install llama-cpp-python"),
    advice={"operations": "the library's operations are fixed"},
)
