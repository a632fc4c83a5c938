"""Which runners `weft up` takes out of the mesh, and what it says of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.home import WeftHome
from weft_app.compose.runner_processes import RetiredRunner, StartedRunners, retire_others, retirement_notes

if TYPE_CHECKING:
    import grpc

Response = pb.RetireSessionResponse


class Registry:
    """A channel on which RetireSession is answered with `outcome`."""

    def __init__(self, outcome: "pb.RetireSessionResponse.Outcome.ValueType") -> None:
        self.outcome = outcome
        self.asked: list[pb.RetireSessionRequest] = []

    def unary_unary(self, *_: object, **__: object) -> Any:
        async def answer(request: pb.RetireSessionRequest, timeout: float) -> pb.RetireSessionResponse:
            assert timeout > 0
            self.asked.append(request)
            return pb.RetireSessionResponse(outcome=self.outcome, models=["m-b"], pools=["pool-b"])

        return answer


@pytest.fixture
def home(tmp_path: Path) -> WeftHome:
    found = WeftHome(tmp_path)
    found.create()
    (found.state / "runners").mkdir()
    for name in ("a", "b", "elsewhere"):
        (found.state / "runners" / f"{name}.session").write_text(f"ses-{name}\n")
    return found


async def _start(home: WeftHome, registry: Registry, *names: str) -> list[RetiredRunner]:
    return await StartedRunners(home).retire_others(names, cast("grpc.aio.Channel", registry))


async def test_runner_removed_from_the_file_is_retired_once_unless_never_started(home: WeftHome) -> None:
    registry = Registry(Response.OUTCOME_RETIRED)
    assert await _start(home, registry, "a", "b") == []
    assert await _start(home, registry, "a") == [RetiredRunner(name="b", models=("m-b",), pools=("pool-b",))]
    assert [(request.session_id, request.process_ended) for request in registry.asked] == [("ses-b", True)]
    assert not (home.state / "runners" / "b.session").exists()
    assert await _start(home, registry, "a") == []
    assert (home.state / "runners" / "elsewhere.session").exists()


@pytest.mark.parametrize("outcome", [Response.OUTCOME_LIVES, Response.OUTCOME_HOLDS_MEMORY])
async def test_failed_retirement_is_retried_at_the_next_start(
    home: WeftHome, outcome: "pb.RetireSessionResponse.Outcome.ValueType"
) -> None:
    registry = Registry(outcome)
    await _start(home, registry, "a", "b")
    (kept,) = await _start(home, registry, "a")
    assert kept.later
    assert "the mesh" in retirement_notes([kept], ())[0]
    registry.outcome = Response.OUTCOME_RETIRED
    (retired,) = await _start(home, registry, "a")
    assert not retired.later


async def test_runner_unknown_to_the_mesh_is_not_reported(home: WeftHome) -> None:
    registry = Registry(Response.OUTCOME_UNKNOWN)
    await _start(home, registry, "a", "b")
    assert await _start(home, registry, "a") == []


async def test_removed_runner_is_retired_even_if_its_waiting_tasks_cannot_be_read(home: WeftHome) -> None:
    """A reload ended there: it counted as done, and the runners that it adds were not started until a restart."""

    async def fail() -> frozenset[str]:
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router's database failed")

    registry = Registry(Response.OUTCOME_RETIRED)
    await _start(home, registry, "a", "b")
    (note,) = await retire_others(home, ["a"], cast("grpc.aio.Channel", registry), fail)
    assert note == "runner b is not in the configuration any more and was taken out of the mesh with m-b"


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b'["../a"]', b"[1]", b"\xff"])
async def test_damaged_runner_list_retires_nothing_and_is_rewritten(home: WeftHome, content: bytes) -> None:
    registry = Registry(Response.OUTCOME_RETIRED)
    (home.state / "started-runners.json").write_bytes(content)
    assert await _start(home, registry, "a", "b") == []
    assert [retired.name for retired in await _start(home, registry, "a")] == ["b"]


def test_tasks_waiting_for_a_removed_runner_are_listed() -> None:
    retired = RetiredRunner(name="b", models=("m-b", "m-c"), pools=("pool-b",))
    (note,) = retirement_notes([retired], {"pool-b", "m-a"})
    assert "was taken out of the mesh with m-b, m-c" in note
    assert "durable tasks still wait for pool-b (weft get tasks)" in note
