"""A runner whose model is replaced while the runner runs."""

import asyncio
from datetime import timedelta
from pathlib import Path

from instance_stage import StepBackend

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_service import RunnerService, build
from weft.api.common.v1.receipt_pb2 import Receipt
from weft.api.runner.v1.ticket_pb2 import Ticket, TicketClaims
from weft.dispatch.tickets import sign
from weft_testing.fake_clock import FakeClock, let_all_run

KEY = b"k" * 32


def _model(engine: StepBackend, *, remote: bool = False) -> ServedModel:
    return ServedModel(name="m", make_backend=lambda: engine, remote=remote)


async def _serving(folder: Path, clock: FakeClock, model: ServedModel) -> RunnerService:
    config = RunnerConfig(
        name="r",
        host="here",
        address="unix:/nowhere",
        registry_address="unix:/nowhere",
        session_file=folder / "r.session",
        models=(),
    )
    service = build(config, clock=clock)
    await service.serve(model)
    return service


async def test_replacement_cancelled_while_it_loads_ends_its_engine_and_leaves_the_old_one(tmp_path: Path) -> None:
    """Nothing knew of that engine any more: it kept its memory, even after the runner had stopped."""
    clock, old, new = FakeClock(), StepBackend(), StepBackend()
    service = await _serving(tmp_path, clock, _model(old))
    replacing = asyncio.create_task(service.replace(_model(new)))
    await let_all_run()
    assert (new.starts, new.stops) == (1, 0)
    replacing.cancel()
    await asyncio.wait({replacing})
    assert replacing.cancelled()
    assert (new.stops, old.stops) == (1, 0)
    assert service.is_served("m")
    await service.stop(0.0)
    assert old.stops == 1


async def test_model_that_is_withdrawn_while_its_replacement_loads_is_replaced(tmp_path: Path) -> None:
    clock, old, new = FakeClock(), StepBackend(), StepBackend()
    service = await _serving(tmp_path, clock, _model(old))
    replacing = asyncio.create_task(service.replace(_model(new)))
    await let_all_run()
    service.withdraw("m")
    new.loaded.set()
    await clock.advance(1.0)
    await replacing
    assert service.is_served("m")
    await service.stop(0.0)
    assert (old.stops, new.stops) == (1, 1)


async def test_local_model_that_replaces_a_remote_one_sends_nothing_to_a_provider(tmp_path: Path) -> None:
    """Its requests were rejected unless they allowed remote models, and their receipts said `left_premises`."""
    clock, new = FakeClock(), StepBackend()
    new.loaded.set()
    service = await _serving(tmp_path, clock, _model(StepBackend(), remote=True))
    replacing = asyncio.create_task(service.replace(_model(new)))
    await let_all_run()
    await clock.advance(1.0)
    await replacing
    claims = TicketClaims(
        ticket_id="t", runner="r", runner_incarnation=service.describe().runner.incarnation, model="m"
    )
    claims.expire_time.FromDatetime(clock.utc_now() + timedelta(seconds=30))
    raw = claims.SerializeToString()
    service._gate.use_key(KEY)
    permit, instance = service.admission.admit(Ticket(claims=raw, mac=sign(raw, KEY)))
    receipt = Receipt()
    service.admission.complete(receipt, permit, instance)
    assert not receipt.left_premises
    await service.stop(0.0)
