"""Base of backends with a weft server program around a library as their engine.

The programs are based on `engine_host.http_server`; docs/decisions/0011-in-process-engines.md.
"""

import re
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from typing_extensions import override

from runner_svc.backend.devices import uses_no_device
from runner_svc.backend.port import BackendFacts, CallInfo, LoadOrder, not_offered
from runner_svc.openai_upstream.client import Endpoint, OpenAiHttp
from runner_svc.openai_upstream.errors import own_error
from runner_svc.runtimes.flags import flags_of
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.runtime_settings import CTranslate2Settings, PathModelSettings, StartedModelSettings
from runner_svc.runtimes.server_calls import require_done
from runner_svc.runtimes.started_server import StartedServer, StartLog
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.operation_table import generation_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import UNKNOWN
from weft_extensions.engines.engine_host.http_server import FAILED, KEY_VARIABLE, NO_LIBRARY, NO_MODEL

SLEEP_SECONDS = 30.0
"""Maximum time for freeing the engine's memory; then the engine is stopped."""
WAKE_SECONDS = 600.0
BOOTSTRAP = Path(__file__).parent / "engine_host" / "bootstrap.py"
_LOADED = re.compile(r"^loaded (\d\.\d\d) of the model")
_REFUSED = re.compile(rf"^{NO_MODEL} \[(\w+)\]: (.*)", re.DOTALL)

Settings = TypeVar("Settings", bound=StartedModelSettings)


def program_command(program: str, python: str = sys.executable) -> tuple[str, ...]:
    """Returns the command of a server program, a module of weft, with an interpreter that has its library."""
    return (python, str(BOOTSTRAP), program)


class LibraryServer(StartedServer[Settings], Generic[Settings]):
    """Backend of one server process."""

    runtime: ClassVar[Runtime[Any]]
    """Its descriptor. The program runs in its environment if the runner has no `command`."""
    missing_library: ClassVar[str]
    """The error for a library that cannot be imported, with its remedy."""
    key_variable = KEY_VARIABLE

    def __init__(self, model: Settings, context: ModelContext) -> None:
        self.engine_parameters = self.runtime.parameters
        super().__init__(model, context)

    @property
    def program(self) -> str:
        """The module of the server program, beside that of the backend."""
        return f"{type(self).__module__.rpartition('.')[0]}.server"

    def sleeps_in_place(self, order: LoadOrder) -> bool:
        """Whether after such a load the engine is configured to free its memory but keep its process, and can do so."""
        # With a lease all memory must be freed, but a running process keeps some device memory.
        return isinstance(self.model, CTranslate2Settings) and self.model.sleeps_in_place and not order.shares

    @override
    async def prepare(self, order: LoadOrder) -> None:
        """Raises CONNECT_FAILED if the environment is not installed."""
        python = sys.executable
        environment = self.runtime.environment
        if environment is not None and not self.context.command:
            try:
                python = str(self.context.environments.environment_python(environment))
            except WeftError as error:
                raise WeftError(Reason.CONNECT_FAILED, error.message) from error
        self.command = program_command(self.program, python)

    @override
    def arguments(self, order: LoadOrder, port: int) -> list[str]:
        model = self.model
        file = order.model_path or (model.file if isinstance(model, PathModelSettings) and model.path else None)
        without_device = {"device": "cpu"} if uses_no_device(order) else {}
        return [
            *("--port", str(port), "--threads", str(model.engine_threads), "--slots", str(model.slots)),
            *(() if file is None else ("--model", str(file))),
            *self.own_arguments(order),
            *flags_of(model, {**order.parameters, **without_device}),
            *model.extra_arguments,
        ]

    def own_arguments(self, order: LoadOrder) -> list[str]:
        """Returns the flags of a load other than those of marked settings."""
        del order
        return []

    @override
    def note_line(self, line: str, log: StartLog) -> None:
        if (found := _LOADED.match(line)) is not None:
            log.share = float(found[1])
        elif line.startswith(NO_LIBRARY):
            message = f"{self.missing_library}.{line.removeprefix(NO_LIBRARY)}"
            log.refusal = WeftError(Reason.CONNECT_FAILED, message)
        elif (found := _REFUSED.match(line)) is not None:
            kind, message = found.groups()
            reason = Reason.BACKEND_ERROR if kind == FAILED else Reason.INVALID_ARGUMENT
            log.refusal = own_error(kind, message) or WeftError(reason, message)

    @override
    def endpoint(self, base_url: str, api_key: str) -> Endpoint:
        return Endpoint(base_url=base_url, api_key=api_key, parameters=self.parameters, is_library_server=True)

    @override
    async def free_memory(self, http: OpenAiHttp, order: LoadOrder) -> bool:
        if not self.sleeps_in_place(order):
            return False
        await require_done(http, "/sleep", SLEEP_SECONDS)
        return True

    @override
    async def take_memory(self, http: OpenAiHttp) -> None:
        await require_done(http, "/wake_up", WAKE_SECONDS)

    @override
    def _running(self) -> OpenAiHttp:
        if self._sleeps:
            raise WeftError(Reason.BACKEND_NOT_READY, "the engine sleeps")
        return super()._running()


class MediaServer(LibraryServer[Settings], Generic[Settings]):
    """Backend of one server process for images or recordings."""

    capabilities = UNKNOWN
    """What the loaded model accepts in addition to its operations."""

    @override
    async def facts(self, http: OpenAiHttp, order: LoadOrder) -> BackendFacts:
        return BackendFacts(
            operations=self.operations, context_tokens=0, slots=self.model.slots, capabilities=self.capabilities
        )

    @override
    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        raise not_offered(generation_of(payload).operation)
