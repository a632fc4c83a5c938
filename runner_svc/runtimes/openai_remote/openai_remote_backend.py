"""Backend of the runtime openai_remote: a model of a provider with OpenAI's Chat Completions or Anthropic's Messages.

Admission has already allowed sending the request out: `runner_svc.servicers.inference.RequestAdmission.admit`.
"""

import asyncio
import itertools
from dataclasses import replace
from functools import partial

from typing_extensions import override
from yarl import URL

from runner_svc.anthropic_upstream.anthropic_request import messages_body
from runner_svc.anthropic_upstream.anthropic_stream import MessagesReader
from runner_svc.backend.port import CallInfo
from runner_svc.engine_http.answer import Answer
from runner_svc.openai_upstream.address import base_url, is_loopback
from runner_svc.openai_upstream.client import MESSAGES, Endpoint, Open, OpenAiHttp
from runner_svc.openai_upstream.errors import BUSY
from runner_svc.openai_upstream.openai_request import Json, PreparedBody, call_ids
from runner_svc.openai_upstream.openai_stream import StreamReader
from runner_svc.openai_upstream.server_probes import MODELS
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine, parameter_profile, served_operations
from runner_svc.runtimes.openai_remote.list_price import list_price
from runner_svc.runtimes.openai_remote.runtime import (
    MESSAGES_PARAMETERS,
    PARAMETERS,
    PROBE_FAILURES,
    PROBE_INTERVAL_SECONDS,
    OpenAiRemoteModel,
)
from runner_svc.runtimes.unmanaged_server import UnmanagedServer, read_key
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors.error_tree import UNSENT, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation

API_VERSION = "2023-06-01"


class AnthropicHttp(OpenAiHttp):
    """Client of a provider with Anthropic's API."""

    @override
    def _prepared(self, payload: GenerationPayload, call: CallInfo, rendered: Json | None) -> tuple[str, PreparedBody]:
        if not isinstance(payload, chat_pb2.ChatPayload):
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this model supports chat, but not text completions")
        return MESSAGES, messages_body(payload, self.endpoint.model, self.endpoint.parameters)

    @override
    def _reader(
        self, payload: GenerationPayload, call: CallInfo, prepared: PreparedBody, *, may_lack_choices: bool
    ) -> StreamReader:
        return MessagesReader(whole=call.whole, used_ids=call_ids(payload))

    @override
    def _authorization(self, api_key: str) -> dict[str, str]:
        headers = {"anthropic-version": API_VERSION}
        return headers | {"x-api-key": api_key} if api_key else headers


PROBE_TIMEOUT_SECONDS = 10.0
_HAS_NO_LIST = frozenset({404, 405, 501})


def operations_of(model: OpenAiRemoteModel, context: ModelContext) -> frozenset[Operation]:
    """Returns the operations that a provider offers according to its settings. Raises as `served_operations`."""
    default = frozenset({Operation.CHAT, Operation.EMBEDDING} if model.embeddings else {Operation.CHAT})
    operations = served_operations(model, default, context)
    if is_messages(model) and operations != {Operation.CHAT}:
        raise context.refuse("operations", "must be [chat]: a provider with Anthropic's API supports nothing else")
    return operations


def is_messages(model: OpenAiRemoteModel) -> bool:
    """Whether the provider has Anthropic's API."""
    return model.api_kind == "messages"


class OpenAiRemote(UnmanagedServer[OpenAiRemoteModel]):
    """Backend of a provider, which isolates its customers; all tenants of the mesh are one customer."""

    noun = "provider"
    is_provider = True

    def __init__(self, model: OpenAiRemoteModel, context: ModelContext) -> None:
        super().__init__(
            model,
            context,
            operations=operations_of(model, context),
            parameters=replace(
                parameter_profile(model, MESSAGES_PARAMETERS if is_messages(model) else PARAMETERS),
                token_limit_name=model.token_limit_name,
            ),
            max_retries=model.max_retries,
        )

    @override
    def _client(self, endpoint: Endpoint) -> OpenAiHttp:
        client = AnthropicHttp if is_messages(self.model) else OpenAiHttp
        return client(endpoint, self.context.timeouts, self._explain_break, self._open)

    @override
    async def responds(self, timeout_seconds: float) -> bool:
        """Whether the provider responds; without health checks, whether the backend was started."""
        http = self._http
        if http is None or self.model.health_check == "config_only":
            return http is not None
        return await http.status_of(MODELS, timeout_seconds) is not None

    @override
    async def _require_ready(self, http: OpenAiHttp) -> None:
        """Calls the provider only if its model list is the health check."""
        if self.model.health_check == "models":
            _require_presence(await http.status_of(MODELS, PROBE_TIMEOUT_SECONDS))

    @override
    async def _is_there(self, http: OpenAiHttp) -> bool:
        if self.model.health_check == "config_only":
            await asyncio.Event().wait()
        return _means_present(await http.status_of(MODELS, PROBE_TIMEOUT_SECONDS))

    @override
    async def _open(self, open_response: Open, call: CallInfo) -> Answer:
        """Returns a response that starts in time, after at most the configured number of retries."""
        loop = asyncio.get_running_loop()
        limit = self.model.timeout_seconds
        give_up_at = loop.time() + limit
        if call.answer_by is not None:
            give_up_at = min(give_up_at, call.answer_by)
        try:
            async with asyncio.timeout(limit):
                return await self._retry(open_response, give_up_at)
        except TimeoutError as error:
            message = f"the provider's answer did not begin in time (timeout_seconds, {limit:g} s)"
            raise WeftError(Reason.HEADERS_TIMEOUT, message) from error

    async def _retry(self, open_response: Open, give_up_at: float) -> Answer:
        for retries in itertools.count():
            try:
                return await self._open_unless_busy(open_response)
            except WeftError as error:
                if UNSENT in error.metadata and not retries:
                    raise
                await self._pause_or_raise(error, retries, give_up_at)
        raise AssertionError("the count has no end")

    async def _pause_or_raise(self, error: WeftError, retries: int, give_up_at: float) -> None:
        loop = asyncio.get_running_loop()
        pause = self._backoff.pause_before_retry(error.reason, retries, loop.time(), give_up_at)
        while pause:
            await asyncio.sleep(pause)
            # Another request may have been rejected meanwhile with a longer pause.
            pause = self._backoff.seconds_to_wait(loop.time())
            if loop.time() + pause >= give_up_at:
                pause = None
        if pause is None:
            raise error


def _means_present(status: int | None) -> bool:
    return status is not None and (status == 200 or status in _HAS_NO_LIST or status in BUSY)


def _require_presence(status: int | None) -> None:
    if status is None:
        raise WeftError(Reason.CONNECT_FAILED, "the provider does not answer")
    if status in (401, 403):
        raise WeftError(Reason.CONNECT_FAILED, f"the provider rejects the API key (status {status})")
    if not _means_present(status):
        raise WeftError(Reason.CONNECT_FAILED, f"the provider's list of models returned status {status}")


def _provider_url(model: OpenAiRemoteModel, context: ModelContext) -> str:
    url = URL(base_url(model.url, f"{context.where}.url"))
    if url.scheme != "https" and not is_loopback(url.host or ""):
        raise context.refuse("url", "must be https, because the key and all prompts are sent there")
    return str(url)


def build(model: OpenAiRemoteModel, context: ModelContext) -> ModelEngine:
    """Returns the engine of a model; see Runtime.build."""
    operations = operations_of(model, context)
    if model.remote is False:
        raise context.refuse("remote", "must be true or left out: a provider is remote")
    try:
        read_key(model.api_key_env, context.environment)
    except WeftError as error:
        context.lack("api_key_env", error.message)
    # The backend itself measures the time until a response starts; the first token may take as long again. The wait for
    # it is limited because a provider's prefill cannot be observed.
    timeouts = replace(
        context.timeouts,
        headers_seconds=None,
        first_token_seconds=context.timeouts.first_token_seconds or 2 * model.timeout_seconds,
    )
    provider = replace(model, url=_provider_url(model, context))
    # Providers have their own probe interval, regardless of the runner's other servers.
    context = replace(
        context, timeouts=timeouts, probe_interval_seconds=PROBE_INTERVAL_SECONDS, probe_failures=PROBE_FAILURES
    )
    return ModelEngine(
        make_backend=lambda: OpenAiRemote(provider, context),
        operations=operations,
        slots=model.slots,
        context_tokens=model.context_tokens or 0,
        remote=True,
        list_price=partial(list_price, provider.url, provider.upstream_name),
        timeouts=timeouts,
        requests_fail_alone=True,
    )
