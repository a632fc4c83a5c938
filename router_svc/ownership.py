"""Which requests this router schedules, where there are several."""

from collections.abc import Callable, Sequence

from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.domains import DomainOwners
from weft.dispatch.fleet import FleetView
from weft.dispatch.placement import Placement, PlacementRequest, PoolQueue, RouterPort, request_moved
from weft.kernel.errors import WeftError

Moved = Callable[[PlacementRequest], WeftError | None]


class Ownership:
    """The scheduling domains of one router, by the newest view. A router without a name owns all of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._view = FleetView()
        self._owners = DomainOwners()

    def update_view(self, view: FleetView) -> bool:
        """Take a new view; returns whether requests that wait here may have another owner."""
        before, self._view = self._view, view
        is_shared = bool(self._name) and any(name != self._name for name in view.routers)
        return is_shared and (view.routers, view.models, view.routes) != (before.routers, before.models, before.routes)

    def moved(self, request: PlacementRequest) -> WeftError | None:
        """Returns the error MOVED of a request that another router has to place; None: this one has."""
        if not self._name or not self._view.routers:
            return None
        owner = self._owners.owner(self._view, request.model, request.unreachable_routers)
        if owner is None or owner.name == self._name:
            return None
        return request_moved(request.model, owner.name, owner.address)

    def require(self, request: PlacementRequest) -> None:
        """Raise MOVED for a request that another router has to place."""
        error = self.moved(request)
        if error is not None:
            raise error


class OwnedPlacement(RouterPort):
    """A RouterPort that refuses what another router owns: for work that this process can hand to no other, as tasks."""

    def __init__(self, inner: RouterPort, ownership: Ownership) -> None:
        self._inner = inner
        self._ownership = ownership

    @override
    def place(self, request: PlacementRequest) -> Placement:
        self._ownership.require(request)
        return self._inner.place(request)

    @override
    async def queues(self) -> Sequence[PoolQueue]:
        return await self._inner.queues()

    @override
    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        self._ownership.require(request)
        return await self._inner.report_end(request, receipt)
