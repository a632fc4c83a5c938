"""Plain Python values to request messages."""

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.kernel.errors import invalid_field

RoleName = Literal["system", "developer", "user", "assistant", "tool"]


class Message(TypedDict):
    """One turn of a conversation."""

    role: RoleName
    content: str


class ChatOptions(TypedDict, total=False):
    """Sampling options; what is left out is the backend's own default. Ranges: common/v1/sampling.proto."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: Sequence[str]


def chat_request(model: str, messages: str | Iterable[Message], options: ChatOptions) -> pb.ChatRequest:
    """A chat; a plain string is one user message."""
    turns: Iterable[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    request = pb.ChatRequest(model=model)
    for turn in turns:
        role = chat_pb2.Role.Value(f"ROLE_{turn['role'].upper()}")
        request.payload.messages.add(role=role, content=[chat_pb2.ContentPart(text=turn["content"])])
    for name, value in options.items():
        if name == "stop":
            request.payload.sampling.stop.extend(options["stop"])
            continue
        try:
            setattr(request.payload.sampling, name, value)
        except (TypeError, ValueError) as error:
            raise invalid_field(name, "is not a number, or out of range") from error
    return request


def embed_request(model: str, texts: Sequence[str]) -> pb.EmbedRequest:
    """One input per text."""
    inputs = [completion_pb2.PromptInput(text=text) for text in texts]
    return pb.EmbedRequest(model=model, payload=embedding_pb2.EmbeddingPayload(inputs=inputs))
