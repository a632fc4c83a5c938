"""The policy of kept results: how many finished tasks are released, oldest first, so that the rest stays in its bounds.

A task that has not ended is never released.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum


class ReleaseBound(Enum):
    """Why finished tasks are released before their time."""

    COUNT = "count"
    """Their tenant has as many as it may."""
    TENANT_BYTES = "tenant_bytes"
    """Those of their tenant are as long as they may be."""
    BYTES = "bytes"
    """Those of all tenants are as long as they may be (`router.tasks.max_kept_bytes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTasks:
    """Finished tasks of one tenant."""

    count: int
    size: int
    """Bytes of their requests and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBounds:
    """What may be kept."""

    max_per_tenant: int
    max_tenant_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The oldest finished tasks are to be released until so many, or so many bytes, are gone."""

    bound: ReleaseBound
    tenant: str
    """Empty: of any tenant."""
    count: int = 0
    size: int = 0


def releases(kept: Mapping[str, KeptTasks], bounds: KeepBounds) -> Iterator[Release]:
    """Yields what has to be released, by tenant; what one release frees is not counted for the next.

    The last one, of all tenants, is about what is left if each earlier one frees what it is to.
    """
    left = 0
    for tenant, own in sorted(kept.items()):
        over = own.count - bounds.max_per_tenant
        if over > 0:
            yield Release(bound=ReleaseBound.COUNT, tenant=tenant, count=over)
        if own.size > bounds.max_tenant_bytes:
            yield Release(bound=ReleaseBound.TENANT_BYTES, tenant=tenant, size=own.size - bounds.max_tenant_bytes)
        left += min(own.size, bounds.max_tenant_bytes)
    if left > bounds.max_bytes:
        yield Release(bound=ReleaseBound.BYTES, tenant="", size=left - bounds.max_bytes)
