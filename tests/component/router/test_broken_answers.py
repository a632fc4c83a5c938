"""What the loop makes of answers that end badly after they have begun."""

from pathlib import Path

import pytest
from waker_harness import grant_of, next_word, waking_mesh

from weft.dispatch.fleet import Phase
from weft.dispatch.port import Grant, WaitingInQueue
from weft.kernel.reasons import Reason


@pytest.mark.parametrize(
    ("reason", "what_comes_next"),
    [(Reason.SERVER_DIED, WaitingInQueue), (Reason.CANCELLED, Grant), (Reason.UNSPECIFIED, Grant)],
)
async def test_only_an_answer_that_its_runner_broke_off_counts_against_that(
    tmp_path: Path, reason: Reason, what_comes_next: type
) -> None:
    async with waking_mesh(tmp_path) as mesh:
        mesh.show(Phase.READY)
        async with mesh.place("first") as place:
            granted = await grant_of(place)
            await place.report_first_content(granted.attempt)
            await place.report_finished(reason)
        async with mesh.place("second") as place:
            assert isinstance(await next_word(place), what_comes_next)
