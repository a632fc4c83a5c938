"""POST /api/pull: pulls a model's files as an operation of the mesh, and reports progress in JSON lines.

A disconnect cancels the pull, as in Ollama. The next pull of the same files resumes it.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from gateway.answers.answer_builder import with_warnings
from gateway.answers.sse_writer import EventStream, SseWriter
from gateway.answers.unary import JsonAnswer, UnaryAnswer
from gateway.deps import Gateway, GatewayDeps
from gateway.errors import OLLAMA_JSON, ClientGoneError, Dialect, envelope
from gateway.openai.extension_fields import unknown_fields
from gateway.operation_client import ENDED, OperationsClient, read_body, requester
from gateway.request_facts import facts_of
from weft.api.operations.v1 import operation_pb2
from weft.documents.operation_actions import pull_action
from weft.documents.rights import require_operable
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import asked_source, is_source
from weft.kernel.models.short_names import short_names_hint, short_source
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.names import LATEST
from weft_extensions.ollama.answers import JSON_LINES
from weft_extensions.ollama.chat import KEYLESS, Operations, begin_operation, require_success
from weft_extensions.ollama.names import SURFACE
from weft_extensions.ollama.schema import OllamaPullRequest

_WAITING = b'{"status":"waiting"}\n'
_NOT_A_SOURCE = (
    "must be what a model is pulled from, such as hf.co/Qwen/Qwen3-8B-GGUF:Q4_K_M, or a short name that weft or "
    "gateway.ollama_sources knows"
)

log = get_logger("weft.gateway")


async def pull_model(deps: Gateway, operations: Operations, request: Request) -> Response:
    """Pulls the files of a model into a runner's model store. Streams JSON lines unless `stream` is false."""
    params = await read_body(request, deps.config, OllamaPullRequest, SURFACE)
    if operations is None:
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this gateway does not support operations: use `weft pull`")
    if params.insecure:
        raise invalid_field("insecure", "is a setting of the mesh: model_store.allow_http")
    given = (params.model or params.name or "").removesuffix(LATEST)
    # Configured sources and known short names need no further permission.
    source = _listed_source(given, deps.config.ollama_sources) or short_source(given)
    is_configured = source is not None
    if source is None:
        source = given
        if not is_source(source):
            raise invalid_field("model", f"{_NOT_A_SOURCE}; {short_names_hint(given)}")
        asked_source(source, "model")
        # Before the stream begins.
        require_operable(facts_of(request.scope).principal, pull_action(source))
    success = with_warnings(encode_json({"status": "success"}), unknown_fields(params))
    pull = _Pull(request, operations, source, success, is_configured=is_configured)
    if params.stream is False:
        return _WholePull(pull, deps)
    return _PullStream(pull, deps)


def _listed_source(name: str, sources: Mapping[str, str]) -> str | None:
    """Returns the configured source of a name in Ollama's library; None: not configured."""
    name = name.lower()
    return sources.get(name) or sources.get(name + LATEST)


class _Pull:
    def __init__(
        self, request: Request, operations: OperationsClient, source: str, success: bytes, *, is_configured: bool
    ) -> None:
        """`success`: the last object of its answer; `is_configured`: the source is not the caller's."""
        self.success = success
        self._request = request
        self._operations = operations
        self._source, self._is_configured = source, is_configured
        self._creation: asyncio.Task[operation_pb2.Operation] | None = None
        self.last = operation_pb2.Operation()
        """The operation as last known."""

    async def states(self) -> AsyncGenerator[operation_pb2.Operation]:
        """Yields the operation after every change until it succeeds. Raises the reason of a failure."""
        creation = begin_operation(
            self._request, self._operations, pull_action(self._source), configured_source=self._is_configured
        )
        # Shielded: the registry may create the operation of a caller that has left, which `cancel` then cancels.
        self._creation = asyncio.create_task(creation)
        self.last = await asyncio.shield(self._creation)
        async with aclosing(self._operations.watch(self.last.name)) as states:
            async for self.last in states:
                yield self.last
        require_success(self.last)

    async def cancel(self) -> None:
        """Cancels the operation, if its creation has begun."""
        if self._creation is None:
            return
        try:
            self.last = await self._creation
            await self._operations.cancel(self.last.name, requester(self._request, KEYLESS))
        except WeftError as error:
            # It was refused or has ended meanwhile, or continues and can be cancelled by its name.
            log.info("pull not cancelled", operation=self.last.name, reason=error.reason.name.lower())


class _PullStream(EventStream):
    _keepalive = _WAITING
    _content_type = JSON_LINES

    def __init__(self, pull: _Pull, deps: GatewayDeps) -> None:
        super().__init__(
            deps, _lines(pull), failure=lambda error, request_id: envelope(error, request_id, Dialect.OLLAMA) + b"\n"
        )
        self._pull = pull

    @override
    async def _pump(self, scope: Scope, receive: Receive, writer: SseWriter) -> None:
        try:
            await super()._pump(scope, receive, writer)
        except ClientGoneError:
            await self._pull.cancel()
            raise


class _WholePull(UnaryAnswer):
    """Answers when the pull has ended."""

    def __init__(self, pull: _Pull, deps: GatewayDeps) -> None:
        self._seconds = deps.config.request_timeout_seconds
        super().__init__(self._ended, cut_off_seconds=self._seconds + deps.config.deadline_slack_seconds)
        self._pull = pull

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ClientGoneError:
            await self._pull.cancel()
            raise

    async def _ended(self) -> JsonAnswer:
        try:
            async with asyncio.timeout(self._seconds), aclosing(self._pull.states()) as states:
                async for _ in states:
                    pass
        except TimeoutError:
            require_success(self._pull.last)
        return JsonAnswer(self._pull.success, [], OLLAMA_JSON)


async def _lines(pull: _Pull) -> AsyncGenerator[bytes]:
    """Yields the progress as JSON lines without repetitions; the last line reports success."""
    told = b""
    async with aclosing(pull.states()) as states:
        async for operation in states:
            line = encode_json(_progress(operation)) + b"\n"
            has_failed = operation.state in ENDED and operation.state != operation_pb2.Operation.STATE_SUCCEEDED
            if line != told and not has_failed:
                told = line
                yield line
    yield pull.success + b"\n"


def _progress(operation: operation_pb2.Operation) -> dict[str, Any]:
    """Returns the progress of a pull, with sizes once they are known."""
    found: dict[str, Any] = {"status": operation.detail or operation.stage or "waiting"}
    if operation.HasField("progress"):
        found["progress"] = operation.progress
    if operation.HasField("total_bytes") and operation.HasField("done_bytes"):
        found |= {"total": operation.total_bytes, "completed": operation.done_bytes}
        # Clients draw a progress bar only for lines with a digest.
        found |= {"digest": operation.digest} if operation.digest else {}
    if operation.result.HasField("pulled"):
        pulled = operation.result.pulled
        found |= {"digest": pulled.digest, "total": pulled.size_bytes, "completed": pulled.size_bytes}
        found["status"] = f"pulled {pulled.source}"
    return {**found, "operation": operation.name}
