"""POST /tokenize and /v1/tokenize."""

from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.unary import unary_answer
from gateway.deps import Inference
from gateway.gateway_config import RequestLimits
from gateway.intake.body import body_of
from gateway.intake.request_model import HandledRequest, ModelName, StopAtFirstError
from gateway.openai import chat as chat_payload
from gateway.openai.chat_schema import ChatRequest, Message, TemplateArguments, ToolDefinition
from gateway.openai.extension_fields import unknown_fields
from weft.api.common.v1 import receipt_pb2, tokenize_pb2
from weft.dispatch.operation_table import TOKENIZE
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json


class TokenizeRequest(HandledRequest):
    """A request to tokenize exactly one of `content`, `prompt` and `messages`."""

    model: ModelName
    content: str | None = None
    """The text, as in llama.cpp's server."""
    prompt: str | None = None
    """The text, as in vLLM."""
    messages: Annotated[list[Message], Field(min_length=1), StopAtFirstError()] | None = None
    """A conversation as in /v1/chat/completions, rendered with the model's chat template."""
    tools: Annotated[list[ToolDefinition], StopAtFirstError()] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_special: bool | None = None
    """Whether the tokenizer's special tokens are added around a text. Absent: false for `content`, true for `prompt`,
    as in the two servers."""
    add_special_tokens: bool | None = None
    """Another name of `add_special`, as in vLLM."""
    with_pieces: bool | None = None
    """Whether `tokens` are objects with `id` and `piece`."""
    return_token_strs: bool | None = None
    """Whether `token_strs` has the text of each token."""
    add_generation_prompt: Literal[True] | None = None
    """Accepted and not used: conversations are always rendered with the beginning of the answer."""


async def tokenize(
    deps: Inference, request: Request, params: Annotated[TokenizeRequest, body_of(TokenizeRequest)]
) -> Response:
    """Tokenizes a text or a conversation with the tokenizer of the model. Returns the tokens and their count."""
    scope = request.scope
    context = deps.context(scope, surface="tokenize", params=params, model=params.model, operation=Operation.TOKENIZE)
    payload = to_payload(params, deps.config.limits)

    def to_body(result: tokenize_pb2.TokenizeResult, receipt: receipt_pb2.Receipt) -> bytes:
        return token_body(result, params, receipt.model or params.model)

    return unary_answer(deps, scope, TOKENIZE, context, payload, to_body, warnings=unknown_fields(params))


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
        raise invalid_field("tools", "are only allowed with 'messages'")
    choices = (word for word in (request.add_special, request.add_special_tokens) if word is not None)
    payload.add_special = next(choices, request.content is None)
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
    return encode_json(answer)


def _piece(piece: bytes) -> str | list[int]:
    """Returns a token's text; its bytes if it is part of a character, as in llama.cpp's server."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
