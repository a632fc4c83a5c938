"""A generation whose response has a life beside its request."""

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from gateway.ports import Generation
from gateway.responses.keeping import GrowingResponse, Keeping
from gateway.responses.running import RunningResponse, RunningResponses
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


class RespondingGeneration:
    """A generation whose response others may look at, and which is kept before its last event is handed on."""

    def __init__(
        self,
        generation: Generation,
        growing: GrowingResponse,
        *,
        keeping: Keeping | None,
        running: RunningResponse | None,
        everyone: RunningResponses,
    ) -> None:
        """`keeping`: None: it is not to be kept; `running`: None: nobody could know of it before its end."""
        self._generation = generation
        self._growing = growing
        self._keeping = keeping
        self._running = running
        self._everyone = everyone

    @property
    def receipt(self) -> receipt_pb2.Receipt | None:
        """See Generation.receipt."""
        return self._generation.receipt

    async def frames(self) -> AsyncGenerator[Frame]:
        """See Generation.frames. Raises CANCELLED where somebody ended it."""
        running = self._running
        with ExitStack() as stack:
            if running is not None:
                stack.enter_context(self._everyone.joined(running))
            try:
                async with aclosing(self._generation.frames()) as frames:
                    while (frame := await self._next(frames)) is not None:
                        if not (frame and frame[-1].HasField("finished")):
                            yield frame
                            continue
                        if len(frame) > 1:
                            yield frame[:-1]
                        await self._conclude(frame[-1].finished.receipt)
                        # Whoever reads the last events slowly must not keep others from deleting what is kept.
                        stack.close()
                        yield frame[-1:]
            except WeftError as error:
                if running is not None and running.is_ended:
                    await running.settled()
                elif error.reason is Reason.CANCELLED and self._keeping is not None:
                    self._growing.not_kept(error)
                raise

    async def _next(self, frames: AsyncGenerator[Frame]) -> Frame | None:
        if self._running is None:
            return await anext(frames, None)
        with self._running.waiting():
            return await anext(frames, None)

    async def _conclude(self, receipt: receipt_pb2.Receipt) -> None:
        if self._running is not None:
            self._running.conclude()
        body = self._growing.conclude(receipt)
        if self._keeping is not None:
            await self._keeping.keep(self._growing, body)
