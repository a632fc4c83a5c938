"""Trials on a running registry: checked when they are declared, and judged."""

from pathlib import Path
from typing import Any, cast

from kit.resources import declared
from registry_harness import RunningRegistry, declare, refusal, running_registry
from structlog.testing import capture_logs

from registry_svc.mesh.trials import MAX_VERDICTS
from weft.api.registry.v1 import trial_service_pb2 as pb
from weft.api.registry.v1 import trial_service_pb2_grpc
from weft.api.registry.v1.trial_pb2 import (
    VERDICT_AGAINST,
    VERDICT_CANDIDATE,
    VERDICT_SAME,
    Trial,
    TrialManifest,
)
from weft.kernel.errors.reasons import Reason

WHY = "the kind trial belongs to the extension trials, which is off"


async def applied(mesh: RunningRegistry, **fields: Any) -> list[str]:
    """The outcome of declaring a trial."""
    given: dict[str, Any] = {"name": "t", "candidate": "m2", "against": "m1", "tenant": "acme", "share_percent": 10}
    return await mesh.apply(declared(trial=TrialManifest(**(given | fields))))


async def judged(mesh: RunningRegistry, task: str, verdict: Any = VERDICT_SAME, **fields: str) -> Trial:
    stub: Any = trial_service_pb2_grpc.TrialServiceStub(mesh.channel)
    request = pb.JudgePairRequest(task=task, verdict=verdict, **({"trial": "t"} | fields))
    return cast("Trial", (await stub.JudgePair(request)).trial)


async def test_verdicts_survive_another_apply_and_a_restart(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        await mesh.apply(declare("m1"), declare("m2"))
        assert await applied(mesh) == ["trial t created"]
        watch = await mesh.watch()
        await judged(mesh, "task-1", VERDICT_CANDIDATE)
        [told] = [cast("Any", (await watch.read()).change.resource)]
        assert (told.kind, told.name) == ("trial", "t")
        assert dict((await judged(mesh, "task-2", tenant="acme")).verdicts) == {
            "task-1": VERDICT_CANDIDATE,
            "task-2": VERDICT_SAME,
        }
        assert await applied(mesh) == ["trial t unchanged"]
        assert await applied(mesh, share_percent=20) == ["trial t configured"]
    async with running_registry(tmp_path) as mesh:
        [kept] = await mesh.listed("trial")
        assert dict(kept.verdicts) == {"task-1": VERDICT_CANDIDATE, "task-2": VERDICT_SAME}
        assert (kept.manifest.share_percent, kept.manifest.max_pairs) == (20, 100)
        assert (await judged(mesh, "task-1", VERDICT_AGAINST)).verdicts["task-1"] == VERDICT_AGAINST


async def test_trial_of_another_tenant_is_not_there_for_a_verdict(mesh: RunningRegistry) -> None:
    await mesh.apply(declare("m1"), declare("m2"))
    await applied(mesh)
    for fields in ({"tenant": "other"}, {"trial": "none"}):
        error = await refusal(Reason.NOT_FOUND, judged(mesh, "task-1", **fields))
        assert "there is no trial" in error.message
    assert not (await mesh.listed("trial"))[0].verdicts


async def test_verdicts_of_a_trial_are_bounded_but_may_be_changed(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        await mesh.apply(declare("m1"), declare("m2"))
        await applied(mesh)
        [record] = await mesh.listed("trial")
        record.verdicts.update({f"task-{number}": VERDICT_SAME for number in range(MAX_VERDICTS)})
        await mesh.service._core.store.save_documents([record])
    async with running_registry(tmp_path) as mesh:
        await refusal(Reason.TOO_MANY_RESOURCES, judged(mesh, "task-new"))
        assert (await judged(mesh, "task-0", VERDICT_AGAINST)).verdicts["task-0"] == VERDICT_AGAINST


async def test_invalid_trial_is_refused_with_its_field(mesh: RunningRegistry) -> None:
    await mesh.apply(declare("m1"), declare("m2"))
    for fields, wrong in (
        ({"candidate": "m1"}, "candidate"),
        ({"share_percent": 0}, "share_percent"),
        ({"share_percent": 101}, "share_percent"),
        ({"max_pairs": 1_001}, "max_pairs"),
        ({"tenant": ""}, "tenant"),
        # The kind of a pair's origin holds the name.
        ({"name": "n" * 59}, "name"),
    ):
        error = await refusal(Reason.INVALID_ARGUMENT, applied(mesh, **fields))
        assert error.metadata["field"].endswith(f"trial.{wrong}")


async def test_models_of_a_trial_must_exist(mesh: RunningRegistry) -> None:
    await mesh.apply(declare("m1"), declare("m2"))
    await refusal(Reason.MODEL_NOT_FOUND, applied(mesh, candidate="m3"))


async def test_registry_refuses_a_trial_and_keeps_a_stored_one_for_the_day_the_extension_is_on(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        await mesh.apply(declare("m1"), declare("m2"))
        await applied(mesh)
    with capture_logs() as logs:
        async with running_registry(tmp_path, kinds_off={"trial": WHY}) as mesh:
            assert await mesh.listed("trial") == []
            removed = mesh.service.removed
            assert removed == (f"{WHY}. Stored and not used: trial/t",)
            assert not [name for name in mesh.service.service_names if "Trial" in name]
            error = await refusal(Reason.INVALID_ARGUMENT, applied(mesh))
            assert WHY in error.message
            await mesh.delete("model", "m2")
    assert [each["why"] for each in logs if each["event"] == "stored resources are not used"] == list(removed)
    async with running_registry(tmp_path) as mesh:
        assert [each.manifest.name for each in await mesh.listed("trial")] == ["t"]
