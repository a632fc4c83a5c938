"""The valid API keys, kept current by the registry's WatchKeys.

The last key ring stays valid while the registry is down: callers are served, and revocations arrive afterwards.
"""

import asyncio
from typing import TYPE_CHECKING, cast

import grpc

from weft.api.registry.v1 import key_service_pb2, key_service_pb2_grpc
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.principal import KeyRing, KeyVerifier, kept_access
from weft.kernel.reasons import Reason
from weft.kernel.rpc import calling
from weft.kernel.service import start_critical, stop_tasks
from weft.kernel.timestamps import optional_datetime

if TYPE_CHECKING:
    from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceAsyncStub

log = get_logger("weft.keys")

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0


class KeyRingWatcher:
    """Follows WatchKeys and reconnects until stopped. The ring is empty before the first snapshot."""

    def __init__(self, registry: grpc.aio.Channel, clock: Clock) -> None:
        self._stub = cast("KeyServiceAsyncStub", key_service_pb2_grpc.KeyServiceStub(registry))
        self._clock = clock
        self._ring = KeyRing()
        self._event_count = 0
        self._task: asyncio.Task[None] | None = None
        self._first_snapshot = asyncio.Event()

    @property
    def ring(self) -> KeyRing:
        """The newest keys. They may include expired ones, which `authenticate` rejects."""
        return self._ring

    @property
    def is_ready(self) -> bool:
        """Whether the first snapshot has arrived."""
        return self._first_snapshot.is_set()

    async def start(self) -> None:
        """Starts following. Returns immediately; `wait_ready` waits for the first snapshot."""
        self._task = start_critical(self._follow(), name="key-ring-watcher")

    async def wait_ready(self) -> None:
        """Waits for the first snapshot."""
        await self._first_snapshot.wait()

    async def stop(self) -> None:
        """Stops following; the last ring stays readable. Safe to call twice or before `start`."""
        if self._task is not None:
            task, self._task = self._task, None
            await stop_tasks([task])

    async def _follow(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            heard = self._event_count
            try:
                with calling(Reason.SERVICE_UNAVAILABLE):
                    await self._follow_once()
            except WeftError as error:
                log.warning(
                    "watch of keys lost, the last known keys stay in force",
                    reason=error.reason.name.lower(),
                    why=error.message,
                )
            except Exception:
                # If this task ended, revocations would be missed.
                log.exception("watch of keys failed unexpectedly, watching again")
            pause = FIRST_RETRY_SECONDS if self._event_count != heard else min(pause * 2, MAX_RETRY_SECONDS)
            await self._clock.sleep(pause)

    async def _follow_once(self) -> None:
        async for response in self._stub.WatchKeys(key_service_pb2.WatchKeysRequest()):
            self._ring = apply_watch(self._ring, response)
            self._event_count += 1
            if response.HasField("snapshot"):
                self._first_snapshot.set()


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
    )
