"""The backend of the runtime diffusers: the library in a server program that the runner starts."""

from collections.abc import Sequence

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.environments.diffusers.environment import ENVIRONMENT
from runner_svc.runtimes.diffusers.arguments import SERVER_PROGRAM, load_parameters, server_arguments
from runner_svc.runtimes.diffusers.parameters import PARAMETERS
from runner_svc.runtimes.diffusers.settings import DiffusersModel
from runner_svc.runtimes.media_server import MediaServer
from weft.kernel.load_parameters import LoadParameter
from weft.kernel.request import Operation

OPERATIONS = frozenset({Operation.IMAGE})


class DiffusersBackend(MediaServer[DiffusersModel]):
    """A Backend over one server process."""

    program = SERVER_PROGRAM
    always = OPERATIONS
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
    noun = "diffusers"
    missing_library = "diffusers and PyTorch cannot be loaded; run: weft runtime install diffusers"

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters()

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        return server_arguments(self.model, order, port)
