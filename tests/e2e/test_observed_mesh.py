"""Every selector of every dashboard and alert has a series on the page of a mesh that has lived through everything."""

from collections.abc import Iterator

import aiohttp
import pytest
from kit.promql import series_of, unmatched
from mesh_process import eventually
from observed_mesh import Observed, asked_expressions, live_through, running_observed

pytestmark = pytest.mark.nightly("repeats kills, cuts or swaps of a whole mesh")

DEADLINE_SECONDS = 20.0


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    with running_observed(tmp_path_factory.mktemp("observed")) as observed:
        yield observed


async def test_every_dashboard_and_alert_selector_matches_a_series(observed: Observed) -> None:
    expressions = asked_expressions()
    before = unmatched(expressions, series_of(await _page(observed)))
    assert before, "a mesh that has done nothing has a series for everything: the check can see nothing"
    await live_through(observed)
    left: list[str] = []

    async def are_all_there() -> bool:
        left[:] = unmatched(expressions, series_of(await _page(observed)))
        return not left

    try:
        await eventually(are_all_there, DEADLINE_SECONDS, "some are not there")
    except AssertionError:
        pytest.fail("no series for: " + "\n".join(left))


async def _page(observed: Observed) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{observed.mesh.url}/metrics") as answer:
        return await answer.text()
