"""What is answered of responses that are kept; for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel


class ResponseObject(BaseModel):
    """A response; docs/responses.md says what else it holds."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    model: str
    output: list[dict[str, Any]]
    store: bool


class DeletedResponse(BaseModel):
    """A response that is forgotten."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseItemList(BaseModel):
    """A page of input items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
