"""A router's listeners for dial-out runners and publishers."""

import asyncio
from typing import TYPE_CHECKING

from typing_extensions import override

import router_svc.router_service
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.services.service_lifecycle import Service
from weft_app.compose.home import WeftHome
from weft_app.compose.relay import RelayListener
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from weft_app.compose.publisher_http import PublisherListener


class JoinListeners(Service):
    """Combines the configured listeners into one service."""

    def __init__(self, relay: RelayListener | None = None, publishers: "PublisherListener | None" = None) -> None:
        self.relay = relay
        self.publishers = publishers

    @override
    async def start(self) -> None:
        """Starts the relay's listener, then that of publishers, which join over it."""
        for each in self._in_order():
            await each.start()

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Drains both concurrently."""
        ends = await asyncio.gather(*(each.stop(grace_seconds) for each in self._in_order()), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def _in_order(self) -> tuple[Service, ...]:
        return tuple(each for each in (self.relay, self.publishers) if each is not None)


def join_listeners(
    config: WeftConfig, home: WeftHome, router: router_svc.router_service.RouterService
) -> JoinListeners:
    """Returns the listeners of a router. Raises INVALID_ARGUMENT for publishers without a relay."""
    relay = router.relay
    if relay is None:
        if config.publishers.listen is not None:
            raise invalid_field("publishers.listen", "needs relay.listen: publishers join over the relay")
        return JoinListeners()
    if config.publishers.listen is None:
        return JoinListeners(RelayListener(config.relay, home, relay))
    # Imported only if configured: it imports runners and their HTTP server.
    from weft_app.compose.publisher_http import PublisherListener  # noqa: PLC0415

    listener = RelayListener(config.relay, home, relay, has_publishers=True)
    return JoinListeners(listener, PublisherListener(config, home, relay, listener))
