"""The body of a request as an engine gets it: the model's name there, usage asked for, nothing of the mesh's own."""

from typing import Any

import msgspec
from pydantic_core import from_json

from gateway.intake.request_model import HandledRequest
from gateway.openai.extension_fields import EXTENSION_PREFIX

_OF_THE_MESH = frozenset(HandledRequest.model_fields) - {"user"}
_EVENTS = "include_weft_events"
_encode = msgspec.json.Encoder().encode


def engine_body(raw: bytes, model: str) -> bytes:
    """Returns a valid body for an engine that calls the model `model`."""
    given: dict[str, Any] = from_json(raw)
    fields = {
        name: value
        for name, value in given.items()
        if name not in _OF_THE_MESH and not name.startswith(EXTENSION_PREFIX)
    }
    fields["model"] = model
    if fields.get("stream"):
        options = dict(fields.get("stream_options") or {})
        options.pop(_EVENTS, None)
        # Without usage the proxy's log could not tell a complete answer from one that was cut off.
        fields["stream_options"] = options | {"include_usage": True}
    return _encode(fields)
