"""Items of a response's input, and the pieces of their content. `type` says which of the other fields hold them."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from gateway.intake.request_model import StopAtFirstError, StrictModel, by_shape, text_or_list
from gateway.openai.chat_schema import ImageUrl, InputAudio, ToolCallId

MAX_ID_CHARS = 128
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
MAX_CONTENT_PARTS = 4096

ImageSource = Annotated[
    Annotated[str, Tag("~text")] | Annotated[ImageUrl, Tag("~object")],
    by_shape("Input should be a URL, or an object with one"),
]
"""`input_image` has the URL itself, `image_url` an object around it."""


class InputPart(StrictModel):
    """A piece of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageSource | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: str | None = None
    input_audio: InputAudio | None = None


Parts = Annotated[list[InputPart], Field(max_length=MAX_CONTENT_PARTS), StopAtFirstError()]
ItemContent = Annotated[
    Annotated[str, Tag("~text")] | Annotated[Parts, Tag("~list")],
    text_or_list("Input should be a string or a list of content parts"),
]


class InputItem(StrictModel):
    """One item: a message, a function call, its output, reasoning, or a reference to an item that is kept.

    A list of content parts may stand for the items of one user message (see docs/responses.md).
    """

    type: str | None = None
    """Absent: a message."""
    id: ItemId | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: ItemContent | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    call_id: ToolCallId | None = None
    name: str | None = None
    arguments: str | None = None
    output: ItemContent | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    text: str | None = None
    image_url: ImageSource | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None

    @property
    def kind(self) -> str:
        """Its type, the usual one where it is absent."""
        return "message" if self.type is None else self.type


Items = Annotated[list[InputItem], StopAtFirstError()]
