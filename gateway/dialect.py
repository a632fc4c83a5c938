"""Whose words an answer speaks: a request's path and head say it, before anything can go wrong with it."""

from collections.abc import Mapping
from enum import Enum

_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"
_VERSION = b"anthropic-version"


class Dialect(Enum):
    """A family of clients: how they want errors, and which header holds the id of a request."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


def dialect_of(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """The words for a path; of one that both families know, the header `anthropic-version` decides."""
    if is_under(path, _MESSAGES) or (is_under(path, _MODELS) and _VERSION in headers):
        return Dialect.ANTHROPIC
    return Dialect.OPENAI


def is_under(path: str, root: str) -> bool:
    """Whether a path is `root` or below it."""
    return path.startswith(root) and path[len(root) : len(root) + 1] in {"", "/"}
