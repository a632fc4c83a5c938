"""Durable tasks: how fast they are accepted and begun, what many of them cost, and what they weigh."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import yaml

from bench import measures
from bench.contender import WEFT
from bench.cpu import MB
from bench.launch import LaunchError, own_mesh
from bench.load import percentile
from bench.report import Figures
from bench.scenarios import SETTLE_SECONDS, Options
from bench.submissions import SubmitJob, SubmitResult
from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.sql_store import SqlTaskStore
from router_svc.durable.tasks.task_records import Lane, NewTask, TaskOutcome
from router_svc.store.database import RouterDatabase
from weft.api.router.v1.task_pb2 import TASK_STATE_COMPLETED, Task
from weft.api.router.v1.task_service_pb2 import GetTaskResponse
from weft.client.tasks import Tasks, connect_tasks
from weft.kernel.requests.request_values import Priority
from weft_testing.fake_backend.process import fake_backend_command

MODEL, AWAY = "tasks", "away"
CLIENTS = 64
WAITING = 100_000
STARTS = 200
CLAIMS = 500
LONGEST_SECONDS = 60.0
PENDING_LIMIT_SECONDS = 86_400.0


def measure_tasks(options: Options, figures: Figures, folder: Path) -> None:
    """Measures submissions, starts and claims, each on a new mesh or database."""
    for number in range(options.repetitions):
        with _mesh(folder / f"submits-{number}") as mesh:
            _add_submits(figures, _submitted(mesh.submissions(seconds=options.seconds)))
    with _mesh(folder / "starts") as mesh:
        starts = _starts(mesh, STARTS)
    figures.add(measures.TASK_START_P50, WEFT.name, 1e3 * percentile(starts, 0.50))
    with _mesh(folder / "crowd") as mesh:
        _submitted(mesh.submissions(most=100))
        before = _rss(mesh)
        _submitted(mesh.submissions(most=WAITING))
        figures.add(measures.TASK_MEMORY, WEFT.name, (_rss(mesh) - before) / MB, f"before: {before / MB:.1f} MB")
    for number in range(options.repetitions):
        few, many = (
            asyncio.run(_claims(folder / f"claims-{number}-{waiting}", waiting)) for waiting in (1_000, WAITING)
        )
        figures.add(measures.TASK_CLAIM[1_000], WEFT.name, 1e6 * few)
        figures.add(measures.TASK_CLAIM[WAITING], WEFT.name, 1e6 * many)
        figures.add(measures.TASK_CLAIM_RATIO, WEFT.name, many / few)


@dataclass(frozen=True, slots=True)
class _Mesh:
    host: psutil.Process
    home: Path
    request_log: Path

    def submissions(self, *, seconds: float = 0.0, most: int = 10_000_000) -> SubmitJob:
        address = str(json.loads((self.home / "run" / "up.json").read_text())["grpc"])
        return SubmitJob(address=address, model=AWAY, clients=CLIENTS, seconds=seconds, most=most)


@contextmanager
def _mesh(folder: Path) -> Iterator[_Mesh]:
    folder.mkdir(parents=True, exist_ok=True)
    config, request_log = folder / "weft.yaml", folder / "engine.jsonl"
    runner = {
        "name": "box",
        "command": [*fake_backend_command(), "--request-log", str(request_log)],
        "models": [{"name": MODEL, "path": __file__, "slots": 8, "context_tokens": 8_192}],
    }
    config.write_text(yaml.safe_dump({"runners": [runner]}))
    with own_mesh(folder, MODEL, config) as (host, home):
        yield _Mesh(host, home, request_log)


def _submitted(job: SubmitJob) -> SubmitResult:
    done = subprocess.run(
        [sys.executable, "-m", "bench.submissions"], input=msgspec.json.encode(job), stdout=subprocess.PIPE, check=True
    )
    return msgspec.json.decode(done.stdout, type=SubmitResult)


def _add_submits(figures: Figures, result: SubmitResult) -> None:
    rate = result.acknowledged / result.seconds
    figures.add(measures.TASK_SUBMITS, WEFT.name, rate, f"{result.refused} refused")
    figures.add(measures.TASK_SUBMIT_P99, WEFT.name, 1e3 * percentile(result.latencies, 0.99))


def _starts(mesh: _Mesh, count: int) -> list[float]:
    """Seconds from each claim to the moment at which the engine had the request; both by this machine's clock."""
    with connect_tasks(home=mesh.home) as tasks:
        claimed = {
            done.task.id: done.attempts[-1].claim_time.ToNanoseconds() / 1e9
            for done in (_done(tasks) for _ in range(count))
        }
    lines = map(json.loads, mesh.request_log.read_text().splitlines())
    begun = {line["request_id"]: line["at"] for line in lines if line["event"] == "begun"}
    return [begun[task_id] - at for task_id, at in claimed.items()]


def _done(tasks: Tasks) -> GetTaskResponse:
    submitted = tasks.submit_chat(MODEL, "hi", max_tokens=4)
    for _ in tasks.watch(submitted.id, timeout_seconds=LONGEST_SECONDS):
        pass
    done = tasks.get(submitted.id)
    if done.task.state != TASK_STATE_COMPLETED:
        raise LaunchError(f"the task {done.task.id} did not complete")
    return done


def _rss(mesh: _Mesh) -> int:
    time.sleep(SETTLE_SECONDS)
    return int(mesh.host.memory_info().rss)


async def _claims(folder: Path, waiting: int) -> float:
    """Seconds per task that is found, claimed and ended, one after another, while so many wait."""
    limits = TaskLimits()
    store = SqlTaskStore(RouterDatabase(f"sqlite:///{folder / 'router.db'}"))
    await store.start()
    try:
        lane = Lane("away", "default", Priority.DURABLE)
        for first in range(0, waiting + CLAIMS, 1_000):
            await asyncio.gather(*(store.submit(_new(lane, number)) for number in range(first, first + 1_000)))
        began = time.perf_counter()
        for number in range(CLAIMS):
            now = 1e6 + number
            (task,) = await store.pending(lane, now, 1, limits.max_peeked_bytes)
            claim = await store.claim(task.id, "bench", now, now + limits.lease_seconds)
            assert claim is not None
            assert await store.end(claim, TaskOutcome(state=TASK_STATE_COMPLETED), now)
        return (time.perf_counter() - began) / CLAIMS
    finally:
        await store.stop()


def _new(lane: Lane, number: int) -> NewTask:
    return NewTask(
        task=Task(id=f"task-{number:024x}", tenant=lane.tenant, model=lane.model, max_attempts=5),
        band=lane.band,
        digest=b"d" * 32,
        spec=b"s" * 200,
        pending_limit_seconds=PENDING_LIMIT_SECONDS,
        created_at=1e6,
    )
