"""Responses as tasks: the answer is that of a task, without background and storage of the Responses API."""

from gateway.answers.server_tools import require_no_failing_tool
from gateway.gateway_config import RequestLimits
from gateway.media import RequestMedia
from gateway.responses.payload import Conversation, own_items, to_response_request
from gateway.responses.replay import task_document
from gateway.responses.response_stream import ResponsesAnswer
from gateway.responses.schema import ResponsesRequest
from gateway.tasks.task_apis import StoredRequest, TaskApi, built
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.request_values import Operation
from weft.kernel.time.timestamps import optional_datetime


def _response_payload(params: ResponsesRequest, limits: RequestLimits, media: RequestMedia) -> chat_pb2.ChatPayload:
    if params.background:
        raise invalid_field("background", "must be false: a task always runs in the background")
    if params.store:
        raise invalid_field("store", "must be false: the response is stored with its task")
    for name in ("previous_response_id", "conversation"):
        if getattr(params, name) is not None:
            raise invalid_field(name, "is not supported; send the whole input")
    made = to_response_request(params, Conversation(own_items(params)), media, limits)
    require_no_failing_tool(made.failing)
    return made.payload


def _response_answer(stored: StoredRequest[ResponsesRequest]) -> bytes:
    deps, params, task = stored.deps, stored.params, stored.task
    document = task_document(params, task, deps.clock, is_stored=False, envelope=deps.config.response_envelope)
    document.ended_at = optional_datetime(task, "end_time")
    made = to_response_request(params, Conversation(own_items(params)), deps.request_media(params), deps.config.limits)
    return built(ResponsesAnswer(document), stored.outputs, made.warnings)


RESPONSES = TaskApi(
    operation=Operation.CHAT, schema=ResponsesRequest, to_payload=_response_payload, to_answer=_response_answer
)
