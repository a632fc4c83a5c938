"""Captured prompts and answers on a running registry: who stores and reads them, and when they are deleted."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import structlog
from kit.refusals import refused
from kit.resources import declared
from registry_harness import RunningRegistry, running_registry

from registry_svc.registry_config import MEBIBYTE, CapturesConfig, SecretsConfig
from weft.api.operations.v1 import operation_service_pb2, operation_service_pb2_grpc
from weft.api.registry.v1 import capture_service_pb2 as pb
from weft.api.registry.v1 import capture_service_pb2_grpc
from weft.api.registry.v1.tenant_pb2 import TenantManifest
from weft.dispatch.captured import MAX_TEXT_BYTES
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import let_all_run

PROMPT, ANSWER = "canary of a prompt", "canary of an answer"


class Stage:
    """A registry with captures, and what its audit log has about them."""

    def __init__(self, mesh: RunningRegistry) -> None:
        self.mesh = mesh
        self.stub: Any = capture_service_pb2_grpc.CaptureServiceStub(mesh.channel)

    async def switch(self, tenant: str = "acme", *, capture: bool = True) -> None:
        await self.mesh.apply(declared(tenant=TenantManifest(name=tenant, capture=capture)))

    async def store(self, request_id: str = "r1", tenant: str = "acme", answer: str = ANSWER) -> None:
        capture = pb.Capture(request_id=request_id, tenant=tenant, prompt=PROMPT, answer=answer)
        await self.stub.StoreCapture(pb.StoreCaptureRequest(capture=capture))

    async def read(self, request_id: str = "r1", tenant: str = "", reader: str = "key:ann") -> pb.Capture:
        request = pb.GetCaptureRequest(request_id=request_id, tenant=tenant, requested_by=reader)
        return cast("pb.Capture", (await self.stub.GetCapture(request)).capture)

    async def audited(self) -> list[tuple[str, str, dict[str, Any]]]:
        audit: Any = operation_service_pb2_grpc.OperationServiceStub(self.mesh.channel)
        entries = (await audit.ListAuditEntries(operation_service_pb2.ListAuditEntriesRequest())).entries
        return [(entry.event, entry.actor, json.loads(entry.detail)) for entry in entries]


@asynccontextmanager
async def _stage(folder: Path, **settings: float) -> AsyncIterator[Stage]:
    config = {"secrets": SecretsConfig(key_file=folder / "secret-keys"), "captures": CapturesConfig(**settings)}  # type: ignore[arg-type]
    async with running_registry(folder, **cast("dict[str, Any]", config)) as mesh:
        yield Stage(mesh)


def _on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as lines:
        yield cast("list[Any]", lines)


async def test_capture_is_on_disk_and_in_logs_only_encrypted_and_outlives_a_restart(
    tmp_path: Path, logged: list[Any]
) -> None:
    async with _stage(tmp_path) as stage:
        await stage.switch()
        await stage.store()
        stored = _on_disk(tmp_path)
    async with _stage(tmp_path) as stage:
        found = await stage.read()
        audited = await stage.audited()
    assert (found.prompt, found.answer, found.tenant) == (PROMPT, ANSWER, "acme")
    assert b"acme r1" in stored, "a negative control: what is not encrypted is found"
    for text in (PROMPT, ANSWER):
        assert text.encode() not in stored + _on_disk(tmp_path)
        assert text not in f"{logged}{audited}"


async def test_switching_and_each_reading_have_an_audit_entry(tmp_path: Path) -> None:
    async with _stage(tmp_path) as stage:
        await stage.switch()
        await stage.switch()
        await stage.store()
        await stage.read()
        await stage.read(tenant="acme", reader="key:bob")
        await stage.mesh.delete("tenant", "acme", requested_by="key:eve")
        read = {"request_id": "r1", "tenant": "acme"}
        switched = "capture.switch_requested"
        assert await stage.audited() == [
            (switched, "local", {"tenant": "acme", "capture": True}),
            ("capture.read", "key:ann", read),
            ("capture.read", "key:bob", read),
            (switched, "key:eve", {"tenant": "acme", "capture": False}),
        ]


async def test_nothing_is_stored_of_a_tenant_without_capture(tmp_path: Path) -> None:
    async with _stage(tmp_path) as stage:
        await stage.switch("other")
        await stage.store()
        with refused(Reason.NOT_FOUND):
            await stage.read()
        assert b"acme r1" not in _on_disk(tmp_path)


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_switching_off_or_deleting_the_tenant_deletes_its_captures_only(tmp_path: Path, is_deleted: bool) -> None:
    async with _stage(tmp_path) as stage:
        for tenant in ("acme", "other"):
            await stage.switch(tenant)
            await stage.store(tenant=tenant)
        if is_deleted:
            await stage.mesh.delete("tenant", "acme")
        else:
            await stage.switch(capture=False)
        with refused(Reason.NOT_FOUND):
            await stage.read(tenant="acme")
        await stage.mesh.advance(5.0)
        await stage.switch()
        with refused(Reason.NOT_FOUND):
            await stage.read(tenant="acme")
        assert (await stage.read(tenant="other")).prompt == PROMPT
        assert ("capture.switch_requested", {"tenant": "acme", "capture": False}) in [
            (event, detail) for event, _, detail in await stage.audited()
        ]


async def test_captures_are_deleted_by_age_and_the_oldest_beyond_the_size(tmp_path: Path) -> None:
    async with _stage(tmp_path, keep_seconds=600.0, max_mb=1) as stage:
        await stage.switch()
        count = MEBIBYTE // MAX_TEXT_BYTES + 1
        for number in range(count):
            await stage.store(f"r{number}", answer="a" * MAX_TEXT_BYTES)
        with refused(Reason.NOT_FOUND):
            await stage.read("r0")
        assert len((await stage.read(f"r{count - 1}")).answer) == MAX_TEXT_BYTES
        await stage.mesh.advance(605.0)
        with refused(Reason.NOT_FOUND):
            await stage.read(f"r{count - 1}")


async def test_registry_starts_without_the_key_of_its_captures_and_deletes_them(tmp_path: Path) -> None:
    async with _stage(tmp_path) as stage:
        await stage.switch()
        await stage.store()
    (tmp_path / "secret-keys").unlink()
    async with _stage(tmp_path) as stage:
        with refused(Reason.NOT_FOUND):
            await stage.read()
        await stage.store()
        assert (await stage.read()).prompt == PROMPT


async def test_capture_cannot_be_switched_on_in_a_registry_without_a_key_file(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        stage = Stage(mesh)
        with refused(Reason.UNSUPPORTED_OPERATION):
            await stage.switch()
        await stage.switch(capture=False)


async def test_longer_text_than_the_bound_is_refused(tmp_path: Path) -> None:
    async with _stage(tmp_path) as stage:
        await stage.switch()
        with refused(Reason.INVALID_ARGUMENT, field="capture.answer"):
            await stage.store(answer="é" * (MAX_TEXT_BYTES // 2 + 1))


async def test_sweep_spares_a_capture_that_was_stored_again_meanwhile(tmp_path: Path) -> None:
    async with _stage(tmp_path, keep_seconds=600.0) as stage:
        await stage.switch()
        await stage.store(answer="old")
        captures = stage.mesh.service._captures
        async with captures._writer.turn():
            storing = asyncio.ensure_future(captures.store(pb.Capture(request_id="r1", tenant="acme", answer="new")))
            await let_all_run()
            stage.mesh.clock.set_wall(601.0)
            sweeping = asyncio.ensure_future(captures.sweep())
            await let_all_run()
        await asyncio.gather(storing, sweeping)
        assert (await stage.read()).answer == "new"


async def test_capture_stored_with_a_fast_clock_is_kept_no_longer(tmp_path: Path) -> None:
    async with _stage(tmp_path, keep_seconds=600.0) as stage:
        await stage.switch()
        stage.mesh.clock.set_wall(86_400.0)
        await stage.store()
        stage.mesh.clock.set_wall(-86_400.0)
        await stage.mesh.advance(615.0)
        with refused(Reason.NOT_FOUND):
            await stage.read()
