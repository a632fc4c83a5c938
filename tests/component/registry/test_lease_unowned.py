"""Leases that no runner of the mesh answers for are shown as such."""

from lease_stage import GIB, Stage, program, use

from registry_svc.mesh.unowned import UnownedModel
from weft.documents.codec import document_of
from weft_app.cli.doctor import unowned_text
from weft_app.cli.records import lease_rows


def unowned(stage: Stage) -> dict[str, bool]:
    return {lease.purpose: lease.unowned for host in stage.ledger.hosts() for lease in host.leases}


async def test_lease_of_an_unpublished_model_is_unowned(stage: Stage) -> None:
    runner = stage.runner()
    await stage.loaded(runner, GIB, purpose="m1")
    await stage.loaded(runner, GIB, purpose="m2")
    await stage.loaded(program(), GIB, purpose="training")
    assert unowned(stage) == {"m1": False, "m2": False, "training": False}
    stage.withdrawn.add(("r1", "m1"))
    assert unowned(stage) == {"m1": True, "m2": False, "training": False}
    assert stage.ledger.unowned_models() == [UnownedModel("r1", "m1")]
    (message,) = stage.ledger.hosts()
    assert [lease.purpose for lease in message.leases if lease.unowned] == ["m1"]
    assert unowned_text(lease_rows([document_of(message)])) == "1 GiB on host-a for m1 of r1"


async def test_orphaned_lease_is_unowned_and_a_releasing_one_is_not(stage: Stage) -> None:
    runner = stage.runner()
    silent, process = await stage.loaded(runner, GIB, purpose="m1")
    await stage.pass_time(200.0)
    assert (stage.states(), unowned(stage)) == (["m1 orphaned"], {"m1": True})
    assert stage.ledger.unowned_models() == [], "its holder cannot be asked to unload it"
    await stage.renew(runner, use(silent, process))
    assert unowned(stage) == {"m1": False}
    stage.withdrawn.add(("r1", "m1"))
    await stage.release(silent)
    assert unowned(stage) == {"m1": False}
