"""POST /v1/rerank, /tokenize, /v1/images/generations and /v1/audio/speech."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from gateway.intake.request_model import MAX_INT32, HandledRequest, StopAtFirstError, StrictModel
from gateway.openai.chat_schema import Message, TemplateArguments, ToolDefinition
from weft.dispatch.parameter_checks import (
    MAX_DOCUMENTS,
    MAX_IMAGE_PROMPT_CHARS,
    MAX_IMAGES,
    MAX_SPEECH_CHARS,
    MAX_SPEED,
    MAX_TRANSCRIPTION_PROMPT_CHARS,
    MAX_WORD_CHARS,
    MIN_SPEED,
)

ModelName = str
"""A model or a pool of the mesh, `route/` and the name of one, or `auto`."""
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]


class RerankDocument(StrictModel):
    """A document as an object, as some clients send it."""

    text: str = Field(min_length=1)


def _text_or_object(value: object) -> str | None:
    if isinstance(value, str):
        return "~text"
    return "~object" if isinstance(value, dict) else None


_TEXT_OR_OBJECT = Discriminator(
    _text_or_object, custom_error_type="wrong_shape", custom_error_message="Input should be a string or an object"
)


class RerankRequest(HandledRequest):
    """How well documents answer a query."""

    model: ModelName
    query: str = Field(min_length=1)
    documents: Annotated[
        list[
            Annotated[
                Annotated[str, Tag("~text"), Field(min_length=1)] | Annotated[RerankDocument, Tag("~object")],
                _TEXT_OR_OBJECT,
            ]
        ],
        Field(min_length=1, max_length=MAX_DOCUMENTS),
        StopAtFirstError(),
    ]
    top_n: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    """Only the best so many. Absent: all."""
    return_documents: bool | None = None
    """Whether the answer repeats each document. Absent: no."""


class TokenizeRequest(HandledRequest):
    """The tokens of a text or of a conversation; exactly one of `content`, `prompt` and `messages`."""

    model: ModelName
    content: str | None = None
    """A text, as llama.cpp's server calls it."""
    prompt: str | None = None
    """A text, as vLLM calls it."""
    messages: Annotated[list[Message], Field(min_length=1), StopAtFirstError()] | None = None
    """A conversation as in /v1/chat/completions: it is counted as the model's chat template renders it."""
    tools: Annotated[list[ToolDefinition], StopAtFirstError()] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None
    add_special: bool | None = None
    """Whether the tokens around a text are added that the tokenizer has for it. Absent: not to `content`, and to
    `prompt`, as the two servers do."""
    add_special_tokens: bool | None = None
    """The same, as vLLM calls it."""
    with_pieces: bool | None = None
    """Whether `tokens` are objects with `id` and `piece`."""
    return_token_strs: bool | None = None
    """Whether `token_strs` has the text of each token."""
    add_generation_prompt: Literal[True] | None = None
    """Conversations are counted with the beginning of the answer: that is what the model reads."""


class ImageRequest(HandledRequest):
    """Images from words."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", frozen=True)

    model: ModelName
    prompt: str = Field(min_length=1, max_length=MAX_IMAGE_PROMPT_CHARS)
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = None
    size: Word | None = None
    quality: Word | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    """Images come in the answer; `url` is refused."""
    stream: bool | None = None
    """Images come when they are done; true is refused."""


class SpeechRequest(HandledRequest):
    """Spoken words."""

    model: ModelName
    input: str = Field(min_length=1, max_length=MAX_SPEECH_CHARS)
    voice: Word
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED)] | None = None
    instructions: Annotated[str, Field(max_length=MAX_SPEECH_CHARS)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    """Bytes come as they are made; `sse` is refused."""


class TranscriptionRequest(HandledRequest):
    """The words of a recording. The fields of a form; the recording is its `file`."""

    model: ModelName
    language: Word | None = None
    prompt: Annotated[str, Field(max_length=MAX_TRANSCRIPTION_PROMPT_CHARS)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    """The words come when all are there; true is refused."""
