"""Base of backends for servers that weft does not start: no process, no log, no load.

The server's address and key stay in this process: errors of such a backend never contain them, even if the server's own
messages do.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Generic, TypeVar

from typing_extensions import override
from yarl import URL

from runner_svc.backend.port import (
    BackendFacts,
    CallInfo,
    ExitReport,
    LoadOrder,
)
from runner_svc.engine_http.answer import Answer
from runner_svc.openai_upstream.client import Endpoint, Open, OpenAiHttp
from runner_svc.policy.backoff import BUSY_REASONS, ServerBackoff
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.runtime_settings import UpstreamSettings
from runner_svc.runtimes.server_calls import ServerCalls
from runner_svc.supervise.logs import LogRing
from weft.api.common.v1 import completion_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import ENGINE_CAUSE, UNSENT, FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.values.names import SECRET_PREFIX
from weft.wake.recipes import redacted

Model = TypeVar("Model", bound=UpstreamSettings)


def read_key(variable: str | None, environment: Mapping[str, str]) -> str:
    """Returns the key in an environment variable; empty if no variable is named.

    Raises INVALID_ARGUMENT naming the variable, never its value.
    """
    if variable is None:
        return ""
    key = environment.get(variable, "").strip()
    if not key:
        raise WeftError(
            Reason.INVALID_ARGUMENT, f"the environment variable {variable} should contain the key, but is empty"
        )
    if not (key.isascii() and key.isprintable()):
        raise WeftError(
            Reason.INVALID_ARGUMENT, f"the key in the environment variable {variable} is not printable text"
        )
    return key


class UnmanagedServer(ServerCalls, Generic[Model]):
    """Base of backends for servers that weft does not start: one model of one server.

    A runtime adds the operations and parameters, `_open` to send requests, `_require_ready` and `_is_there` to check
    the server, and possibly `_explain_break`.
    """

    noun = "server"
    """Name of the server in messages."""
    is_provider = False
    """Whether it is remote; see Endpoint.is_provider."""

    def __init__(
        self,
        model: Model,
        context: ModelContext,
        *,
        operations: frozenset[Operation],
        parameters: ParameterProfile,
        max_retries: int = 0,
    ) -> None:
        """`parameters`: supported extra parameters, and whether the model thinks by default."""
        self.model = model
        self.context = context
        self.base_url = model.url.rstrip("/")
        self.operations = operations
        self.parameters = parameters
        self._http: OpenAiHttp | None = None
        self._backoff = ServerBackoff(max_retries=max_retries)
        self._secrets: tuple[str, ...] = ()
        """Texts that are removed from errors."""
        self._why_gone = ""
        """Why the last probe found the server unusable; empty: it did not respond."""
        self.log = LogRing()

    @override
    async def start(self, order: LoadOrder | None = None) -> BackendFacts:
        """Connects to the server; returns when `_require_ready` does.

        Raises as `_require_ready`, and INVALID_ARGUMENT for an environment variable without a key, or for load options,
        because weft does not load the model.
        """
        self._require_no_orders(order)
        await self.stop()
        key = read_key(self.model.api_key_env, self.context.environment)
        self._secrets = secret_words(self.base_url, key)
        endpoint = Endpoint(
            base_url=self.base_url,
            api_key=key,
            model=self.model.server_model,
            parameters=self.parameters,
            is_provider=self.is_provider,
            present_key=self._present_key if self.is_provider else None,
            header_value=self._header_value if self.is_provider else None,
        )
        http = self._client(endpoint)
        try:
            await self._require_ready(http)
        except BaseException:
            await http.close()
            raise
        self._http = http
        return BackendFacts(operations=self.operations, context_tokens=self.model.context_tokens or 0)

    @override
    async def wait_exit(self) -> ExitReport:
        """Returns after several consecutive failed probes of the server."""
        http = self._running()
        failures = 0
        while failures < self.context.probe_failures:
            await asyncio.sleep(self.context.probe_interval_seconds)
            if http is not self._http:
                await asyncio.Event().wait()  # stopped by weft: the waiting task is cancelled
            failures = 0 if await self._is_there(http) else failures + 1
        return ExitReport(reason=Reason.CONNECT_FAILED, how=self._why_gone or f"the {self.noun} stopped answering")

    def _present_key(self) -> str:
        """Returns the current key. Raises BACKEND_ERROR if there is none."""
        try:
            key = read_key(self.model.api_key_env, self.context.environment)
        except WeftError:
            message = f"the key of this model is missing: {self.model.api_key_env}"
            raise WeftError(Reason.BACKEND_ERROR, message) from None
        if key != self._secrets[-1]:
            # Errors of requests with the previous key may still arrive.
            self._secrets = (*secret_words(self.base_url, self._secrets[-1]), key)
        return key

    def _header_value(self, text: str) -> str:
        """Returns a header's text, or the secret that it names. Raises BACKEND_ERROR if that may not be sent."""
        if not text.startswith(SECRET_PREFIX):
            return text
        # Whoever declared the address of such a model was allowed to use secrets.
        if not self.model.api_key_env:
            raise WeftError(Reason.BACKEND_ERROR, f"{text} in a header is sent only to models with apiKeyRef")
        if not (value := self.context.environment.get(text, "").strip()):
            raise WeftError(Reason.BACKEND_ERROR, f"the secret of a header is missing: {text}")
        return value

    @property
    def _key(self) -> str:
        """The key sent to the server; empty: none."""
        return self._secrets[-1] if self._secrets else ""

    def _client(self, endpoint: Endpoint) -> OpenAiHttp:
        return OpenAiHttp(endpoint, self.context.timeouts, self._explain_break, self._open)

    async def _open(self, open_response: Open, call: CallInfo) -> Answer:
        """Returns the response to a request, which `open_response` sends."""
        raise NotImplementedError

    async def _require_ready(self, http: OpenAiHttp) -> None:
        """Returns once the server accepts requests for the model. Raises CONNECT_FAILED if it does not respond."""
        raise NotImplementedError

    async def _is_there(self, http: OpenAiHttp) -> bool:
        """Whether the server is there according to a probe."""
        raise NotImplementedError

    async def _explain_break(self, reason: Reason) -> WeftError | None:
        """Returns the error of a broken answer; None: no better explanation."""
        del reason
        return None

    async def stop(self) -> None:
        """Closes the connections; the server keeps running. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    @override
    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        if Operation.COMPLETION not in self.operations and isinstance(payload, completion_pb2.CompletionPayload):
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this model supports chat, but not text completions")
        with self._redacted_errors():
            async with aclosing(self._running().generate(payload, call)) as frames:
                async for frame in frames:
                    yield frame

    @contextmanager
    @override
    def _asking(self, operation: Operation, call: CallInfo) -> Iterator[tuple[OpenAiHttp, CallInfo]]:
        with self._redacted_errors(), super()._asking(operation, call) as asked:
            yield asked

    @contextmanager
    def _redacted_errors(self) -> Iterator[None]:
        """Removes the server's address and key from errors raised in the block."""
        try:
            yield
        except WeftError as error:
            raise self._redacted(error) from None

    def _require_no_orders(self, order: LoadOrder | None) -> None:
        """Raises INVALID_ARGUMENT for load options: weft does not load the model."""
        order = order or LoadOrder()
        self.check_load(order.parameters)
        if order.model_path is not None:
            raise invalid_field("quantization", "cannot be set: weft did not start this server")

    def _require_not_busy(self) -> None:
        """Raises RATE_LIMIT_EXCEEDED or NO_SLOT_AVAILABLE, with the server's words, until the end of its pause."""
        wait, why = self._backoff.seconds_to_wait(asyncio.get_running_loop().time()), self._backoff.why
        if wait > 0.0 and why is not None:
            is_limit = why.reason is Reason.RATE_LIMIT_EXCEEDED
            reason = Reason.RATE_LIMIT_EXCEEDED if is_limit else Reason.NO_SLOT_AVAILABLE
            message = f"the server is busy and has not been asked again: {why.log_message}"
            raise WeftError(reason, message, metadata={UNSENT: "true"}, retry_after_seconds=wait)

    async def _open_unless_busy(self, open_response: Open) -> Answer:
        """Returns the response to a request, and notes whether the server is busy. Raises as `_require_not_busy`."""
        self._require_not_busy()
        try:
            response = await open_response()
        except WeftError as error:
            if error.reason in BUSY_REASONS:
                self._backoff.note_busy(error, asyncio.get_running_loop().time())
            raise
        self._backoff.note_open()
        return response

    @override
    def _running(self) -> OpenAiHttp:
        if self._http is None:
            raise WeftError(Reason.BACKEND_NOT_READY, "the engine is not running")
        return self._http

    def _redacted(self, error: WeftError) -> WeftError:
        if isinstance(error, FieldError) and ENGINE_CAUSE not in error.metadata:
            return error  # weft's own message about the caller's request
        others = [value for name, value in self.context.environment.items() if name.startswith(SECRET_PREFIX)]
        secrets = (*self._secrets, *others)
        return WeftError(
            error.reason,
            redacted(error.message, secrets),
            metadata={name: redacted(value, secrets) for name, value in error.metadata.items()},
            retry_after_seconds=error.retry_after_seconds,
        )


def secret_words(base_url: str, api_key: str) -> tuple[str, ...]:
    """Returns the texts that identify a server: its address and key."""
    url = URL(base_url)
    host, port = url.host or "", str(url.explicit_port or "")
    return (base_url, f"{host}:{port}", host, port, api_key)
