"""A router's listeners, through which runners join: the relay for dial-out runners, and those of extensions."""

import asyncio
from dataclasses import dataclass
from types import FunctionType

from typing_extensions import override

import router_svc.router_service
from router_svc.relay import Relay
from weft.extension import ListenerHook, listener_hooks, load_hook
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.log import get_logger
from weft_app.compose.home import WeftHome
from weft_app.compose.relay import RelayListener
from weft_app.config.config import WeftConfig

log = get_logger("weft.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinParts:
    """What the listener of an extension may use."""

    config: WeftConfig
    home: WeftHome
    relay: Relay
    """Checks tokens."""
    relay_listener: RelayListener
    """Its `private_address` is where runners of this process join; known once the listener of the extension starts."""


class JoinListener(Service):
    """The listener of an extension."""

    url = ""
    """Its base URL, once started."""


class JoinListeners(Service):
    """The listeners of a router as one service."""

    def __init__(self, relay: RelayListener | None = None) -> None:
        self.relay = relay
        self.notices: list[str] = []
        """A sentence for each listener that is configured and off."""
        self._added: list[tuple[ListenerHook, JoinListener]] = []

    def add(self, hook: ListenerHook, listener: JoinListener) -> None:
        """Adds the listener of an extension."""
        self._added.append((hook, listener))

    @property
    def added(self) -> list[tuple[str, str]]:
        """The listeners of extensions, once started: the label and the line of each."""
        return [(hook.label, f"{hook.summary} at {listener.url}") for hook, listener in self._added]

    @override
    async def start(self) -> None:
        """Starts the relay's listener, then those of extensions, which join over it."""
        for notice in self.notices:
            log.warning("a listener is off", detail=notice)
        for each in self._in_order():
            await each.start()

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Drains all concurrently."""
        ends = await asyncio.gather(*(each.stop(grace_seconds) for each in self._in_order()), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    def _in_order(self) -> tuple[Service, ...]:
        return (*(() if self.relay is None else (self.relay,)), *(listener for _, listener in self._added))


def join_listeners(
    config: WeftConfig, home: WeftHome, router: router_svc.router_service.RouterService
) -> JoinListeners:
    """Returns the listeners of a router. Raises INVALID_ARGUMENT for one of an extension without a relay."""
    relay = router.relay
    listeners = JoinListeners(None if relay is None else RelayListener(config.relay, home, relay))
    for hook, why_off in listener_hooks(config.extensions.disabled):
        is_set = hook.address(config) is not None
        if why_off and is_set:
            listeners.notices.append(f"{hook.setting} is set, but {why_off}")
        if why_off or (hook.setting and not is_set):
            continue
        if relay is not None and listeners.relay is not None:
            parts = JoinParts(config=config, home=home, relay=relay, relay_listener=listeners.relay)
            # Imported only if configured: it may import runners and an HTTP server.
            listener: JoinListener | None = load_hook(hook.place, FunctionType)(parts)
            if listener is not None:
                listeners.relay.has_private_address = True
                listeners.add(hook, listener)
        elif hook.setting:
            raise invalid_field(hook.setting, "needs relay.listen: what it lets in joins over the relay")
    return listeners
