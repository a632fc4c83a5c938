"""POST /v1/embeddings."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.intake.request_model import HandledRequest, TextsOrTokens


class EmbeddingRequest(HandledRequest):
    """Vectors for one or more texts."""

    model: str
    """A model or a pool of the mesh, `route/` and the name of one, or `auto`."""
    input: TextsOrTokens
    encoding_format: Literal["float", "base64"] | None = None
    """base64: little-endian float32. Absent: float."""
    dimensions: Annotated[int, Field(ge=1, le=65_536)] | None = None
