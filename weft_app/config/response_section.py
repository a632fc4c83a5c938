"""The section of the configuration file about answers that callers may come back to."""

from typing import Annotated

from pydantic import Field

from weft_app.config.config_section import Seconds, Section

_MEBIBYTE = 1024 * 1024


class ResponsesSection(Section):
    """Answers that are kept for callers who come back: `/v1/responses` with `store`."""

    keep_seconds: Seconds = 30 * 86_400.0
    """How long an answer is kept."""
    max_bytes: Annotated[int, Field(ge=1024, le=32 * _MEBIBYTE)] = 16 * _MEBIBYTE
    """Of one answer with its input."""
    max_chain_bytes: Annotated[int, Field(ge=1024, le=56 * _MEBIBYTE)] = 48 * _MEBIBYTE
    """Of one conversation."""
    max_per_tenant: Annotated[int, Field(ge=1, le=100_000_000)] = 100_000
    """Answers that one tenant may keep."""
    max_tenant_bytes: Annotated[int, Field(ge=1024, le=1024**5)] = 4 * 1024 * _MEBIBYTE
    """Of all answers that one tenant keeps."""
    max_total_bytes: Annotated[int, Field(ge=1024, le=1024**5)] = 16 * 1024 * _MEBIBYTE
    """Of all answers of all tenants."""
    sweep_interval_seconds: Seconds = 300.0
    """How often those that are over are forgotten."""
