"""A typed client of the mesh's gRPC API, synchronous and asynchronous.

from weft.client import connect

with connect() as mesh:
    for event in mesh.chat("smollm2-135m", "Why is the sky blue?", max_tokens=64):
        print(event.delta.text, end="")
"""

from weft.client._channel import AsyncMesh, Mesh, connect, connect_async, mesh_address
from weft.client._messages import ChatOptions, Message
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason

__all__ = [
    "AsyncMesh",
    "ChatOptions",
    "FieldError",
    "Mesh",
    "Message",
    "Reason",
    "WeftError",
    "connect",
    "connect_async",
    "mesh_address",
]
