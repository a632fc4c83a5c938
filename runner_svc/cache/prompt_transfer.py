"""The transfer of a stored prompt between two runners: as messages, and the runner that fetches one."""

import asyncio
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from runner_svc.policy.kept_prompts import KeptPrompt
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1 import runner_service_pb2_grpc, ticket_pb2
from weft.kernel.channels.rpc import ChannelPool, calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.timestamps import duration_of
from weft.kernel.values.address import metadata_of

if TYPE_CHECKING:
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

PART_BYTES = 1024 * 1024
PRIOR_BYTES_PER_SECOND = 100e6
"""Assumed speed of transfers until one was measured: a network of 1 Gbit/s."""
NEWEST_SHARE = 0.3
"""Weight of the newest transfer in the measured speed."""

log = get_logger("weft.runner")


def description_of(prompt: KeptPrompt) -> pb.MovedPrompt:
    """Returns the description with which a prompt is moved."""
    return pb.MovedPrompt(
        marks=prompt.marks,
        prefix_digests=prompt.digests,
        byte_count=prompt.byte_count,
        token_count=prompt.token_count,
        prefill=duration_of(prompt.seconds),
    )


def messages_of(pieces: Iterable[bytes]) -> Iterator[pb.FetchPromptResponse]:
    """Yields a state in messages of bounded size, and its digest. Raises as the pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
        for begin in range(0, len(piece), PART_BYTES):
            yield pb.FetchPromptResponse(state=piece[begin : begin + PART_BYTES])
    yield pb.FetchPromptResponse(sha256=digest.digest())


class PromptFetcher:
    """Fetches stored prompts of other runners. Used on the event loop only."""

    def __init__(self, channels: ChannelPool) -> None:
        self._channels = channels
        self.bytes_per_second = PRIOR_BYTES_PER_SECOND
        """Speed of transfers."""

    async def close(self) -> None:
        """Closes the connections to other runners."""
        await self._channels.close()

    async def fetch(
        self, source: ticket_pb2.PromptSource, kind: str, wants: Callable[[pb.MovedPrompt], bool], target: Path
    ) -> pb.MovedPrompt | None:
        """Writes the state of another runner's prompt to a file. Returns its description.

        None: it is not there, not wanted, damaged, or did not arrive in time; then there is no file.
        """
        found = None
        try:
            async with asyncio.timeout(source.max_time.ToNanoseconds() / 1e9):
                with calling(Reason.WORKER_LOST):
                    found = await self._received(source, kind, wants, target)
        except (WeftError, OSError) as error:
            # TimeoutError is an OSError, too.
            log.warning("stored prompt was not fetched", error=str(error)[:256] or type(error).__name__)
        finally:
            if found is None:
                _remove(target)
        return found

    async def _received(
        self, source: ticket_pb2.PromptSource, kind: str, wants: Callable[[pb.MovedPrompt], bool], target: Path
    ) -> pb.MovedPrompt | None:
        channel = await self._channels.get(source.address)
        stub = cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))
        request = pb.FetchPromptRequest(ticket=source.ticket, state_kind=kind)
        call = stub.FetchPrompt(request, metadata=metadata_of(source.address))
        now = asyncio.get_running_loop().time
        begin, prompt, digest, size = now(), pb.MovedPrompt(), hashlib.sha256(), 0
        try:
            # The file is in main memory, see SavedPrompts: writing a part takes less than a millisecond.
            with _private(target) as written:
                async for message in call:
                    if message.HasField("prompt"):
                        prompt = message.prompt
                        if not wants(prompt):
                            return None
                    elif message.HasField("state"):
                        size += len(message.state)
                        if size > prompt.byte_count:
                            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "it is larger than announced")
                        digest.update(message.state)
                        written.write(message.state)
                    elif message.sha256 == digest.digest() and size == prompt.byte_count > 0:
                        written.flush()
                        self._note(size, now() - begin)
                        return prompt
                raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "it is damaged")
        finally:
            call.cancel()

    def _note(self, byte_count: int, seconds: float) -> None:
        if seconds > 0:
            self.bytes_per_second += NEWEST_SHARE * (byte_count / seconds - self.bytes_per_second)


def _private(file: Path) -> BinaryIO:
    return os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
