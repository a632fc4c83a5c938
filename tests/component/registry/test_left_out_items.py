"""What a registry leaves out of a runner's report, and what becomes of the rest."""

from pathlib import Path
from typing import Any

import pytest
from kit.refusals import refused
from registry_harness import RunningRegistry, SomeRunner, an_agent, manifest, ready, running_registry

from weft.api.registry.v1 import registry_service_pb2, runner_pb2
from weft.api.registry.v1.event_pb2 import EVENT_REASON_LEFT_OUT, EVENT_REASON_REVIVED, EVENT_REASON_SILENT
from weft.kernel.errors.reasons import Reason


async def _events(mesh: RunningRegistry, reason: int, name: str = "r1") -> list[str]:
    request = registry_service_pb2.ListEventsRequest(kind="runner", name=name)
    found = await mesh.registry.ListEvents(request)
    return [event.message for event in found.events if event.reason == reason]


async def test_refused_models_are_told_once_and_the_runner_stays_active(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, name="r2", models=("taken",)).open()
    hostile = ("r1", "taken", "r2", "bad\x00name", "x" * 5_000, "m1", "a1")
    runner = SomeRunner(mesh, models=("m1", *hostile), agents=(an_agent("a1"), an_agent("r2")))
    for _ in range(3):
        await runner.open()
        for _ in range(3):
            await runner.beat(ready())
    shown = await mesh.runner("r1")
    assert shown.status == runner_pb2.Runner.STATUS_ACTIVE
    assert (await mesh.model("m1")).runner == "r1"
    kinds = [(item.kind, item.name.rstrip(".")[:9]) for item in shown.capability.left_out]
    assert sorted(kinds) == sorted(
        [
            ("model", "r1"),
            ("model", "bad name"),
            ("model", "x" * 9),
            ("model", "m1"),
            ("agent", "a1"),
            ("model", "taken"),
            ("model", "r2"),
            ("agent", "r2"),
        ]
    )
    told = await _events(mesh, EVENT_REASON_LEFT_OUT)
    assert len(told) == len(kinds)
    assert any(message.startswith("not served: model taken: the name 'taken' is taken") for message in told)
    assert await _events(mesh, EVENT_REASON_REVIVED) == []
    assert await _events(mesh, EVENT_REASON_SILENT) == []


@pytest.mark.parametrize(
    ("publishes", "reason"),
    [
        ({"models": ("m1", "taken")}, Reason.ALREADY_EXISTS),
        ({"models": (manifest("m1", pool="r2"),)}, Reason.ALREADY_EXISTS),
        ({"models": ("m1", "r1")}, Reason.ALREADY_EXISTS),
        ({"models": ("m1",), "agents": (an_agent("a1", "absent"),)}, Reason.MODEL_NOT_FOUND),
        ({"models": ("m1", "bad\x00name")}, Reason.INVALID_ARGUMENT),
        ({"models": ("m1", "m2", "m3", "m4")}, Reason.TOO_MANY_RESOURCES),
    ],
)
async def test_runner_that_requires_all_is_refused_and_leaves_nothing(
    tmp_path: Path, publishes: dict[str, Any], reason: Reason
) -> None:
    async with running_registry(tmp_path, max_models_per_session=3) as mesh:
        await SomeRunner(mesh, name="r2", models=("taken",)).open()
        with refused(reason):
            await SomeRunner(mesh, requires_all=True, **publishes).open()
        for kind, name in (("runner", "r1"), ("model", "m1")):
            with refused(Reason.NOT_FOUND if kind == "runner" else Reason.MODEL_NOT_FOUND):
                await (mesh.runner(name) if kind == "runner" else mesh.model(name))
        assert (await SomeRunner(mesh, requires_all=True).open()).left_out == []


async def test_item_is_published_once_its_name_is_free(mesh: RunningRegistry) -> None:
    owner = await SomeRunner(mesh, name="r2", models=("taken",)).open()
    runner = await SomeRunner(mesh, models=("m1", "taken")).open()
    await owner.close()
    assert (await runner.open()).left_out == []
    assert (await mesh.model("taken")).runner == "r1"
    await runner.beat(ready())
    assert not (await mesh.runner("r1")).capability.left_out


async def test_refused_runner_is_told_once_with_the_reason(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("box",)).open()
    for _ in range(3):
        with refused(Reason.ALREADY_EXISTS):
            await SomeRunner(mesh, name="box", models=("m2",)).open()
    [told] = await _events(mesh, EVENT_REASON_LEFT_OUT, "box")
    assert told.startswith("the runner is refused: the name 'box' is taken")


async def test_too_many_models_are_left_out_and_the_first_ones_published(tmp_path: Path) -> None:
    async with running_registry(tmp_path, max_models_per_session=2) as mesh:
        runner = await SomeRunner(mesh, models=("m1", "m2", "m3", "m4")).open()
        assert runner.left_out == [f"model {name}: a runner has at most 2" for name in ("m3", "m4")]
        assert (await mesh.model("m2")).runner == "r1"
