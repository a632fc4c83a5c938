"""What the loop makes of answers that end badly after they have begun."""

from pathlib import Path

import pytest
from waker_harness import MODEL, grant_of, next_word, waking_mesh

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.kernel.reasons import Reason


@pytest.mark.parametrize(
    ("reason", "counts"), [(Reason.SERVER_DIED, True), (Reason.CANCELLED, False), (Reason.UNSPECIFIED, False)]
)
async def test_only_answers_broken_off_by_the_runner_count_against_it(
    tmp_path: Path, reason: Reason, counts: bool
) -> None:
    async with waking_mesh(tmp_path) as mesh:
        mesh.show(InstanceState.PHASE_READY)
        async with mesh.place("first") as place:
            granted = await grant_of(place)
            await place.report_first_content(granted.attempt)
            await place.report_finished(reason)
        index = mesh.loop.scheduler._index
        candidate = index.table.candidate(MODEL)
        assert candidate is not None
        assert index.health.is_clean(candidate, mesh.clock.monotonic()) is not counts
        async with mesh.place("second") as place:
            assert (await next_word(place)).HasField("granted"), "there is no other runner to go to meanwhile"
