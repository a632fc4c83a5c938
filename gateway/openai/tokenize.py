"""POST /tokenize and /v1/tokenize."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import unary_answer
from gateway.config import RequestLimits
from gateway.deps import InferenceDeps
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.openai import chat as chat_payload
from gateway.openai.chat_schema import ChatRequest
from gateway.openai.model_call_schemas import TokenizeRequest
from weft.api.common.v1 import receipt_pb2, tokenize_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.request import Operation


async def tokenize(deps: InferenceDeps, request: Request) -> Response:
    """Count the tokens of a text or of a conversation, as the model that would answer reads them."""
    scope = request.scope
    raw = await read_json_body(scope, request.receive, deps.config)
    params = parse(TokenizeRequest, raw, max_depth=deps.config.limits.max_json_depth)
    context = deps.context(scope, surface="tokenize", params=params, model=params.model, operation=Operation.TOKENIZE)
    payload = to_payload(params, deps.config.limits)

    def to_body(result: tokenize_pb2.TokenizeResult, receipt: receipt_pb2.Receipt) -> bytes:
        return token_body(result, params, receipt.model or params.model)

    return unary_answer(deps, scope, context, lambda: deps.dispatcher.tokenize(context, payload), to_body)


_encode = msgspec.json.Encoder().encode
_KINDS = ("content", "prompt", "messages")


def to_payload(request: TokenizeRequest, limits: RequestLimits) -> tokenize_pb2.TokenizePayload:
    """Returns the tokenize payload. Raises INVALID_ARGUMENT naming the wrong field."""
    given = [name for name in _KINDS if getattr(request, name) is not None]
    if len(given) != 1:
        raise invalid_field(given[1] if given else "content", f"exactly one of {', '.join(_KINDS)} must be set")
    payload = tokenize_pb2.TokenizePayload(with_pieces=bool(request.with_pieces or request.return_token_strs))
    if request.messages is not None:
        params = ChatRequest(
            model=request.model,
            messages=request.messages,
            tools=request.tools,
            enable_thinking=request.enable_thinking,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        payload.chat.CopyFrom(chat_payload.to_payload(params, limits))
        return payload
    if request.tools:
        raise invalid_field("tools", "go with messages")
    said = (word for word in (request.add_special, request.add_special_tokens) if word is not None)
    payload.add_special = next(said, request.content is None)
    payload.text = request.prompt or "" if request.content is None else request.content
    return payload


def token_body(result: tokenize_pb2.TokenizeResult, request: TokenizeRequest, model: str) -> bytes:
    """Returns the answer as JSON."""
    ids: list[int] = list(result.ids)
    pieces = [_piece(piece) for piece in result.pieces]
    has_pieces = len(pieces) == len(ids)
    answer: dict[str, object] = {
        "model": model,
        "count": result.count,
        "max_model_len": result.max_context_tokens or None,
        "tokens": ids,
    }
    if request.with_pieces and has_pieces:
        answer["tokens"] = [{"id": number, "piece": piece} for number, piece in zip(ids, pieces, strict=True)]
    if request.return_token_strs and has_pieces:
        answer["token_strs"] = [
            piece if isinstance(piece, str) else bytes(piece).decode(errors="replace") for piece in pieces
        ]
    return _encode(answer)


def _piece(piece: bytes) -> str | list[int]:
    """Returns a token's text; its bytes where it is part of a character, as llama.cpp's server does."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
