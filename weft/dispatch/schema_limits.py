"""Bounds of the JSON schemas that callers send; HTTP and gRPC share them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaLimits:
    """What the JSON schemas of one request may hold: those of its tools, and that of its answer's form.

    Engines make grammars of them, in time and memory that grow faster than the schema.
    """

    max_bytes: int = 64 * 1024
    """One schema as JSON."""
    max_total_bytes: int = 1024 * 1024
    """All of them together."""
    max_depth: int = 32
    """Schemas within schemas."""
    max_nodes: int = 2000
    """Schemas within one, itself counted."""
    max_enum: int = 1000
    """Values in all its enums together."""
    max_repeat: int = 100_000
    """What minItems, minLength and their like may say: a grammar is written out that often. An upper bound above it is
    left out."""
    max_branches: int = 1024
    """Ways that anyOf, oneOf and allOf can be combined to."""
    max_pattern_chars: int = 512
    max_patterns: int = 256
    """Patterns of all schemas together."""
