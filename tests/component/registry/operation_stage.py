"""Operations without a server: a real store, runners that do as a script says, and a clock that stands still."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from registry_svc.mesh.runner_calls import EvictionAnswer, EvictionRequest, RunnerCalls
from registry_svc.mesh.store import SqlStore
from registry_svc.operations.governance import Gatekeeper
from registry_svc.operations.job import JobDeps
from registry_svc.operations.operation_store import OperationStore
from registry_svc.operations.operations import Operations
from registry_svc.operations.policy.loads import LoadTimes, PoolMember
from registry_svc.operations.runner_presence import RunnerPresence
from registry_svc.operations.targets import AddedModelView, RunnerDirectory
from registry_svc.registry_config import OperationLimits
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_pb2 import Operation
from weft.api.operations.v1.operation_service_pb2 import AuditEntry, CreateOperationRequest
from weft.api.runner.v1 import added_model_pb2, load_pb2, runner_service_pb2
from weft.api.runner.v1.model_store_pb2 import PullProgress, StoredModel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing
from weft_testing.fake_clock import FakeClock

WAIT_LIMIT_SECONDS = 20.0
LoadResponse = runner_service_pb2.LoadResponse
Action = operation_pb2.OperationAction


def loaded(memory_bytes: int = 100, seconds: int = 30, *, was_loaded: bool = False) -> LoadResponse:
    result = runner_service_pb2.LoadResult(memory_bytes=memory_bytes, memory_measured=True, was_loaded=was_loaded)
    result.load_time.FromSeconds(seconds)
    return LoadResponse(result=result)


def said(stage: str, share: float | None = None, eta_seconds: int | None = None) -> LoadResponse:
    progress = runner_service_pb2.LoadProgress(stage=stage, progress=share)
    if eta_seconds is not None:
        progress.eta.FromSeconds(eta_seconds)
    return LoadResponse(progress=progress)


def load(model: str = "m1", *, evict: str = "", replicas: int = 0, context: int = 0) -> Action:
    message = operation_pb2.LoadModel(model=model, evict_model=evict, replicas=replicas)
    if context:
        message.options.parameters["context_tokens"].CopyFrom(load_pb2.LoadValue(integer=context))
    return Action(load_model=message)


def unload(model: str = "m1") -> Action:
    return Action(unload_model=operation_pb2.UnloadModel(model=model))


def flush(
    scope: runner_service_pb2.FlushCacheRequest.Scope.ValueType, *, model: str = "", tenant: str = "", runner: str = ""
) -> Action:
    return Action(flush_cache=operation_pb2.FlushCache(scope=scope, model=model, tenant=tenant, runner=runner))


@dataclass
class ScriptedCalls(RunnerCalls):
    """A load waits for what `answer` says of its model; unloads succeed at once unless held."""

    heard: list[str] = field(default_factory=list)
    """Every call and every end of a load without a result, in order."""
    requests: list[runner_service_pb2.FlushCacheRequest] = field(default_factory=list)
    options: list[load_pb2.LoadOptions] = field(default_factory=list)
    loaded_with: dict[str, load_pb2.LoadOptions] = field(default_factory=dict)
    """How models are loaded now, whatever their runner."""
    failures: dict[str, list[WeftError]] = field(default_factory=dict)
    """Of unloads by model and of flushes by runner, one per call."""
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    """Unloads by model, and flushes by runner, that wait."""
    engines: list[runner_service_pb2.InstanceDescription] = field(default_factory=list)
    """The engines that may serve a source."""
    pulls: "asyncio.Queue[PullProgress | StoredModel | WeftError]" = field(default_factory=asyncio.Queue)
    """What pulls say, one after the other."""
    add_progress: list[PullProgress] = field(default_factory=list)
    """What each model that is added says before it is served."""
    _answers: defaultdict[str, "asyncio.Queue[LoadResponse | WeftError]"] = field(
        default_factory=lambda: defaultdict(asyncio.Queue)
    )

    def answer(self, model: str, *answers: LoadResponse | WeftError) -> None:
        for each in answers:
            self._answers[model].put_nowait(each)

    async def load(
        self, runner: str, model: str, options: load_pb2.LoadOptions, *, operation_id: str
    ) -> AsyncGenerator[LoadResponse]:
        del operation_id
        self.heard.append(f"load {model} on {runner}")
        self.options.append(options)
        over = False
        try:
            while not over:
                answer = await self._answers[model].get()
                over = isinstance(answer, WeftError) or answer.WhichOneof("kind") == "result"
                if isinstance(answer, WeftError):
                    raise answer
                yield answer
        finally:
            if not over:
                # As a runner does, it takes a moment until it has stopped.
                await asyncio.sleep(0)
                self.heard.append(f"load {model} stopped")

    async def unload(self, runner: str, model: str, *, operation_id: str) -> runner_service_pb2.UnloadResponse:
        del operation_id
        self.heard.append(f"unload {model} on {runner}")
        await self._pass(model)
        return runner_service_pb2.UnloadResponse(memory_freed_bytes=7, cache_flushed=True)

    async def flush_cache(
        self, runner: str, request: runner_service_pb2.FlushCacheRequest, *, operation_id: str
    ) -> runner_service_pb2.FlushCacheResponse:
        del operation_id
        self.heard.append(f"flush {request.model or 'all'} on {runner}")
        self.requests.append(request)
        await self._pass(runner)
        return runner_service_pb2.FlushCacheResponse(entry_count=2, token_count=50)

    async def pull(
        self, runner: str, request: operation_pb2.PullModel, *, operation_id: str
    ) -> AsyncGenerator[runner_service_pb2.PullModelResponse]:
        del operation_id
        self.heard.append(f"pull {request.source} on {runner}")
        over = False
        try:
            while not over:
                answer = await self.pulls.get()
                if isinstance(answer, WeftError):
                    over = True
                    raise answer
                over = isinstance(answer, StoredModel)
                yield (
                    runner_service_pb2.PullModelResponse(model=answer)
                    if isinstance(answer, StoredModel)
                    else runner_service_pb2.PullModelResponse(progress=answer)
                )
        finally:
            if not over:
                self.heard.append(f"pull {request.source} stopped")

    async def load_options(self, runner: str) -> dict[str, load_pb2.LoadOptions]:
        self.heard.append(f"options of {runner}")
        return self.loaded_with

    async def source_engines(self, runner: str, source: str) -> list[runner_service_pb2.InstanceDescription]:
        if failures := self.failures.get(f"engines of {runner}"):
            raise failures.pop(0)
        return self.engines

    async def add_model(
        self, runner: str, name: str, request: operation_pb2.LoadModel, *, operation_id: str
    ) -> AsyncGenerator[runner_service_pb2.AddModelResponse]:
        del operation_id
        self.heard.append(f"add {request.source} as {name} on {runner}")
        for progress in self.add_progress:
            yield runner_service_pb2.AddModelResponse(progress=progress)
        if failures := self.failures.get(f"add {name}"):
            raise failures.pop(0)
        added = added_model_pb2.AddedModel(name=name, source=request.source, runtime="llama_server", reasons=["so"])
        yield runner_service_pb2.AddModelResponse(model=added)

    async def remove_model(
        self, runner: str, model: str, *, operation_id: str
    ) -> runner_service_pb2.RemoveModelResponse:
        del operation_id
        self.heard.append(f"remove {model} on {runner}")
        return runner_service_pb2.RemoveModelResponse(
            memory_freed_bytes=9, model=added_model_pb2.AddedModel(name=model, source="hf:some/repo")
        )

    async def evict(self, request: EvictionRequest) -> EvictionAnswer:
        raise AssertionError(f"operations ask nobody to yield: {request}")

    async def _pass(self, name: str) -> None:
        if (gate := self.held.get(name)) is not None:
            await gate.wait()
        if failures := self.failures.get(name):
            raise failures.pop(0)


@dataclass
class FakeDirectory(RunnerDirectory):
    """Models by runner; every model is in a pool of its own, or in those of `pools`."""

    models: dict[str, str] = field(default_factory=lambda: {"m1": "r1", "m2": "r1", "m3": "r2"})
    pools: dict[str, list[PoolMember]] = field(default_factory=dict)
    adding: list[str] = field(default_factory=lambda: ["r1"])
    """Runners that serve models by their source."""
    attaching: list[str] = field(default_factory=lambda: ["r1"])
    """Runners that attach servers."""
    servers: dict[str, list[str]] = field(default_factory=dict)
    """Attached servers by runner."""
    added: list[AddedModelView] = field(default_factory=list)
    runners: dict[str, str | None] = field(default_factory=lambda: {"r1": "i1", "r2": "i1"})
    """Incarnations of active runners; None: inactive."""

    def runner_of(self, model: str) -> str | None:
        return self.models.get(model)

    def holder_of(self, model: str) -> str | None:
        return self.models.get(model)

    def pool(self, name: str) -> tuple[PoolMember, ...]:
        if name in self.pools:
            return tuple(self.pools[name])
        return (PoolMember(model=name, reachable=True, loaded=False),) if name in self.models else ()

    def names_pool(self, name: str) -> bool:
        return name in self.pools

    def incarnation_of(self, runner: str) -> str | None:
        return self.runners.get(runner)

    def active_runners(self) -> list[str]:
        return sorted(name for name, incarnation in self.runners.items() if incarnation is not None)

    def is_active(self, runner: str) -> bool:
        return runner in self.active_runners()

    def adding_runners(self, *, joined: bool = False) -> list[str]:
        return [name for name in self.active_runners() if name in self.adding]

    def attaching_runners(self) -> list[str]:
        return [name for name in self.active_runners() if name in self.attaching]

    def runner_of_server(self, server: str) -> str | None:
        return next((runner for runner in self.active_runners() if server in self.servers.get(runner, ())), None)

    def added_models(self) -> list[AddedModelView]:
        return [each for each in self.added if self.is_active(each.runner)]

    def known_names(self) -> list[str]:
        return [*self.models, *self.pools]

    def runner_names(self) -> list[str]:
        return list(self.runners)

    def is_taken(self, name: str) -> bool:
        return name in self.models or name in self.pools or name in self.runners

    def lose(self, runner: str) -> None:
        self.runners[runner] = None

    def restart(self, runner: str, incarnation: str = "i2") -> None:
        self.runners[runner] = incarnation


def id_of(operation: str) -> str:
    """The id in the name of an operation."""
    return operation.removeprefix("operations/")


@dataclass
class Stage:
    """Operations on a database in memory that outlives them."""

    database: SqlStore
    store: OperationStore
    clock: FakeClock = field(default_factory=FakeClock)
    calls: ScriptedCalls = field(default_factory=ScriptedCalls)
    directory: FakeDirectory = field(default_factory=FakeDirectory)
    gatekeeper: Gatekeeper = field(default_factory=Gatekeeper)
    settings: OperationLimits = field(default_factory=OperationLimits)
    tracing: Tracing = NO_TRACING
    operations: Operations = field(init=False)
    _asked: int = 0

    async def start(self) -> None:
        """A new life of the registry on the same database."""
        tools = JobDeps(
            calls=self.calls,
            directory=self.directory,
            clock=self.clock,
            times=LoadTimes(),
            presence=RunnerPresence(self.directory, self.clock),
        )
        self.operations = Operations(self.store, tools, self.gatekeeper, self.settings, self.tracing)
        await self.operations.start()

    async def restart(self) -> None:
        await self.operations.stop(1.0)
        await self.start()

    def asked(
        self, action: Action, request_id: str = "", *, requested_by: str = "alice", authorization: str = ""
    ) -> CreateOperationRequest:
        self._asked += 1
        return CreateOperationRequest(
            request_id=request_id or f"request-{self._asked}",
            action=action,
            requested_by=requested_by,
            authorization=authorization,
        )

    async def create(self, action: Action, request_id: str = "", **more: str) -> str:
        """The name of the operation."""
        view, _ = await self.operations.create(self.asked(action, request_id, **more))
        return view.name

    async def state(self, operation_id: str) -> Operation.State.ValueType:
        return (await self.operations.get(operation_id)).state

    async def views(self, operation_id: str) -> list[Operation]:
        """Every view until the end, as one hears them who follows from now on."""
        followed = await self.operations.watch(operation_id)
        if isinstance(followed, Operation):
            return [followed]
        async with asyncio.timeout(WAIT_LIMIT_SECONDS):
            with followed:
                return [view async for view in followed]

    async def end(self, operation_id: str) -> Operation:
        """How it ends."""
        return (await self.views(operation_id))[-1]

    async def end_as_time_passes(self, operation_id: str, step_seconds: float) -> Operation:
        """How it ends when that takes time on the clock."""
        ending = asyncio.create_task(self.end(operation_id))
        while not ending.done():
            # A moment of real time for the database, whose work no clock knows.
            await asyncio.wait({ending}, timeout=0.02)
            await self.clock.advance(step_seconds)
        return ending.result()

    async def until_heard(self, *calls: str) -> None:
        """Return once runners have heard these calls, in this order, and nothing else."""
        async with asyncio.timeout(WAIT_LIMIT_SECONDS):
            while self.calls.heard != list(calls):
                assert self.calls.heard == list(calls)[: len(self.calls.heard)], self.calls.heard
                await asyncio.sleep(0.001)

    async def until_stage(self, operation_id: str, stage: str) -> Operation:
        """How it is once it is at this stage."""
        followed = await self.operations.watch(operation_id)
        assert not isinstance(followed, Operation), "it has ended"
        async with asyncio.timeout(WAIT_LIMIT_SECONDS):
            with followed:
                async for view in followed:
                    if view.stage == stage:
                        return view
        raise AssertionError("it ended without that stage")

    async def audit(self) -> list[AuditEntry]:
        return await self.store.page_audit(after_sequence=0, size=10_000)

    async def events(self) -> list[str]:
        return [entry.event.removeprefix("operation.") for entry in await self.audit()]


@asynccontextmanager
async def running_stage(
    gatekeeper: Gatekeeper | None = None,
    url: str = "sqlite://",
    tracing: Tracing = NO_TRACING,
    **settings: float,
) -> AsyncIterator[Stage]:
    database = SqlStore(url)
    await database.open()
    chosen = OperationLimits(**settings)  # type: ignore[arg-type]
    stage = Stage(
        database, OperationStore(database), gatekeeper=gatekeeper or Gatekeeper(), settings=chosen, tracing=tracing
    )
    await stage.start()
    try:
        yield stage
    finally:
        await stage.operations.stop(1.0)
        await database.close()
