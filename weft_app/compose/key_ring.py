"""The valid API keys, kept current by the registry's WatchKeys.

The last key ring stays valid while the registry is down: callers are served, and revocations arrive afterwards.
"""

from typing import TYPE_CHECKING, cast

import grpc
from typing_extensions import override

from weft.api.registry.v1 import key_service_pb2, key_service_pb2_grpc
from weft.kernel.access.principal import KeyRing, KeyVerifier, kept_access
from weft.kernel.channels.stream_follower import StreamFollower
from weft.kernel.requests.request_values import Priority
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import optional_datetime

if TYPE_CHECKING:
    from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceAsyncStub

log = get_logger("weft.keys")


class KeyRingWatcher(StreamFollower):
    """Follows WatchKeys. The ring is empty before the first snapshot."""

    loop_name = "key-ring-watcher"
    log = log
    lost_words = "watch of keys lost, the last known keys stay in force"

    def __init__(self, registry: grpc.aio.Channel, clock: Clock) -> None:
        super().__init__(clock)
        self._stub = cast("KeyServiceAsyncStub", key_service_pb2_grpc.KeyServiceStub(registry))
        self._ring = KeyRing()

    @property
    def ring(self) -> KeyRing:
        """The newest keys. They may include expired ones, which `authenticate` rejects."""
        return self._ring

    @override
    async def _follow(self) -> None:
        async for response in self._stub.WatchKeys(key_service_pb2.WatchKeysRequest()):
            self._ring = apply_watch(self._ring, response)
            self._note_received()


def apply_watch(ring: KeyRing, response: key_service_pb2.WatchKeysResponse) -> KeyRing:
    """Returns the ring after a response of the watch; an unknown kind of response changes nothing."""
    match response.WhichOneof("kind"):
        case "snapshot":
            verifiers = map(_verifier, response.snapshot.keys)
            return KeyRing(pepper=response.snapshot.pepper, keys={each.key_id: each for each in verifiers})
        case "changed":
            changed = _verifier(response.changed)
            return KeyRing(pepper=ring.pepper, keys={**ring.keys, changed.key_id: changed})
        case "removed":
            keys = {key_id: each for key_id, each in ring.keys.items() if key_id != response.removed}
            return KeyRing(pepper=ring.pepper, keys=keys)
        case _:
            return ring


def _verifier(message: key_service_pb2.KeyVerifier) -> KeyVerifier:
    key = message.key
    return KeyVerifier(
        key_id=key.id,
        tenant=key.tenant,
        access=kept_access(key.scopes),
        digest=message.digest,
        expires_at=optional_datetime(key, "expire_time"),
        previous_digest=message.previous_digest,
        previous_expires_at=optional_datetime(message, "previous_expire_time"),
        max_priority=Priority.ceiling(key.max_priority),
    )
