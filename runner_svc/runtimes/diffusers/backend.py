"""The backend of the runtime diffusers: the library in a host process that the runner starts."""

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from runner_svc.backend.port import LoadOrder
from runner_svc.environments.diffusers.environment import ENVIRONMENT
from runner_svc.runtimes.diffusers.arguments import HOST_PROGRAM, host_arguments, load_parameters
from runner_svc.runtimes.diffusers.parameters import PARAMETERS
from runner_svc.runtimes.diffusers.settings import DiffusersModel
from runner_svc.runtimes.media_backend import MediaBackend
from weft.kernel.load_parameters import LoadParameter
from weft.kernel.request import Operation

OPERATIONS = frozenset({Operation.IMAGE})


class DiffusersBackend(MediaBackend[DiffusersModel]):
    """A Backend over one host process."""

    program = HOST_PROGRAM
    engine_parameters = PARAMETERS
    engine_environment = ENVIRONMENT
    missing_library = "diffusers and PyTorch cannot be loaded; run: weft runtime install diffusers"

    @property
    @override
    def load_parameters(self) -> Sequence[LoadParameter]:
        return load_parameters()

    @override
    def arguments(self, order: LoadOrder, socket: Path) -> list[str]:
        return host_arguments(self.model, socket, order)

    @override
    def operations(self) -> frozenset[Operation]:
        return OPERATIONS
