"""Followers of streams that the registry begins with a snapshot."""

import asyncio
from abc import abstractmethod
from typing import Any, ClassVar

from typing_extensions import override

from weft.kernel.channels.rpc import calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import BackgroundLoop
from weft.kernel.time.clock import Clock

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0


class StreamFollower(BackgroundLoop):
    """Follows a stream and reconnects until stopped; what it has received stays readable while the registry is down."""

    log: ClassVar[Any]
    lost_words: ClassVar[str]
    """The log line of a lost stream."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first_snapshot = asyncio.Event()
        self._is_following = False
        """Whether the current stream has sent something."""
        self._lost_at = clock.monotonic()
        """When the last stream was lost, or this object was created."""

    @property
    def is_ready(self) -> bool:
        """Whether the first snapshot has arrived."""
        return self._first_snapshot.is_set()

    @property
    def lost_seconds(self) -> float:
        """Time since the stream was lost; 0 while it is connected."""
        return 0.0 if self._is_following else self._clock.monotonic() - self._lost_at

    async def wait_ready(self) -> None:
        """Waits for the first snapshot."""
        await self._first_snapshot.wait()

    @abstractmethod
    async def _follow(self) -> None:
        """Follows one stream to its end; calls `_note_received` after each message."""

    def _note_received(self) -> None:
        self._is_following = True
        self._first_snapshot.set()

    @override
    async def _run(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            try:
                with calling(Reason.SERVICE_UNAVAILABLE):
                    await self._follow()
            except WeftError as error:
                self.log.warning(self.lost_words, reason=error.reason.name.lower(), why=error.message)
            except Exception:
                # If this task ended, the process would continue with an outdated state.
                self.log.exception("a watch of the registry failed unexpectedly, watching again")
            # A snapshot resets the delay even if nothing has changed.
            pause = FIRST_RETRY_SECONDS if self._is_following else min(pause * 2, MAX_RETRY_SECONDS)
            if self._is_following:
                self._is_following, self._lost_at = False, self._clock.monotonic()
            await self._clock.sleep(pause)
