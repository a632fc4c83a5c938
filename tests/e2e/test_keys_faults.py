"""Keys of a registry that is killed, and of one that must not start."""

import asyncio
import os
import signal
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from registry_process import key_ring, key_stub, serving_registry, stop_in_order, weft

from weft.api.registry.v1 import key_service_pb2 as pb
from weft.kernel.access.principal import authenticate

ROUNDS = 3
MAKERS = 4
AFTER = 15
"""Keys that are acknowledged before the registry is killed."""
CALL_SECONDS = 20.0


async def make_until_it_dies(home: Path, made: list[str], enough: asyncio.Event) -> None:
    async with key_stub(home) as keys:
        while True:
            try:
                made.append((await keys.CreateKey(pb.CreateKeyRequest(), timeout=CALL_SECONDS)).text)
            except grpc.aio.AioRpcError:
                return
            if len(made) >= AFTER:
                enough.set()


@pytest.mark.nightly("kills a registry in a storm of creations")
async def test_acknowledged_keys_work_after_a_kill_during_key_creation(tmp_path: Path) -> None:
    acknowledged: list[str] = []
    revoked = ""
    for _ in range(ROUNDS):
        with serving_registry(tmp_path) as process:
            made: list[str] = []
            enough = asyncio.Event()
            async with asyncio.TaskGroup() as makers:
                for _maker in range(MAKERS):
                    makers.create_task(make_until_it_dies(tmp_path, made, enough))
                async with asyncio.timeout(CALL_SECONDS):
                    await enough.wait()
                os.kill(process.pid, signal.SIGKILL)
        acknowledged += made
        with serving_registry(tmp_path) as process:
            ring = await key_ring(tmp_path)
            for text in acknowledged:
                assert authenticate(ring, text, datetime.now(UTC))
            revoked = acknowledged.pop()
            assert weft(tmp_path, "keys", "revoke", revoked.split("_")[1]).exit_code == 0
            os.kill(process.pid, signal.SIGKILL)
    with serving_registry(tmp_path) as process:
        assert revoked.split("_")[1] not in (await key_ring(tmp_path)).keys
        stop_in_order(process)


async def test_registry_without_its_pepper_reports_the_fix_and_changes_nothing(tmp_path: Path) -> None:
    with serving_registry(tmp_path) as process:
        text = weft(tmp_path, "keys", "create", "-o", "name").stdout.strip()
        stop_in_order(process)
    pepper = tmp_path / "state" / "key-pepper"
    hidden = pepper.rename(tmp_path / "hidden")
    with pytest.raises(AssertionError, match="key-pepper"), serving_registry(tmp_path):
        pass
    assert "backup" in (tmp_path / "registry.err").read_text()
    assert list(pepper.parent.glob("key-pepper*")) == []
    hidden.rename(pepper)
    with serving_registry(tmp_path) as process:
        assert authenticate(await key_ring(tmp_path), text, datetime.now(UTC))
        stop_in_order(process)
    pepper.unlink()
    with serving_registry(tmp_path, keys={"revoke_all_if_pepper_lost": True}) as process:
        assert (await key_ring(tmp_path)).keys == {}
        assert text.split("_")[1] in weft(tmp_path, "keys", "list", "-o", "name").stdout
        stop_in_order(process)
