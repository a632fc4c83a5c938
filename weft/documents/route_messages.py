"""Routes from the registry's words to documents, and back."""

import math
from typing import Any

from google.protobuf import duration_pb2

from weft.api.registry.v1 import route_pb2
from weft.documents.route_document import RouteDocument

_NANOSECONDS = 1e9


def route_manifest(document: RouteDocument) -> route_pb2.RouteManifest:
    """What a document declares."""
    return route_pb2.RouteManifest(
        name=document.name,
        description=document.description,
        candidates=document.candidates,
        budget=None if document.budget_seconds is None else _duration(document.budget_seconds),
        keep_alive=None if document.keep_alive is None else _duration(document.keep_alive),
        pin_primary=document.pin_primary,
    )


def route_fields(manifest: route_pb2.RouteManifest) -> dict[str, Any]:
    """The declared fields of a document."""
    return {
        "kind": "route",
        "name": manifest.name,
        "description": manifest.description,
        "candidates": tuple(manifest.candidates),
        "budget_seconds": _seconds(manifest.budget) if manifest.HasField("budget") else None,
        "keep_alive": _seconds(manifest.keep_alive) if manifest.HasField("keep_alive") else None,
        "pin_primary": manifest.pin_primary,
    }


def _seconds(length: duration_pb2.Duration) -> float:
    return length.ToNanoseconds() / _NANOSECONDS


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    nanoseconds = seconds * _NANOSECONDS
    # To the nearest, so that 8.3 is read back as 8.3; but less than a nanosecond must not become nothing.
    duration.FromNanoseconds(round(nanoseconds) or math.ceil(nanoseconds))
    return duration
