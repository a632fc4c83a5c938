"""POST /v1/embeddings."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.schemas.base import KeepAlive, StrictModel, TextsOrTokens, UserName


class EmbeddingRequest(StrictModel):
    """Vectors for one or more texts."""

    model: str
    """A model or a pool of the mesh."""
    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    """base64: little-endian float32. Absent: float."""
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None
    user: UserName | None = None
    allow_remote: bool | None = None
    """Extension: whether the request may leave the premises of the mesh."""
    keep_alive: KeepAlive | None = None
    """Extension: how long the model stays loaded afterwards: seconds, "5m", 0 (not at all), -1 (for ever)."""
