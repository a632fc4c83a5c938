"""HTTP client of an OpenAI-compatible server: generation, embeddings and reranking."""

import asyncio
import base64
import math
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import msgspec

from runner_svc.backend.port import CallInfo, EmbeddingResult, RerankResult
from runner_svc.engine_http.answer import Answer
from runner_svc.engine_http.client import EngineClient
from runner_svc.engine_http.faults import (
    ClosedClientError,
    HttpFaultError,
    UnansweredError,
    Unconnected,
    UnconnectedError,
)
from runner_svc.openai_upstream.answers import (
    content_encoding,
    drain,
    head_fault,
    read_beginning,
    read_bounded,
    require_content_type,
    require_plain,
    shortage,
    unreached,
)
from runner_svc.openai_upstream.choices import Choices
from runner_svc.openai_upstream.dialects import count_of, figure, read_json
from runner_svc.openai_upstream.errors import provider_refusal, refusal, refuses_stream_options, stated_answer
from runner_svc.openai_upstream.infill import INFILL, about_model, as_completion
from runner_svc.openai_upstream.openai_request import (
    STREAM_OPTIONS,
    Json,
    PreparedBody,
    add_cache_use,
    call_ids,
    chat_body,
    choices_per_prompt,
    completion_body,
    embedding_body,
    expected_choices,
    model_field,
    warning_frame,
)
from runner_svc.openai_upstream.openai_stream import DONE, StreamReader
from runner_svc.openai_upstream.server_probes import HEALTH, MODELS
from runner_svc.openai_upstream.sse import MAX_EVENT_BYTES, SseDecoder
from runner_svc.openai_upstream.tool_calls import (
    engine_names,
    refuses_tool_schemas,
    restore_names,
    with_names,
    with_plain_schemas,
)
from runner_svc.policy.parameters import ParameterProfile
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.supervise.peer_process import VerifyPeer
from weft.api.common.v1 import chat_pb2, embedding_pb2, rerank_pb2, usage_pb2
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import TRACEPARENT

MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
RERANK = "/v1/rerank"
TOKENIZE = "/tokenize"
APPLY_TEMPLATE = "/apply-template"
IMAGES = "/v1/images/generations"
IMAGE_EDITS = "/v1/images/edits"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
SPEECH = "/v1/audio/speech"
_PATHS = (
    *(HEALTH, MODELS, MESSAGES, CHAT, COMPLETIONS, EMBEDDINGS, INFILL, RERANK, TOKENIZE, APPLY_TEMPLATE),
    *(IMAGES, IMAGE_EDITS, TRANSCRIPTIONS, TRANSLATIONS, SPEECH),
)
MAX_ERROR_BODY_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 8 * 1024 * 1024
MAX_EMBEDDING_BODY_BYTES = 256 * 1024 * 1024
MAX_RERANK_BODY_BYTES = 64 * 1024 * 1024
"""Reranking responses are large because some servers repeat the documents."""
MIN_REPORTED_BYTES = 2048
"""Minimum prompt size for progress reports. Shorter prompts fit one batch: two useless reports would cost 4 % more CPU
per request (measured)."""
IDLE_CONNECTION_SECONDS = 3.0
"""Idle time before a connection is closed: below llama-server's 5 s, so that the client closes first."""
PROVIDER_IDLE_CONNECTION_SECONDS = 15.0
"""Longer for providers, where a connection costs a handshake; known ones keep idle connections for over a minute."""
MAX_FLOAT32 = 3.4028234663852886e38
"""Largest 32-bit float: larger numbers would become infinite in the vectors of a message."""
JSON_TYPE = "application/json"
STREAM_TYPE = "text/event-stream"
_VERSION_PATH = "/v1"
_UNAUTHORIZED = 401


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server's address and request format."""

    base_url: str = field(repr=False)
    """Without a trailing slash; without /v1 unless the server is a provider."""
    socket_path: str = ""
    """Unix socket of the server; empty: it listens on the port in the base URL."""
    verify: VerifyPeer | None = field(default=None, repr=False)
    """Checks the other end of each new connection before a request is sent; None: it is trusted."""
    api_key: str = field(default="", repr=False)
    """Empty: no Authorization header is sent."""
    present_key: Callable[[], str] | None = field(default=None, repr=False)
    """Returns the current key if it may change; None: use `api_key`."""
    header_value: Callable[[str], str] | None = field(default=None, repr=False)
    """Returns the value of one of `CallInfo.provider_headers`; None: they are not sent."""
    model: str = ""
    """Model name on the server; empty: requests omit the model."""
    parameters: ParameterProfile
    """Supported extra parameters, and whether the model thinks by default."""
    is_llama_server: bool = False
    """Whether it supports llama.cpp's fields: `return_progress` reports each processed prompt batch, `id_slot` and
    `cache_prompt` isolate prefixes."""
    is_library_server: bool = False
    """Whether it is one of weft's server programs: these answer image, transcription and speech requests with events
    only, including progress, and accept more fields."""
    adapters: Mapping[str, Json] = field(default_factory=dict)
    """Additional request fields of a generation by adapter; the base model's key is empty. Empty: the model has no
    adapters."""
    is_provider: bool = False
    """Whether it is remote. Then the base URL includes the API version, requests carry no ids or traces, and none is
    sent twice because the first may have been served and billed."""


@dataclass(frozen=True, slots=True)
class FormBody:
    """An encoded form and its content type."""

    data: bytes
    content_type: str


ExplainBreak = Callable[[Reason], Awaitable[WeftError | None]]
"""Returns the error of a broken connection if the supervisor knows more ("the process was killed"); None: it does not.
Its argument is the reason so far."""
Open = Callable[[], Awaitable[Answer]]
"""Sends a request and returns its 200 response. Raises WeftError for any other outcome."""
Opening = Callable[[Open, CallInfo], Awaitable[Answer]]
"""Calls an Open, with retries if necessary."""


class OpenAiHttp:
    """Client of one server."""

    def __init__(
        self,
        endpoint: Endpoint,
        timeouts: TimeoutProfile,
        explain_break: ExplainBreak,
        opening: Opening | None = None,
    ) -> None:
        """`opening`: None to send each request once."""
        self._timeouts = timeouts
        self._explain_break = explain_break
        self.endpoint = endpoint
        self._opening = opening
        version = _VERSION_PATH if endpoint.is_provider else ""
        self._paths = {path: path.removeprefix(version) for path in _PATHS}
        self.chunks_received = 0
        """Number of received chunks: while it grows, the server is alive even if probes fail."""
        self._takes_stream_options = True
        """False: the server has refused them."""
        self._choices = Choices()
        self.request_count = 0
        self.in_flight = 0
        self.most_in_flight = 0
        """Peak of `in_flight` since its last reset."""
        self._http = EngineClient(
            endpoint.base_url,
            socket_path=endpoint.socket_path,
            headers=_HEADERS if endpoint.present_key is not None else _HEADERS | self._authorization(endpoint.api_key),
            connect_seconds=timeouts.connect_seconds,
            idle_seconds=PROVIDER_IDLE_CONNECTION_SECONDS if endpoint.is_provider else IDLE_CONNECTION_SECONDS,
            verify=endpoint.verify,
        )
        self._encoder = msgspec.json.Encoder()

    async def close(self) -> None:
        """Closes all connections, which cancels the requests running on the server."""
        self._http.close()

    async def status_of(self, path: str, timeout_seconds: float) -> int | None:
        """Returns the status of GET `path`; None: no response."""
        answer = await self.answer_of(path, timeout_seconds, max_bytes=0)
        return None if answer is None else answer[0]

    async def answer_of(
        self, path: str, timeout_seconds: float, *, max_bytes: int = MAX_ANSWER_BYTES
    ) -> tuple[int, bytes] | None:
        """Returns status and body of GET `path` as `get` does; None: no response."""
        try:
            return await self.get(path, timeout_seconds, max_bytes=max_bytes)
        except (HttpFaultError, TimeoutError):
            return None

    async def get(self, path: str, timeout_seconds: float, *, max_bytes: int = MAX_ANSWER_BYTES) -> tuple[int, bytes]:
        """Returns status and body of GET `path`. The body is empty if too long or incomplete.

        Raises HttpFaultError or TimeoutError if there is no response.
        """
        headers, status = self._present_authorization(), None
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await self._http.send("GET", self._paths.get(path, path), headers)
                try:
                    status = answer.status
                    return status, await read_bounded(answer.parts(), max_bytes) if max_bytes else b""
                finally:
                    answer.release()
        except (HttpFaultError, TimeoutError, WeftError):
            if status is None:
                raise
            return status, b""

    async def call_route(
        self, method: str, path: str, timeout_seconds: float, body: bytes = b"{}"
    ) -> tuple[int, bytes]:
        """Returns status and body of a request to a route outside the OpenAI API. The request may be sent twice.

        Raises CONNECT_FAILED or BACKEND_PROTOCOL_ERROR, and BACKEND_ERROR after the timeout.
        """
        data = b"" if method == "GET" else body
        # As in `_send`, a pooled connection may already be closed.
        for fresh in (False, True):
            try:
                async with asyncio.timeout(timeout_seconds):
                    answer = await self._http.send(method, path, {}, data, fresh=fresh)
                    try:
                        return answer.status, await read_bounded(answer.parts(), MAX_ANSWER_BYTES)
                    finally:
                        answer.release()
            except TimeoutError as error:
                message = f"the engine did not answer within {timeout_seconds:g} s"
                raise WeftError(Reason.BACKEND_ERROR, message) from error
            except HttpFaultError as fault:
                if fresh or isinstance(fault, ClosedClientError):
                    raise await self._unanswered(fault) from fault
        raise AssertionError("the second try returns or raises")

    def generate(
        self, payload: GenerationPayload, call: CallInfo, rendered: Json | None = None
    ) -> AsyncGenerator[Frame]:
        """See Backend.generate. `rendered`: request body of a completion that replaces the payload."""
        if isinstance(payload, chat_pb2.ChatPayload):
            names = engine_names(payload, is_strict=self.endpoint.parameters.engine.is_strict)
            if names:
                return _with_own_names(self._generate(with_names(payload, names), call, rendered), names)
        return self._generate(payload, call, rendered)

    def _generate(self, payload: GenerationPayload, call: CallInfo, rendered: Json | None) -> AsyncGenerator[Frame]:
        if rendered is None and self._choices.are_several(payload):
            return self._choices.frames(payload, lambda part: self._answered(part, call, None, may_lack_choices=True))
        return self._answered(payload, call, rendered)

    async def _answered(
        self, payload: GenerationPayload, call: CallInfo, rendered: Json | None, *, may_lack_choices: bool = False
    ) -> AsyncGenerator[Frame]:
        path, prepared = self._prepared(payload, call, rendered)
        if prepared.warnings:
            yield prepared.warnings
        reader = self._reader(payload, call, prepared, may_lack_choices=may_lack_choices)
        decoder = SseDecoder()
        reading, warnings = await self._accepted(path, prepared.body, call)
        async with reading as response:
            if warnings:
                yield warnings
            chunk = await self._first_chunk(response)
            while chunk:
                self.chunks_received += 1
                payloads = decoder.feed(chunk)
                frames = reader.read([*map(as_completion, payloads)] if path == INFILL else payloads)
                if reader.took_token:
                    call.on_token()
                elif reader.took_prefill:
                    call.on_prefill()
                for number, frame in enumerate(frames):
                    if number and has_content(frame):
                        # The first content gets its own frame even if more arrived with it.
                        call.on_token()
                    yield frame
                if reader.done:
                    break
                chunk = await response.read()
            if not reader.ended:
                yield reader.finish()
            await drain(response)

    async def _accepted(self, path: str, body: Json, call: CallInfo) -> tuple["_Reading", Frame]:
        """Returns the response to a generation, to enter now, with warnings about what the engine rejected.

        If the engine rejects a tool's schema, the request is sent again with simpler schemas; if it rejects the option
        for usage in streams, without it, as all later requests are.
        """
        warnings: Frame = []
        while True:
            if not self._takes_stream_options:
                body = {name: value for name, value in body.items() if name != STREAM_OPTIONS}
            try:
                return await self._post(path, body, call), warnings
            except WeftError as refused:
                if path == INFILL:
                    raise about_model(refused) from None
                if STREAM_OPTIONS in body and refuses_stream_options(refused):
                    self._takes_stream_options = False
                    continue
                if warnings or not refuses_tool_schemas(refused, body):
                    raise
                body, simplified = with_plain_schemas(body)
                if not simplified:
                    raise
                warnings = warning_frame(simplified)

    def _reader(
        self, payload: GenerationPayload, call: CallInfo, prepared: PreparedBody, *, may_lack_choices: bool
    ) -> StreamReader:
        return StreamReader(
            expected_choices(payload),
            choices_per_prompt(payload),
            whole=call.whole,
            joins_texts=call.joins_texts,
            asked_model=prepared.body.get("model", ""),
            used_ids=call_ids(payload),
            may_lack_choices=may_lack_choices,
        )

    def _authorization(self, api_key: str) -> dict[str, str]:
        """Returns the Authorization header; empty: there is no key."""
        return {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def _present_authorization(self) -> dict[str, str]:
        """Returns the header with the current key if it may change; empty: the client sends a fixed header."""
        present_key = self.endpoint.present_key
        return {} if present_key is None else self._authorization(present_key())

    def _newer_authorization(self, sent: Mapping[str, str]) -> dict[str, str]:
        """Returns the header with the current key; empty: the key is unchanged or unavailable."""
        try:
            present = self._present_authorization()
        except WeftError:
            return {}
        return {} if present == sent else present

    async def _first_chunk(self, response: Answer) -> bytes:
        """Returns the first bytes of a stream; a complete JSON answer is converted to a stream.

        Raises the error in a JSON answer, and BACKEND_PROTOCOL_ERROR for other content.
        """
        content_type = response.content_type
        if content_type == STREAM_TYPE:
            return await response.read()
        if content_type != JSON_TYPE:
            require_content_type(response, STREAM_TYPE)
        body = await read_bounded(response.parts(), MAX_EVENT_BYTES)
        if (stated := stated_answer(body)) is not None:
            raise stated
        if b'"choices"' not in body:
            require_content_type(response, STREAM_TYPE)
        return b"".join((b"data: ", *body.splitlines(), b"\n\ndata: ", DONE, b"\n\n"))

    def _prepared(self, payload: GenerationPayload, call: CallInfo, rendered: Json | None) -> tuple[str, PreparedBody]:
        if rendered is not None:
            path, prepared = COMPLETIONS, PreparedBody(rendered, [])
        elif isinstance(payload, chat_pb2.ChatPayload):
            path, prepared = CHAT, chat_body(payload, self.endpoint.model, self.endpoint.parameters)
        else:
            path = INFILL if payload.HasField("suffix") else COMPLETIONS
            prepared = completion_body(payload, self.endpoint.model, self.endpoint.parameters)
        body = prepared.body
        add_cache_use(body, call.cache, has_slots=self.endpoint.is_llama_server)
        if self.endpoint.adapters:
            body.update(self.endpoint.adapters[call.adapter])
        if self.endpoint.is_llama_server and payload.ByteSize() >= MIN_REPORTED_BYTES:
            body["return_progress"] = True
        return path, prepared

    async def embed(self, payload: embedding_pb2.EmbeddingPayload, call: CallInfo) -> EmbeddingResult:
        """See Backend.embed."""
        body = embedding_body(payload, self.endpoint.model)
        # The server chooses the slot of embeddings and ignores any in the request.
        add_cache_use(body, call.cache, has_slots=False)
        async with await self._post(EMBEDDINGS, body, call) as response:
            require_content_type(response, JSON_TYPE)
            raw = await read_bounded(response.parts(), MAX_EMBEDDING_BODY_BYTES)
        reply = read_json(raw, _EmbeddingReply, "the engine's embeddings are")
        vectors = _vectors(reply.data, len(payload.inputs))
        if payload.HasField("dimensions") and any(len(vector.values) != payload.dimensions for vector in vectors):
            # llama-server silently ignores the parameter.
            raise invalid_field("dimensions", "this runtime cannot return vectors of this length; omit it")
        usage = usage_pb2.Usage(prompt_tokens=figure(reply.usage, *_PROMPT_FIGURES))
        return EmbeddingResult(embeddings=vectors, usage=usage)

    async def rerank(self, payload: rerank_pb2.RerankPayload, call: CallInfo) -> RerankResult:
        """See Backend.rerank. llama.cpp and vLLM implement the route of Jina and Cohere."""
        body: Json = {"query": payload.query, "documents": list(payload.documents), **model_field(self.endpoint.model)}
        if payload.HasField("top_n"):
            body["top_n"] = payload.top_n
        add_cache_use(body, call.cache, has_slots=False)
        raw = await self.post(RERANK, body, call, MAX_RERANK_BODY_BYTES)
        if raw.lstrip().startswith(b"["):
            raw = b'{"results":%s}' % raw
        reply = read_json(raw, _RerankReply, "the engine's scores are")
        found = reply.results or reply.data or []
        if not found and (stated := stated_answer(raw)) is not None:
            raise stated
        usage = usage_pb2.Usage(prompt_tokens=figure(reply.usage, *_PROMPT_FIGURES))
        return RerankResult(scores=_best_first(found, payload), usage=usage)

    async def post(self, path: str, body: object, call: CallInfo, limit_bytes: int) -> bytes:
        """Returns the JSON response to POST `path` (a constant of this module). Raises as `generate` does."""
        async with await self._post(path, body, call) as response:
            require_content_type(response, JSON_TYPE)
            return await read_bounded(response.parts(), limit_bytes)

    async def post_for_events(
        self, path: str, body: object, call: CallInfo, limit_bytes: int
    ) -> AsyncGenerator[tuple[bool, bytes]]:
        """Yields the data of each server-sent event of the response to POST `path`, marked True.

        A JSON response from a server that does not stream is yielded once, marked False. Raises as `generate` does.
        """
        async with await self._post(path, body, call) as response:
            if response.content_type == JSON_TYPE:
                yield False, await read_bounded(response.parts(), limit_bytes)
                return
            require_content_type(response, STREAM_TYPE)
            decoder = SseDecoder(limit_bytes, limit_bytes)
            while chunk := await response.read():
                self.chunks_received += 1
                call.on_prefill()
                for data in decoder.feed(chunk):
                    yield True, data

    async def post_for_bytes(self, path: str, body: object, call: CallInfo) -> AsyncGenerator[tuple[str, bytes]]:
        """Yields the media type and each chunk of the response to POST `path`. Raises as `generate` does."""
        async with await self._post(path, body, call) as response:
            while chunk := await response.read():
                self.chunks_received += 1
                call.on_token()
                yield response.content_type, chunk

    async def _post(self, path: str, body: object, call: CallInfo) -> "_Reading":
        """Returns the 200 response to a POST, to enter now. Raises WeftError otherwise."""
        self.in_flight += 1
        self.request_count += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self._opening is None:
                response = await self._opened(path, body, call)
            else:
                response = await self._opening(partial(self._opened, path, body, call), call)
        except BaseException:
            self.in_flight -= 1
            raise
        reading = _Reading(self, response, self._cut_off)
        if content_encoding(response) is not None:
            async with reading:
                require_plain(response)
        return reading

    async def _cut_off(self, fault: HttpFaultError) -> WeftError:
        """Returns the error of a response that ends early."""
        if isinstance(fault, ClosedClientError):
            return await self._stopped()
        message = "the engine closed the connection before the answer was complete"
        return await self._broken(Reason.BACKEND_PROTOCOL_ERROR, message)

    async def _opened(self, path: str, body: object, call: CallInfo) -> Answer:
        sent_key = self._present_authorization()
        response = await self._send(path, body, call, sent_key)
        if response.status == _UNAUTHORIZED and (newer := self._newer_authorization(sent_key)):
            # The key was rotated. The server did not process the rejected request, so it is retried once.
            response.release()
            response = await self._send(path, body, call, newer)
        if response.status == 200:
            return response
        try:
            is_packed = content_encoding(response) is not None
            words = b"" if is_packed else await read_beginning(response, MAX_ERROR_BODY_BYTES)
            explain = provider_refusal if self.endpoint.is_provider else refusal
            raise explain(response.status, words, response.headers)
        except ClosedClientError as fault:
            raise await self._stopped() from fault
        except HttpFaultError as fault:
            message = f"the engine returned status {response.status} and closed the connection"
            raise await self._broken(Reason.BACKEND_PROTOCOL_ERROR, message) from fault
        finally:
            response.release()

    async def _send(self, path: str, body: object, call: CallInfo, authorization: Mapping[str, str]) -> Answer:
        headers = {} if self.endpoint.is_provider else {"X-Request-Id": call.request_id, TRACEPARENT: call.traceparent}
        if self.endpoint.header_value is not None:
            headers |= {name: self.endpoint.header_value(value) for name, value in call.provider_headers.items()}
        headers |= authorization
        if isinstance(body, FormBody):
            data, headers["Content-Type"] = body.data, body.content_type
        else:
            data = self._encoder.encode(body)
        # llama-server closes connections after each stream despite keep-alive, so a pooled connection may be closed:
        # retry once on a new connection. If the server is dead, the retry fails too.
        for fresh in (False,) if self.endpoint.is_provider else (False, True):
            try:
                posting = self._http.send("POST", self._paths[path], headers, data, fresh=fresh)
                if self._timeouts.headers_seconds is None:
                    return await posting
                async with asyncio.timeout(self._timeouts.headers_seconds):
                    return await posting
            except HttpFaultError as fault:
                if fresh or self.endpoint.is_provider or not isinstance(fault, UnansweredError):
                    raise await self._unanswered(fault) from fault
            except TimeoutError as error:
                limit = f"headers_timeout_seconds, {self._timeouts.headers_seconds:g} s"
                raise WeftError(Reason.HEADERS_TIMEOUT, f"the engine sent no response headers ({limit})") from error
        raise AssertionError("the second try returns or raises")

    async def _unanswered(self, fault: HttpFaultError) -> WeftError:
        """Returns the error of a request without a response. Only CONNECT_FAILED affects other requests too."""
        who = "provider" if self.endpoint.is_provider else "engine"
        match fault:
            case ClosedClientError():
                return await self._stopped()
            case UnconnectedError():
                return shortage(fault) or await self._broken(Reason.CONNECT_FAILED, self._why_unconnected(fault))
            case UnansweredError():
                # The server may have started to process the request.
                message = f"the {who} closed the connection without an answer"
                return await self._broken(Reason.BACKEND_PROTOCOL_ERROR, message)
            case _:
                return WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the {who} sent no HTTP answer: {head_fault(fault)}")

    def _why_unconnected(self, fault: UnconnectedError) -> str:
        if fault.why is Unconnected.TIMEOUT:
            who = "provider" if self.endpoint.is_provider else "engine"
            return (
                f"the {who} did not accept a connection (connect_timeout_seconds, {self._timeouts.connect_seconds:g} s)"
            )
        return (
            f"the provider cannot be reached: {unreached(fault)}"
            if self.endpoint.is_provider
            else "the engine did not accept a connection"
        )

    async def _stopped(self) -> WeftError:
        return await self._broken(Reason.WORKER_RESTARTED, "the engine was stopped while it processed the request")

    async def _broken(self, reason: Reason, message: str) -> WeftError:
        return await self._explain_break(reason) or WeftError(reason, message)


class _Reading:
    """A response for the duration of a block. Leaving it early closes the connection."""

    __slots__ = ("_cut_off", "_http", "_response")

    def __init__(
        self, http: OpenAiHttp, response: Answer, cut_off: Callable[[HttpFaultError], Awaitable[WeftError]]
    ) -> None:
        """`cut_off` returns the error for a fault in the block."""
        self._http, self._response, self._cut_off = http, response, cut_off

    async def __aenter__(self) -> Answer:
        return self._response

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, HttpFaultError):
                raise await self._cut_off(error) from error
        finally:
            self._http.in_flight -= 1
            self._response.release()


_PROMPT_FIGURES = ("prompt_tokens", "total_tokens")
"""Usage fields of calls without output; vLLM's scores have only the total, which equals the prompt's."""


class _EmbeddingItem(msgspec.Struct):
    embedding: list[float] | str
    """Some servers return base64 of 32-bit floats without being asked."""
    index: object = None

    @property
    def values(self) -> list[float]:
        """The vector. Raises ValueError if it cannot be decoded."""
        if isinstance(self.embedding, list):
            return self.embedding
        packed = base64.b64decode(self.embedding, validate=True)
        found = [number for (number,) in struct.iter_unpack("<f", packed)]
        return found if all(map(math.isfinite, found)) else []


class _EmbeddingReply(msgspec.Struct):
    data: list[_EmbeddingItem]
    usage: object = None


def _vectors(items: list[_EmbeddingItem], expected: int) -> list[embedding_pb2.Embedding]:
    """Returns one vector per input, in input order. Raises BACKEND_PROTOCOL_ERROR for anything else.

    If all indices are missing or 0, the vectors are already in input order.
    """
    indexes = [count_of(item.index) or 0 for item in items]
    if not any(indexes):
        indexes = list(range(len(items)))
    try:
        values = [item.values for item in items]
    except (ValueError, struct.error):
        values = [[]]
    fault = ""
    if len(items) != expected:
        fault = f"{len(items)} vectors for {expected} inputs"
    elif set(indexes) != set(range(expected)):
        fault = "vectors that do not match the inputs"
    elif not all(map(_is_vector, values)):
        fault = "a vector that is empty or holds a number beyond 32-bit floats"
    if fault:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the engine sent {fault}")
    placed = zip(indexes, values, strict=True)
    vectors = [embedding_pb2.Embedding(index=index, values=numbers) for index, numbers in placed]
    vectors.sort(key=lambda vector: vector.index)
    return vectors


def _is_vector(values: list[float]) -> bool:
    return bool(values) and max(values) <= MAX_FLOAT32 and min(values) >= -MAX_FLOAT32


class _Score(msgspec.Struct):
    index: object = None
    relevance_score: float | None = None
    score: float | None = None
    """SGLang's name for the score."""


class _RerankReply(msgspec.Struct):
    """A reranking response; SGLang sends only the list."""

    results: list[_Score] | None = None
    data: list[_Score] | None = None
    """Voyage's name for the results."""
    usage: object = None


def _best_first(found: list[_Score], payload: rerank_pb2.RerankPayload) -> list[rerank_pb2.RerankScore]:
    count = len(payload.documents)
    wanted = min(payload.top_n, count) if payload.HasField("top_n") else count
    scores: dict[int, float] = {}
    for entry in found:
        index = count_of(entry.index)
        if index is not None and index < count:
            known = (score for score in (entry.relevance_score, entry.score) if score is not None)
            scores[index] = next(known, math.nan)
    if len(scores) != len(found) or len(found) < wanted:
        message = f"the engine sent scores of {len(scores)} documents for {wanted} of {count}"
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, message)
    if not all(map(math.isfinite, scores.values())):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine returned an invalid score")
    best = sorted(scores, key=lambda index: (-scores[index], index))
    return [rerank_pb2.RerankScore(index=index, score=scores[index]) for index in best[:wanted]]


async def _with_own_names(generated: AsyncGenerator[Frame], names: Mapping[str, str]) -> AsyncGenerator[Frame]:
    """Yields frames with the original tool names; `names` maps them to the engine's names."""
    own_names = {name: own for own, name in names.items()}
    async with aclosing(generated) as frames:
        async for frame in frames:
            restore_names(frame, own_names)
            yield frame


_HEADERS = {
    "Content-Type": "application/json",
    # Compressed streams would arrive late. If a server compresses anyway, the body is decoded.
    "Accept-Encoding": "identity",
    "User-Agent": "weft",
}
