"""The backend of the runtime llama_cpp_python: the library in a host process that the runner starts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.policy.load_plan import LoadParameter, LoadValue
from runner_svc.runtimes.hosted_engine import HostedBackend
from runner_svc.runtimes.llama_cpp_python.arguments import (
    HOST_PROGRAM,
    check_together,
    host_arguments,
    load_parameters,
    operations_of,
)
from runner_svc.runtimes.llama_cpp_python.parameters import PARAMETERS
from runner_svc.runtimes.llama_cpp_python.settings import LlamaCppPythonModel
from weft.kernel.missing_package import missing_package
from weft.kernel.request import Operation


class LlamaCppPythonBackend(HostedBackend[LlamaCppPythonModel]):
    """A Backend over one host process."""

    program = HOST_PROGRAM
    engine_parameters = PARAMETERS
    missing_library = (
        f"{missing_package('llama-cpp-python cannot be loaded; it needs', 'llama-cpp-python')}; this compiles "
        "llama.cpp: it takes minutes and a C++ compiler"
    )

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters(self.model, self.context.trained_context_tokens)

    @override
    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        super().check_load(parameters, field)
        check_together(parameters, field)

    @override
    def arguments(self, order: LoadOrder, socket: Path) -> list[str]:
        return host_arguments(self.model, socket, order)

    @override
    def operations(self) -> frozenset[Operation]:
        return operations_of(self.model)
