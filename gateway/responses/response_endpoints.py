"""The endpoints of the Responses API."""

from collections.abc import Mapping
from typing import Any

from gateway.deps import GatewayDeps
from gateway.http_api import HttpApi
from gateway.openapi import answers, json_body
from gateway.ports import GatewayPorts
from gateway.responses import conversations, schema
from gateway.responses.compaction_handlers import compact_conversation, count_input_tokens
from gateway.responses.response_handlers import (
    STREAM_PARAMETERS,
    cancel_response,
    create_response,
    delete_response,
    get_response,
    list_input_items,
    refuse_websocket,
    responses_of,
)
from gateway.responses.retrieval import Responses
from gateway.routing import ApiRouter
from weft.kernel.access.principal import EDIT_REQUESTS, USE_MODELS, VIEW_REQUESTS

_RESPONSE = "/v1/responses/{response_id}"
RESPONSES = ApiRouter("openai")
RESPONSES.add_post("/v1/responses", USE_MODELS, create_response, json_body(schema.ResponsesRequest))
RESPONSES.add_get("/v1/responses", USE_MODELS, refuse_websocket, in_schema=False, by_name=True)
RESPONSES.add_post("/v1/responses/compact", USE_MODELS, compact_conversation, json_body(schema.ResponsesRequest))
RESPONSES.add_post("/v1/responses/input_tokens", USE_MODELS, count_input_tokens, json_body(schema.ResponsesRequest))
RESPONSES.add_get(
    _RESPONSE,
    VIEW_REQUESTS,
    get_response,
    answers(schema.ResponseObject, query=STREAM_PARAMETERS, events=True),
)
RESPONSES.add_delete(_RESPONSE, EDIT_REQUESTS, delete_response, answers(schema.DeletedResponse))
RESPONSES.add_post(f"{_RESPONSE}/cancel", EDIT_REQUESTS, cancel_response, answers(schema.ResponseObject))
_LISTED = answers(schema.ResponseItemList, query=conversations.LIST_PARAMETERS)
RESPONSES.add_get(f"{_RESPONSE}/input_items", VIEW_REQUESTS, list_input_items, _LISTED)
_CONVERSATION = "/v1/conversations/{conversation_id}"
_ITEM = f"{_CONVERSATION}/items/{{item_id}}"
_SHOWN = answers(schema.ConversationObject)
RESPONSES.add_post("/v1/conversations", USE_MODELS, conversations.create, _SHOWN)
RESPONSES.add_get(_CONVERSATION, VIEW_REQUESTS, conversations.get, _SHOWN)
RESPONSES.add_post(_CONVERSATION, EDIT_REQUESTS, conversations.update, _SHOWN)
RESPONSES.add_delete(_CONVERSATION, EDIT_REQUESTS, conversations.delete, answers(schema.DeletedResponse))
RESPONSES.add_post(f"{_CONVERSATION}/items", USE_MODELS, conversations.create_items, answers(schema.ResponseItemList))
RESPONSES.add_get(f"{_CONVERSATION}/items", VIEW_REQUESTS, conversations.list_items, _LISTED)
RESPONSES.add_get(_ITEM, VIEW_REQUESTS, conversations.get_item, answers(schema.InputItem))
RESPONSES.add_delete(_ITEM, EDIT_REQUESTS, conversations.delete_item, _SHOWN)


def _given(deps: GatewayDeps, ports: GatewayPorts) -> Mapping[Any, object]:
    return {Responses: responses_of(deps, ports.responses, ports.tasks)}


API = HttpApi(router=RESPONSES, collaborators=_given)
