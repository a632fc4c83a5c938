"""What was acknowledged and is missing from the router's database is noticed at the start; nothing else is."""

import asyncio
import errno
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from task_harness import ScriptedCalls, chat_spec

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.failpoints import Failpoints
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_service import TaskService
from router_svc.policy.lost_commits import LossKind
from router_svc.store.commit_count import FLUSH_SECONDS, CommitCountFile
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import task_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import SystemClock

TASKS = 5
TESTS = Path(__file__).parents[2]
ALL = task_service_pb2.ListTasksRequest()


class Place:
    """A home's database and what is kept apart from it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.file = self.state / "router.db"
        self.log = self.state / "router.db-wal"
        self.promised = folder / "router.promised"

    def database(self) -> RouterDatabase:
        return RouterDatabase(f"sqlite:///{self.file}", promise_file=self.promised)

    async def killed(self, tasks: int = TASKS) -> "Place":
        """After the life of a router that acknowledged tasks and left its files as they are at a kill."""
        service = _service(self.database())
        await service.start()
        await _submit(service, tasks)
        left = {path: path.read_bytes() for path in (self.promised, *self.state.iterdir())}
        await service.stop(0)
        for path in self.state.iterdir():
            path.unlink()
        for path, content in left.items():
            path.write_bytes(content)
        return self

    async def loss(self) -> LossKind | None:
        """What the next start says."""
        database = self.database()
        await database.open()
        loss, notice = database.loss, database.notice
        await database.close()
        assert bool(notice) is self.promised_loss.exists()
        return None if loss is None else loss.kind

    @property
    def promised_loss(self) -> Path:
        return CommitCountFile(self.promised).loss_path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def _service(database: RouterDatabase) -> TaskService:
    store = SqlTaskStore(database)
    return TaskService(store, TaskLimits(), ScriptedCalls(), SystemClock(), Failpoints())


async def _submit(service: TaskService, count: int = 1) -> None:
    for _ in range(count):
        await service.tasks.submit("ann", task_service_pb2.SubmitTaskRequest(spec=chat_spec()))


async def _acknowledge_and_die(file: Path, promised: Path) -> None:
    service = _service(RouterDatabase(f"sqlite:///{file}", promise_file=promised))
    await service.start()
    await _submit(service, TASKS)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow("kills or restarts a service")
async def test_restart_after_a_stop_reports_no_loss(place: Place) -> None:
    service = _service(place.database())
    await service.start()
    await _submit(service, TASKS)
    await service.stop(0)
    assert await place.loss() is None
    assert await place.loss() is None


@pytest.mark.slow("kills or restarts a service")
async def test_restart_after_a_kill_reports_no_loss(place: Place) -> None:
    for _ in range(2):
        program = (sys.executable, __file__, str(place.file), str(place.promised))
        router = await asyncio.create_subprocess_exec(*program, env={**os.environ, "PYTHONPATH": str(TESTS)})
        assert await router.wait() == -signal.SIGKILL
        assert place.log.stat().st_size
        assert await place.loss() is None


async def test_database_without_an_acknowledgement_record_reports_no_loss(place: Place) -> None:
    (await place.killed()).promised.unlink()
    assert await place.loss() is None
    assert place.promised.exists()


@pytest.mark.slow("runs whole services")
@pytest.mark.parametrize("words", [b"", b"{", b"[1]", b'{"store_id": 1}', b"\x00" * 256])
async def test_damaged_record_is_recreated(place: Place, words: bytes) -> None:
    (await place.killed()).promised.write_bytes(words)
    assert await place.loss() is None
    await place.killed()
    place.log.write_bytes(b"")
    assert await place.loss() is not None


def _truncated(place: Place) -> None:
    """As a copy that broke off."""
    with place.log.open("r+b") as log:
        log.truncate(0)


def _half(place: Place) -> None:
    with place.log.open("r+b") as log:
        log.truncate(place.log.stat().st_size // 2)


def _overwritten(place: Place) -> None:
    place.log.write_bytes(b"\xff" * place.log.stat().st_size)


def _without_log(place: Place) -> None:
    place.log.unlink()


def _emptied(place: Place) -> None:
    for file in place.state.glob("router.db*"):
        file.unlink()
    place.file.touch()


def _deleted(place: Place) -> None:
    shutil.rmtree(place.state)


DAMAGES: list[Callable[[Place], None]] = [_truncated, _half, _overwritten, _without_log, _emptied, _deleted]


@pytest.mark.slow("runs whole services")
@pytest.mark.parametrize("damage", DAMAGES)
async def test_missing_acknowledged_tasks_are_detected_once_and_reported_until_resolved(
    place: Place, damage: Callable[[Place], None]
) -> None:
    damage(await place.killed())
    assert await place.loss() is not None
    assert await place.loss() is None, "the next start has nothing new to say"
    service = _service(place.database())
    await service.start()
    page = await service.tasks.list_page("ann", ALL)
    assert "are lost" in page.notice
    assert str(place.promised) not in page.notice, "a tenant need not know where the home is"
    await _submit(service)
    place.promised_loss.unlink()
    assert not (await service.tasks.list_page("ann", ALL)).notice
    await service.stop(0)


@pytest.mark.slow("runs whole services")
async def test_older_database_copy_is_detected_and_so_is_a_restored_newer_one(place: Place, tmp_path: Path) -> None:
    older, newer = tmp_path / "older.db", tmp_path / "newer.db"
    _backup((await place.killed()).file, older)
    _backup((await place.killed()).file, newer)
    for copy in (older, newer):
        _deleted(place)
        place.state.mkdir()
        shutil.copy(copy, place.file)
        assert await place.loss() is LossKind.OLDER
        service = _service(place.database())
        await service.start()
        await _submit(service)
        await service.stop(0)


@pytest.mark.slow("runs whole services")
async def test_database_of_another_home_is_detected(place: Place, tmp_path: Path) -> None:
    other = await Place(tmp_path / "other").killed(2 * TASKS)
    await place.killed()
    _deleted(place)
    shutil.copytree(other.state, place.state)
    assert await place.loss() is LossKind.REPLACED


def _backup(file: Path, copy: Path) -> None:
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)


@pytest.mark.parametrize("removal", [_deleted, _emptied])
async def test_router_with_a_removed_home_accepts_nothing(place: Place, removal: Callable[[Place], None]) -> None:
    service = _service(place.database())
    await service.start()
    await _submit(service)
    moved = place.state.with_name("moved")
    shutil.copytree(place.state, moved)
    removal(place)
    for _ in range(2):
        with pytest.raises(WeftError) as refused:
            await _submit(service)
        assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
        assert str(place.file) in refused.value.message
    await service.stop(0)


async def test_home_moved_away_and_back_continues_to_work(place: Place) -> None:
    service = _service(place.database())
    await service.start()
    away = place.state.with_name("away")
    place.state.rename(away)
    with pytest.raises(WeftError):
        await _submit(service)
    away.rename(place.state)
    await _submit(service)
    await service.stop(0)
    assert await place.loss() is None


async def test_no_op_transaction_is_not_counted(place: Place) -> None:
    database = place.database()
    store = SqlTaskStore(database)
    await store.start()
    before = place.promised.read_bytes()
    assert await store.renew("nobody", 1.0) == frozenset()
    assert place.promised.read_bytes() == before
    await store.stop()


async def test_unwritable_record_fails_the_write_and_is_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller got INTERNAL, without a reason and a time to retry."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    service = _service(place.database())
    await service.start()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(WeftError, match=f"{place.promised} cannot be written: No space left") as refused:
            await _submit(service)
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
    assert refused.value.retry_after_seconds
    await _submit(service)
    await service.stop(0)


@pytest.mark.slow("runs whole services")
async def test_record_is_written_to_disk_within_a_second(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, flushes = asyncio.Event(), list[int]()
    loop = asyncio.get_running_loop()
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        flushes.append(descriptor)
        loop.call_soon_threadsafe(flushed.set)

    service = _service(place.database())
    await service.start()
    monkeypatch.setattr(os, "fsync", fsync)
    await _submit(service, 3)
    async with asyncio.timeout(20 * FLUSH_SECONDS):
        await flushed.wait()
    assert len(flushes) == 1, "one for all that was acknowledged meanwhile"
    await service.stop(0)


if __name__ == "__main__":
    asyncio.run(_acknowledge_and_die(Path(sys.argv[1]), Path(sys.argv[2])))
