"""Metadata of public gRPC calls: text entries, and the tenant."""

from collections.abc import Mapping
from typing import Any

import grpc

from weft.kernel.access.rpc_auth import caller
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import MAX_REQUEST_ID_CHARS, MAX_TENANT_CHARS, require_token

TENANT = "x-tenant-id"


def metadata_of(context: grpc.aio.ServicerContext[Any, Any]) -> Mapping[str, str]:
    """Return the text metadata of a call.

    Raises MALFORMED_REQUEST for two different tenants, as a proxy may have checked the other one.
    """
    shown = [(key, value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
    if len({value for key, value in shown if key == TENANT}) > 1:
        raise WeftError(Reason.MALFORMED_REQUEST, f"{TENANT}: the call names two different tenants")
    return dict(shown)


def tenant_of(metadata: Mapping[str, str]) -> str:
    """Return the tenant of a call: that of the API key, or the claimed one of a trusted caller.

    Raises INVALID_ARGUMENT, and PERMISSION_DENIED if the key belongs to another tenant.
    """
    claimed = metadata.get(TENANT, "")
    if claimed:
        require_token(claimed, TENANT, MAX_TENANT_CHARS)
    return caller().tenant_for(claimed, TENANT)


def tenant_in(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the tenant of a call; see `tenant_of`."""
    return tenant_of(metadata_of(context))


def id_in(text: str, field: str = "id") -> str:
    """Return the id in a field of a request. Raises INVALID_ARGUMENT naming the field."""
    return require_token(text, field, MAX_REQUEST_ID_CHARS)
