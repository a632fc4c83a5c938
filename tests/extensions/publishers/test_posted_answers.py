"""Answers of publishers that are read whole have bounded memory together."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from kit.failures import fails

from weft.kernel.errors.reasons import Reason
from weft_extensions.publishers.publisher_http import MAX_WHOLE_BYTES, SMALL_BYTES, WholeAnswers

LIMIT = 64 * 1024**2
PART = bytes(4 * 1024**2)


class _Posted:
    """A request with a body of this size."""

    def __init__(self, size: int) -> None:
        self._size = size

    async def stream(self) -> AsyncIterator[bytes]:
        for start in range(0, self._size, len(PART)):
            yield PART[: self._size - start]


def posted(size: int) -> Any:
    return _Posted(size)


async def test_large_answer_is_refused_while_others_hold_the_memory_and_a_small_one_is_not() -> None:
    answers = WholeAnswers()
    async with AsyncExitStack() as held:
        for _ in range(MAX_WHOLE_BYTES // LIMIT):
            assert len(await held.enter_async_context(answers.body(posted(LIMIT), LIMIT))) == LIMIT
        with fails(Reason.NO_SLOT_AVAILABLE, "x-ndjson"):
            async with answers.body(posted(2 * SMALL_BYTES), LIMIT):
                pass
        async with answers.body(posted(SMALL_BYTES), LIMIT) as small:
            assert len(small) == SMALL_BYTES
    with fails(Reason.REQUEST_TOO_LARGE):
        async with answers.body(posted(LIMIT + 1), LIMIT):
            pass
    async with answers.body(posted(LIMIT), LIMIT) as again:
        assert len(again) == LIMIT
