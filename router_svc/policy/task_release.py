"""The policy of kept results: how many finished tasks are released, oldest first, to stay within bounds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum


class ReleaseBound(Enum):
    """Why finished tasks are released before their time."""

    COUNT = "count"
    """Their tenant has too many."""
    TENANT_BYTES = "tenant_bytes"
    """Those of their tenant are too large."""
    BYTES = "bytes"
    """Those of all tenants are too large (`router.tasks.max_kept_bytes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptTasks:
    """Finished tasks of one tenant."""

    count: int
    size: int
    """Bytes of their requests and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepBounds:
    """Maximum of kept results."""

    max_per_tenant: int
    max_tenant_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Release the oldest finished tasks until this many, or this many bytes, are gone."""

    bound: ReleaseBound
    tenant: str
    """Empty: all tenants."""
    count: int = 0
    size: int = 0


def releases(kept: Mapping[str, KeptTasks], bounds: KeepBounds) -> Iterator[Release]:
    """Yields the releases by tenant, each independent of what the others free.

    The last one, over all tenants, assumes that each earlier one frees what it should.
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
