"""The sections of the configuration file about what the HTTP edge accepts."""

from typing import Annotated

from pydantic import Field

from weft_app.config.config_section import Seconds, Section

Count = Annotated[int, Field(ge=1, le=10_000_000)]
Bytes = Annotated[int, Field(ge=1024, le=1_073_741_824)]


class SchemasSection(Section):
    """The JSON schemas of one request: of its tools, and of its answer's form. More is 400 and names the place."""

    max_bytes: Bytes = 64 * 1024
    """One schema as JSON."""
    max_total_bytes: Bytes = 1024 * 1024
    """All of them together."""
    max_depth: Annotated[int, Field(ge=1, le=128)] = 32
    """Schemas within schemas."""
    max_nodes: Count = 2000
    """Schemas within one, itself counted."""
    max_enum: Count = 1000
    """Values in all its enums together."""
    max_repeat: Count = 100_000
    """What `minItems`, `minLength` and their like may say. Upper bounds above it (`maxLength`) are left out."""
    max_branches: Count = 1024
    """Ways that `anyOf`, `oneOf` and `allOf` can be combined to."""
    max_pattern_chars: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Length of a pattern."""
    max_patterns: Annotated[int, Field(ge=1, le=10_000)] = 256
    """Patterns of all schemas together."""


class LimitsSection(Section):
    """What one request may hold. Every caller may ask for less; see docs/limits.md for what more is answered with."""

    max_json_depth: Annotated[int, Field(ge=1, le=128)] = 64
    """Nesting of arrays and objects in a body."""
    max_json_members: Count = 200_000
    """Names in all objects of a body together."""
    max_messages: Count = 10_000
    """Messages of one conversation."""
    max_stop: Count = 16
    """Stop strings."""
    max_stop_chars: Annotated[int, Field(ge=1, le=1024)] = 1024
    """Length of one stop string."""
    max_choices: Annotated[int, Field(ge=1, le=128)] = 8
    """Answers per prompt (`n`)."""
    max_choice_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1024 * 1024
    """`n` times `max_tokens`, where `n` is above 1."""
    max_top_logprobs: Annotated[int, Field(ge=0, le=20)] = 20
    """Alternatives per token."""
    max_logit_bias: Annotated[int, Field(ge=0, le=300)] = 300
    """Tokens in `logit_bias`."""
    max_metadata: Annotated[int, Field(ge=0, le=16)] = 16
    """Entries of `metadata`."""
    max_user_chars: Annotated[int, Field(ge=0, le=512)] = 512
    """Length of `user`."""
    max_prompts: Count = 128
    """Prompts of one text completion."""
    max_embedding_inputs: Count = 2048
    """Texts of one request for embeddings."""
    max_tools: Count = 1024
    """Tools that a request brings."""
    max_audio_bytes: Bytes = 25 * 1024 * 1024
    """Body of an upload of audio."""
    max_image_bytes: Bytes = 64 * 1024 * 1024
    """Body of an upload of images to edit."""
    max_parts: Annotated[int, Field(ge=1, le=1000)] = 20
    """Parts of a multipart body."""
    max_boundary_chars: Annotated[int, Field(ge=1, le=70)] = 70
    """Length of a multipart body's boundary."""
    max_part_header_bytes: Annotated[int, Field(ge=256, le=65_536)] = 8 * 1024
    """Headers of one part together."""
    schemas: SchemasSection = SchemasSection()
    """JSON schemas."""


class ConnectionsSection(Section):
    """What one connection may do before its request is accepted."""

    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 2048
    """Open connections. Never more than half of the files that the process may have open."""
    max_connections_per_address: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Open connections from one address, or one /64 network of IPv6. Loopback is not counted: a proxy on this machine
    speaks for everybody."""
    max_header_bytes: Annotated[int, Field(ge=1024, le=1_048_576)] = 32 * 1024
    """Request line and headers together."""
    max_header_count: Annotated[int, Field(ge=10, le=10_000)] = 100
    """Headers."""
    max_body_pieces: Annotated[int, Field(ge=100, le=1_000_000)] = 20_000
    """Chunks or segments that one body may arrive in."""
    header_timeout_seconds: Seconds = 10.0
    """From the first byte, or the connect, to the end of the headers."""
    body_grace_seconds: Seconds = 10.0
    """How long a body may arrive as slowly as it likes ..."""
    min_body_bytes_per_second: Annotated[int, Field(ge=1, le=1_073_741_824)] = 1024
    """... and how much every second more must bring."""
    linger_seconds: Seconds = 5.0
    """How long a body is read and dropped after its request was answered."""
    idle_seconds: Annotated[int, Field(ge=1, le=86_400)] = 75
    """How long a connection is kept between two requests."""
