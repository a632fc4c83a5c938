"""The backend of the runtime exllamav3: the library in a server program that the runner starts."""

from collections.abc import Mapping, Sequence

from typing_extensions import override

from runner_svc.backend.port import CacheIsolation, LoadOrder
from runner_svc.environments.exllamav3.environment import ENVIRONMENT
from runner_svc.runtimes.exllamav3.arguments import SERVER_PROGRAM, load_parameters, server_arguments
from runner_svc.runtimes.exllamav3.parameters import PARAMETERS
from runner_svc.runtimes.exllamav3.settings import PAGE_TOKENS, ExllamaV3Model
from runner_svc.runtimes.text_server import TextServer
from weft.kernel.errors import invalid_field
from weft.kernel.load_parameters import LoadParameter, LoadValue


class ExllamaV3Backend(TextServer[ExllamaV3Model]):
    """A Backend over one server process."""

    program = SERVER_PROGRAM
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
    missing_library = (
        "ExLlamaV3 cannot be loaded; it needs a CUDA device, CUDA's compiler (CUDA_HOME) and its environment: "
        "weft runtime install exllamav3"
    )
    noun = "ExLlamaV3"

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters(self.model, self.context.trained_context_tokens)

    @override
    def check_load(self, parameters: Mapping[str, LoadValue], field: str = "parameters") -> None:
        super().check_load(parameters, field)
        if int(parameters.get("cache_tokens", 0)) % PAGE_TOKENS:
            raise invalid_field(f"{field}.cache_tokens", f"must be a multiple of {PAGE_TOKENS}")

    @property
    @override
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.NONE if self.model.shared_cache else CacheIsolation.SALT

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        return server_arguments(self.model, order, port)
