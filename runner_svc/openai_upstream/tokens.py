"""Token counts from llama.cpp's `/tokenize` and `/apply-template`, and vLLM's `/tokenize`.

llama.cpp accepts `content` and returns only `tokens`; vLLM accepts `prompt` or `messages` and adds `count` and
`max_model_len`. Neither needs a slot.
"""

from typing import Any

import msgspec

from runner_svc.backend.port import CallInfo
from runner_svc.openai_upstream.client import APPLY_TEMPLATE, TOKENIZE, OpenAiHttp
from runner_svc.openai_upstream.dialects import read_json
from runner_svc.openai_upstream.openai_request import chat_body, model_field
from runner_svc.policy.parameters import TEMPLATE_ARGUMENTS
from weft.api.common.v1 import chat_pb2, tokenize_pb2
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

MAX_TOKENS_BODY_BYTES = 256 * 1024 * 1024
"""Maximum response size: a request has a few million tokens at most, and a token with its text takes 40 bytes."""
_TEMPLATE_FIELDS = ("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort")
_TOKENS = "the engine's tokens are"
_MAX_INT32 = 2**31 - 1


class _Piece(msgspec.Struct):
    id: int
    piece: str | list[int] = ""


class _Reply(msgspec.Struct):
    tokens: list[int | _Piece] | None = None
    count: int | None = None
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class _Template(msgspec.Struct):
    prompt: str


async def tokenize(
    http: OpenAiHttp, payload: tokenize_pb2.TokenizePayload, call: CallInfo
) -> tokenize_pb2.TokenizeResult:
    """See Backend.tokenize. Raises INVALID_ARGUMENT naming the first part that is not text."""
    if payload.WhichOneof("kind") == "text":
        return await _text(http, payload.text, call, add_special=payload.add_special, with_pieces=payload.with_pieces)
    require_text_only(payload.chat)
    body = _template_body(http, payload.chat)
    if not http.endpoint.is_llama_server:
        request = {**body, "add_generation_prompt": True, "return_token_strs": payload.with_pieces}
        reply = await _post_tokenize(http, request, call)
        if reply.count is not None:
            return _result(reply, with_pieces=payload.with_pieces)
        # A response without a count is from llama.cpp, which ignores `messages`.
    rendered = read_json(await http.post(APPLY_TEMPLATE, body, call, MAX_TOKENS_BODY_BYTES), _Template, _TOKENS)
    # The server tokenizes rendered templates in the same way.
    return await _text(http, rendered.prompt, call, add_special=True, with_pieces=payload.with_pieces)


def require_text_only(chat: chat_pb2.ChatPayload) -> None:
    """Raises INVALID_ARGUMENT naming the first part that is not text: its tokens are known only after processing."""
    for index, message in enumerate(chat.messages):
        for position, part in enumerate(message.content):
            if part.WhichOneof("kind") != "text":
                message_field = f"messages[{index}].content[{position}]"
                raise invalid_field(message_field, "only text can be counted by this runtime")


async def _text(
    http: OpenAiHttp, text: str, call: CallInfo, *, add_special: bool, with_pieces: bool
) -> tokenize_pb2.TokenizeResult:
    body: dict[str, Any] = {
        "content": text,
        "add_special": add_special,
        # As in prompts, special tokens in the text are parsed as such.
        "parse_special": True,
        "with_pieces": with_pieces,
    }
    if not http.endpoint.is_llama_server:
        body |= {"prompt": text, "add_special_tokens": add_special, "return_token_strs": with_pieces}
        body |= model_field(http.endpoint.model)
    return _result(await _post_tokenize(http, body, call), with_pieces=with_pieces)


def _template_body(http: OpenAiHttp, chat: chat_pb2.ChatPayload) -> dict[str, Any]:
    """Returns the fields of a chat request that the chat template uses."""
    body = chat_body(chat, http.endpoint.model, http.endpoint.parameters).body
    return {name: body[name] for name in (*_TEMPLATE_FIELDS, TEMPLATE_ARGUMENTS) if name in body}


async def _post_tokenize(http: OpenAiHttp, body: dict[str, Any], call: CallInfo) -> _Reply:
    return read_json(await http.post(TOKENIZE, body, call, MAX_TOKENS_BODY_BYTES), _Reply, _TOKENS)


def _result(reply: _Reply, *, with_pieces: bool) -> tokenize_pb2.TokenizeResult:
    if reply.tokens is None:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine's answer has no tokens")
    pieces: list[bytes] = []
    ids: list[int] = []
    for token in reply.tokens:
        ids.append(token.id if isinstance(token, _Piece) else token)
        if isinstance(token, _Piece) and with_pieces:
            pieces.append(_bytes(token.piece))
    if with_pieces and not pieces and reply.token_strs is not None and len(reply.token_strs) == len(ids):
        pieces = [word.encode() for word in reply.token_strs]
    if reply.count is not None and reply.count != len(ids):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the engine counted {reply.count} tokens and sent {len(ids)}")
    if not all(0 <= token <= _MAX_INT32 for token in ids):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine sent an invalid token")
    return tokenize_pb2.TokenizeResult(
        count=len(ids),
        ids=ids,
        pieces=pieces,
        max_context_tokens=max(0, min(reply.max_model_len or 0, 2**63 - 1)),
    )


def _bytes(piece: str | list[int]) -> bytes:
    """Returns the bytes of a token; llama.cpp sends a list of bytes if they are not valid text."""
    if isinstance(piece, str):
        return piece.encode()
    try:
        return bytes(piece)
    except ValueError:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine sent an invalid piece of a token") from None
