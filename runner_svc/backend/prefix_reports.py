"""The prompt prefixes in an engine's cache, as the engine reports them, and the routers that follow them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from itertools import islice

from runner_svc.policy.engine_blocks import (
    MAX_PREFIXES,
    BlockEvent,
    EngineBlocks,
    PrefixChanges,
    PromptPrefixes,
    StoredBlocks,
)
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MAX_FOLLOWERS = 16
MAX_MESSAGE_PREFIXES = 4_096


class PrefixFollower:
    """Changes that a router has not read yet; later ones of a prefix replace earlier ones."""

    def __init__(self, prefixes: list[int]) -> None:
        self._changes = PrefixChanges(restart=True, held=dict.fromkeys(prefixes, True))
        self._something = asyncio.Event()
        self._something.set()
        self._has_ended = False

    def offer(self, changes: PrefixChanges, reports: "PrefixReports") -> None:
        """Adds changes."""
        self._changes.add(changes)
        if len(self._changes.held) > 2 * MAX_PREFIXES:
            self._changes = PrefixChanges(restart=True, held=dict.fromkeys(reports.prefixes, True))
        self._something.set()

    def end(self) -> None:
        """Ends it: the engine reports no more."""
        self._has_ended = True
        self._something.set()

    async def messages(self) -> AsyncGenerator[pb.WatchPrefixesResponse]:
        """Yields the changes until the reports end."""
        while True:
            await self._something.wait()
            self._something.clear()
            if self._has_ended:
                return
            changes, self._changes = self._changes, PrefixChanges()
            for message in _messages_of(changes):
                yield message


class PrefixReports:
    """Follows the reports of one engine process. Used on the event loop only."""

    def __init__(self) -> None:
        self._blocks = EngineBlocks()
        self._followers: list[PrefixFollower] = []
        self.is_live = False
        """Whether the engine reports its blocks, and which requests stored them; earlier versions do not."""

    @property
    def prefixes(self) -> list[int]:
        """Digests of the prefixes that are cached."""
        return self._blocks.prefixes

    def apply(self, events: list[BlockEvent]) -> None:
        """Applies what the engine reports next."""
        for event in events:
            self._blocks.apply(event)
            self.is_live = self.is_live or (isinstance(event, StoredBlocks) and bool(event.request_id))
        self._tell()

    def restart(self) -> None:
        """Forgets everything, because reports are missing."""
        self._blocks.restart()
        self._tell()

    def forget(self, tenant: str | None, tag: str | None) -> None:
        """Forgets the prefixes of a tenant and a tag; None: any."""
        self._blocks.forget(tenant, tag)
        self._tell()

    def end(self) -> None:
        """Ends the reports and forgets everything. Idempotent."""
        self.is_live, self._blocks = False, EngineBlocks()
        followers, self._followers = self._followers, []
        for follower in followers:
            follower.end()

    async def attributed(
        self, frames: AsyncGenerator[Frame], request_id: str, prefixes: PromptPrefixes
    ) -> AsyncGenerator[Frame]:
        """Yields the frames of a request's answer, and notes how many tokens its prompt has."""
        self._blocks.expect(request_id, prefixes)
        async with aclosing(frames):
            async for frame in frames:
                if frame and frame[-1].WhichOneof("event") == "finished":
                    usage = frame[-1].finished.receipt.usage
                    self._blocks.note_prompt_tokens(request_id, usage.prompt_tokens)
                    self._tell()
                yield frame

    @contextmanager
    def follow(self) -> Iterator[PrefixFollower]:
        """Follows the reports. Raises UNSUPPORTED_OPERATION or, beyond MAX_FOLLOWERS, TOO_MANY_RESOURCES."""
        if not self.is_live:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this engine does not report the prefixes in its cache")
        if len(self._followers) >= MAX_FOLLOWERS:
            raise WeftError(Reason.TOO_MANY_RESOURCES, f"{MAX_FOLLOWERS} callers follow these prefixes, the limit")
        follower = PrefixFollower(self.prefixes)
        self._followers.append(follower)
        try:
            yield follower
        finally:
            if follower in self._followers:
                self._followers.remove(follower)

    def _tell(self) -> None:
        if changes := self._blocks.take_changes():
            for follower in self._followers:
                follower.offer(changes, self)


def _messages_of(changes: PrefixChanges) -> Iterator[pb.WatchPrefixesResponse]:
    """Yields changes in messages of bounded size, at least one."""
    first = pb.WatchPrefixesResponse(restart=changes.restart, cleared=changes.cleared)
    items = iter(changes.held.items())
    while (part := list(islice(items, MAX_MESSAGE_PREFIXES))) or first.restart or first.cleared:
        first.held.extend(digest for digest, is_held in part if is_held)
        first.lost.extend(digest for digest, is_held in part if not is_held)
        yield first
        first = pb.WatchPrefixesResponse()
