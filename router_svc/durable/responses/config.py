"""Every bound of kept responses."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from weft.kernel.settings import PUBLIC, Seconds

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseLimits:
    """Kept responses: `/v1/responses` with `store`."""

    keep_seconds: Annotated[Seconds, PUBLIC] = 30 * 86_400.0
    """How long a response is kept."""
    max_bytes: Annotated[int, Ge(1024), Le(32 * MEBIBYTE)] = 16 * MEBIBYTE
    """Size of one response with its input."""
    max_chain_bytes: Annotated[int, Ge(1024), Le(56 * MEBIBYTE)] = 48 * MEBIBYTE
    """Size of one conversation; it travels in one message between services."""
    max_per_tenant: Annotated[int, Ge(1), Le(100_000_000)] = 100_000
    """Responses of one tenant."""
    max_tenant_bytes: Annotated[int, Ge(1024), Le(1024**5)] = 4 * 1024 * MEBIBYTE
    """Size of all responses of one tenant."""
    max_total_bytes: Annotated[int, Ge(1024), Le(1024**5), PUBLIC] = 16 * 1024 * MEBIBYTE
    """Size of all responses of all tenants."""
    sweep_interval_seconds: Seconds = 300.0
    """How often expired responses are deleted, and the sizes per tenant are counted again."""
