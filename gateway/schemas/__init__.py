"""The JSON a caller may send, as strict models: no conversion between types, a bound on every number.

Unknown fields are accepted and ignored, unknown values are not. Limits that a deployment can move are in
`gateway.config.RequestLimits` and checked by `gateway.translate`.
"""

from gateway.schemas.base import StrictModel
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completion import CompletionRequest
from gateway.schemas.embedding import EmbeddingRequest

__all__ = ["ChatRequest", "CompletionRequest", "EmbeddingRequest", "StrictModel"]
