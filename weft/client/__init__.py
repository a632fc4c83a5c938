"""A typed client of the mesh's gRPC API, synchronous and asynchronous.

from weft.client import connect

with connect() as mesh:
    for event in mesh.chat("smollm2-135m", "Why is the sky blue?", max_tokens=64):
        print(event.delta.text, end="")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.client._home import mesh_address
    from weft.client._media_messages import ImageOptions, SpeechOptions, TranscriptionOptions
    from weft.client._mesh import AsyncMesh, Mesh, connect, connect_async
    from weft.client._messages import ChatOptions, Message
    from weft.kernel.errors.error_tree import FieldError, WeftError
    from weft.kernel.errors.reasons import Reason

__all__ = [
    "AsyncMesh",
    "ChatOptions",
    "FieldError",
    "ImageOptions",
    "Mesh",
    "Message",
    "Reason",
    "SpeechOptions",
    "TranscriptionOptions",
    "WeftError",
    "connect",
    "connect_async",
    "mesh_address",
]

_PLACES = {
    "AsyncMesh": "weft.client._mesh",
    "ChatOptions": "weft.client._messages",
    "FieldError": "weft.kernel.errors.error_tree",
    "ImageOptions": "weft.client._media_messages",
    "Mesh": "weft.client._mesh",
    "Message": "weft.client._messages",
    "Reason": "weft.kernel.errors.reasons",
    "SpeechOptions": "weft.client._media_messages",
    "TranscriptionOptions": "weft.client._media_messages",
    "WeftError": "weft.kernel.errors.error_tree",
    "connect": "weft.client._mesh",
    "connect_async": "weft.client._mesh",
    "mesh_address": "weft.client._home",
}
"""The module of each name, imported on first use, so that commands without inference start faster."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_PLACES[name]), name)
    globals()[name] = found
    return found
