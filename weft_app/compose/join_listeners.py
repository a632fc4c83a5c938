"""The listeners of a router at which runners and publishers join, as far as they are configured."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from router_svc.relay import Relay
from weft.kernel.errors import invalid_field
from weft.kernel.service import Service
from weft_app.compose.home import WeftHome
from weft_app.compose.relay import RelayListener
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from weft_app.compose.publishers import PublisherListener


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinListeners:
    """Where runners and publishers join, as far as it is configured."""

    relay: RelayListener | None = None
    publishers: "PublisherListener | None" = None

    def in_order(self) -> tuple[Service, ...]:
        """Returns them in the order in which they start."""
        return tuple(each for each in (self.relay, self.publishers) if each is not None)


def join_listeners(config: WeftConfig, home: WeftHome, relay: Relay | None) -> JoinListeners:
    """Returns the listeners of a router with this relay. Raises INVALID_ARGUMENT for publishers without a relay."""
    if relay is None:
        if config.publishers.listen is not None:
            raise invalid_field("publishers.listen", "needs relay.listen: publishers join over the relay")
        return JoinListeners()
    if config.publishers.listen is None:
        return JoinListeners(relay=RelayListener(config.relay, home, relay))
    # Only where it is configured: it imports runners, and the server of their HTTP protocol.
    from weft_app.compose.publishers import PublisherListener  # noqa: PLC0415

    listener = RelayListener(config.relay, home, relay, has_publishers=True)
    return JoinListeners(relay=listener, publishers=PublisherListener(config, home, relay, listener))
