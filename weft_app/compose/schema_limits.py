"""Bounds of callers' JSON schemas: one section of the file, for the HTTP edge and the router's gRPC alike."""

from weft.dispatch.schema_guard import SchemaLimits
from weft_app.config.gateway_sections import SchemasSection


def schema_limits(section: SchemasSection) -> SchemaLimits:
    """The bounds as the edge and the router take them."""
    return SchemaLimits(**section.model_dump())
