"""Authentication in this process: whether callers need keys, and the ring that checks them."""

from collections.abc import Callable, Sequence

import grpc

from weft.dispatch.key_ring import KeyRingWatcher
from weft.kernel.address import is_loopback
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.principal import KeyRing
from weft.kernel.reasons import Reason
from weft.kernel.rpc import open_channel
from weft.kernel.rpc_auth import AuthInterceptor
from weft.kernel.tls_channel import ChannelSecurity
from weft_app.config.config import WeftConfig


def keys_required(config: WeftConfig) -> bool:
    """Whether callers need keys: as configured; by default where the HTTP API is reachable from elsewhere."""
    if config.auth.required is not None:
        return config.auth.required
    return config.gateway.tls_terminated_elsewhere or not is_loopback(config.host)


class KeyCheck:
    """The keys of one process, for its gRPC server and its HTTP edge. Until the keys are loaded no caller is known."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._source: Callable[[], KeyRing] | None = None
        self._watcher: KeyRingWatcher | None = None

    @property
    def ring(self) -> KeyRing:
        """See gateway.auth.authentication.KeyRingSource."""
        if self._watcher is not None:
            return self._watcher.ring
        return KeyRing() if self._source is None else self._source()

    @property
    def is_ready(self) -> bool:
        """See gateway.auth.authentication.KeyRingSource."""
        return self._source is not None if self._watcher is None else self._watcher.is_ready

    def interceptor(self) -> AuthInterceptor:
        """Admits gRPC calls by these keys; until they are loaded, calls with a key get SERVICE_UNAVAILABLE."""
        return AuthInterceptor(self._known_ring, self._clock)

    def _known_ring(self) -> KeyRing:
        if not self.is_ready:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the keys are not known yet", retry_after_seconds=1)
        return self.ring

    def use(self, source: Callable[[], KeyRing]) -> None:
        """Uses the key store of this very process."""
        self._source = source

    async def follow(self, registry: grpc.aio.Channel) -> None:
        """Follows the keys of a registry elsewhere. Returns at once."""
        self._watcher = KeyRingWatcher(registry, self._clock)
        await self._watcher.start()

    async def stop(self) -> None:
        """Stops following; safe to call twice."""
        if self._watcher is not None:
            await self._watcher.stop()


def key_check(config: WeftConfig, clock: Clock) -> KeyCheck | None:
    """The key check of this process; None where no keys are required."""
    return KeyCheck(clock) if keys_required(config) else None


class KeyFollower:
    """Follows the keys of a registry elsewhere while the service beside it runs. See weft.kernel.service.Service."""

    service_names: Sequence[str] = ()

    def __init__(self, keys: KeyCheck, registry_address: str, security: ChannelSecurity) -> None:
        self._keys = keys
        self._address = registry_address
        self._security = security
        self._channel: grpc.aio.Channel | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Registers no servicer."""

    async def start(self) -> None:
        """See Service.start."""
        self._channel = open_channel(self._address, self._security)
        await self._keys.follow(self._channel)

    async def stop(self, grace_seconds: float) -> None:  # noqa: ARG002 - nothing here takes long
        """See Service.stop."""
        await self._keys.stop()
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(grace=None)


def followers(keys: KeyCheck | None, registry_address: str, security: ChannelSecurity) -> tuple[KeyFollower, ...]:
    """Services that run beside a service to keep its keys current; none where no keys are required."""
    return () if keys is None else (KeyFollower(keys, registry_address, security),)
