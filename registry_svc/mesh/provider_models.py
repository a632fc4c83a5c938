"""Central models with their providers' keys, for the process that serves them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from weft.api.registry.v1 import central_model_service_pb2 as pb
from weft.api.registry.v1 import central_model_service_pb2_grpc
from weft.documents.kinds.model import secret_of
from weft.documents.kinds.tenant import webhook_secret
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.access.principal import LOCAL
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.names import SECRET_PREFIX

Context = grpc.aio.ServicerContext[Any, Any]
_SOCKET = "unix:"
_TRANSPORT, _TLS = "transport_security_type", b"ssl"


class ChangeEvent:
    """Notifies waiters of changes. Call `next` before reading the state, so that no change is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Wakes all waiters."""
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """Returns the event that the next ring sets."""
        return self._event


KeyOf = Callable[[str], str]
"""Returns the value of a secret by name; empty if there is none."""


def users_of(secret: str, core: RegistryCore) -> Sequence[str]:
    """Returns the names of the models that use a secret, "alias/NAME" of aliases and "tenant/NAME", sorted."""
    central = core.mesh.central_models
    models = (name for name, manifest in central.items() if secret_of(manifest) == secret)
    aliases = (f"alias/{name}" for name, reference in _references(core) if reference == SECRET_PREFIX + secret)
    tenants = (tenant.manifest for tenant in core.mesh.documents[ResourceKind.TENANT].all_declared())
    webhooks = (f"{ResourceKind.TENANT}/{each.name}" for each in tenants if webhook_secret(each) == secret)
    return sorted({*models, *aliases, *webhooks})


def _references(core: RegistryCore) -> Iterator[tuple[str, str]]:
    """Yields the aliases with secrets in headers, and the references."""
    for alias in core.mesh.documents[ResourceKind.ALIAS].shown.values():
        for value in alias.manifest.provider_headers.values():
            if value.startswith(SECRET_PREFIX):
                yield alias.manifest.name, value


class CentralModelServicer(AnsweringServicer, central_model_service_pb2_grpc.CentralModelServiceServicer):
    """See CentralModelService in the contract: the declared models with a provider, and the providers' keys."""

    def __init__(self, core: RegistryCore, change_event: ChangeEvent, key_of: KeyOf) -> None:
        """`change_event` rings at every change of declarations and secrets, and when the registry stops."""
        self._core = core
        self._change_event = change_event
        self._key_of = key_of

    # See RegistryServicer.Watch for why it is a coroutine.
    @override
    async def WatchCentralModels(  # type: ignore[override]
        self, request: pb.WatchCentralModelsRequest, context: Context
    ) -> None:
        del request
        require_private(context)
        last: pb.WatchCentralModelsResponse | None = None
        while True:
            rung = self._change_event.next()
            self._core.require_open()
            central = sorted(self._core.mesh.central_models.items())
            state = pb.WatchCentralModelsResponse(models=[self._with_key(manifest) for _, manifest in central])
            for _, reference in _references(self._core):
                state.header_secrets[reference] = self._key_of(reference.removeprefix(SECRET_PREFIX))
            if state != last:
                await context.write(state)
                last = state
            await rung.wait()

    def _with_key(self, manifest: Any) -> pb.CentralModel:
        secret = secret_of(manifest)
        key = self._key_of(secret) if secret else ""
        return pb.CentralModel(manifest=manifest, api_key=key, key_is_missing=bool(secret) and not key)


def require_private(context: Context) -> None:
    """Raises PERMISSION_DENIED if any user of this machine could call, or read the traffic."""
    is_private = context.peer().startswith(_SOCKET) or _TLS in context.auth_context().get(_TRANSPORT, ())
    if not is_private and caller() is LOCAL:
        raise WeftError(
            Reason.PERMISSION_DENIED,
            "values of secrets are sent over a Unix socket, with TLS, or to callers with a key of the mesh",
        )
