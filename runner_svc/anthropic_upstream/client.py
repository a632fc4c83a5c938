"""The HTTP client of a provider with Anthropic's Messages API."""

from typing_extensions import override

from runner_svc.anthropic_upstream.request import messages_body
from runner_svc.anthropic_upstream.stream import MessagesReader
from runner_svc.backend.port import CallInfo
from runner_svc.openai_upstream.client import MESSAGES, OpenAiHttp
from runner_svc.openai_upstream.request import PreparedBody, call_ids
from runner_svc.openai_upstream.stream import StreamReader
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

API_VERSION = "2023-06-01"
"""The version of the API, which every request names."""


class AnthropicHttp(OpenAiHttp):
    """One provider with Anthropic's API behind one aiohttp session."""

    @override
    def _prepared(self, payload: GenerationPayload, call: CallInfo) -> tuple[str, PreparedBody]:
        if not isinstance(payload, chat_pb2.ChatPayload):
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this model takes chats, and no text completions")
        return MESSAGES, messages_body(payload, self.endpoint.model, self.endpoint.parameters)

    @override
    def _reader(self, payload: GenerationPayload, call: CallInfo, prepared: PreparedBody) -> StreamReader:
        return MessagesReader(whole=call.whole, used_ids=call_ids(payload))

    @override
    def _authorization(self, api_key: str) -> dict[str, str]:
        headers = {"anthropic-version": API_VERSION}
        return headers | {"x-api-key": api_key} if api_key else headers
