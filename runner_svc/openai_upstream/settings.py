"""The settings of a model that an OpenAI-compatible server serves, which weft does not start."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import MaxLen

from weft.kernel.settings import PUBLIC, SECRET

ServedOperation = Literal["chat", "completion", "embedding", "rerank", "tokenize", "image", "transcription", "speech"]


# Without slots: it is mixed into settings that have them.
@dataclass(frozen=True, kw_only=True)
class UpstreamSettings:
    """How a server is reached and what it offers. The mesh learns neither its address nor its key."""

    url: Annotated[str, MaxLen(2048), PUBLIC, SECRET] = field(repr=False)
    """Base URL of the server."""
    api_key_env: Annotated[str, MaxLen(128), PUBLIC] | None = None
    """Environment variable that holds the key."""
    upstream_model: Annotated[str, MaxLen(512), PUBLIC] | None = None
    """The server's own name of the model. Default: `name`."""
    embeddings: bool | None = None
    """Whether it also gives embeddings."""
    operations: Annotated[tuple[ServedOperation, ...], MaxLen(8), PUBLIC] = ()
    """What the server offers, such as `[chat, tokenize]`."""
