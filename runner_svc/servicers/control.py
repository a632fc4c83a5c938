"""gRPC servicer of the control plane: describe, wake, load, unload, add and remove models, memory, caches, logs."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from typing_extensions import override

from runner_svc.added_models import AddedModels, ShowPull, shown
from runner_svc.cache.manager import CacheManager
from runner_svc.instance.instance import Instance
from runner_svc.instance.load_messages import load_spec_from, own_quantization
from runner_svc.model_store.peers import SharedModels
from runner_svc.model_store.store import FORMS
from runner_svc.policy.lifecycle import Phase
from runner_svc.policy.load_options import LoadSpec
from runner_svc.policy.repository_files import ModelForm
from runner_svc.session.report import RunnerReport, request_record_message
from runner_svc.supervise.logs import LogBatch
from runner_svc.waiting import end_tasks
from weft.api.runner.v1 import added_model_pb2, load_pb2, model_store_pb2, permit_pb2, runner_service_pb2_grpc
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.tickets import Action, PermitGate, TicketGate
from weft.kernel.channels.rpc import AnsweringServicer, answering
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Priority
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import duration_of
from weft.kernel.values.names import MAX_NAME_CHARS

MAX_LOG_LINES = 1000

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")


class RunnerServicer(AnsweringServicer, runner_service_pb2_grpc.RunnerServiceServicer):
    """See RunnerService."""

    def __init__(
        self,
        report: RunnerReport,
        instances: Mapping[str, Instance],
        *,
        permits: PermitGate,
        tickets: TicketGate,
        cache: CacheManager,
        clock: Clock,
        added: AddedModels | None = None,
    ) -> None:
        """`clock` is the mesh's time of day, by which permits expire. `added` None: models are not added by source."""
        self.shared: SharedModels | None = None
        """The pulled models that other runners may copy; None: none."""
        self._added = added
        self._report = report
        self._instances = instances
        self._permits = permits
        self._tickets = tickets
        self._cache = cache
        self._clock = clock

    @override
    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        _require_line_count("log_line_count", request.log_line_count)
        described = self._report.describe(request.log_line_count)
        if request.checks_engine:
            for description in described.instances:
                claims = await self._instance(description.model).backend.engine_claims()
                description.engine_claims.extend(claims)
        if request.source:
            self._permitted(request.permit, Action.ADD, request.source)
            for known in await asyncio.to_thread(self._adding().load_parameters, request.source):
                described.source_engines.add(load_parameters=known)
        return described

    @override
    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:
        await self._instance(request.model).wake(_priority_of(request.priority or Priority.NORMAL.wire))
        return pb.WakeResponse()

    async def Load(  # type: ignore[override]  # noqa: N802 - the rpc's name; a coroutine that writes
        self, request: pb.LoadRequest, context: Context
    ) -> None:
        """Loads a model. Writes instead of yielding: gRPC would cancel a dropped generator, and the load, later."""
        self._permitted(request.permit, Action.LOAD, request.model)
        instance = self._instance(request.model)
        spec = await self._load_spec(instance, request.options)
        async with aclosing(follow_load(instance, spec, self._clock, self._report.redact)) as responses:
            async for response in responses:
                await context.write(response)

    @override
    async def Unload(self, request: pb.UnloadRequest, context: Context) -> pb.UnloadResponse:
        self._permitted(request.permit, Action.UNLOAD, request.model)
        instance = self._instance(request.model)
        held = instance.memory.held_bytes
        had_process = instance.backend.process_id is not None
        await instance.unload()
        return pb.UnloadResponse(
            memory_freed_bytes=held, cache_flushed=had_process and instance.backend.process_id is None
        )

    async def PullModel(  # type: ignore[override]  # noqa: N802 - as Load
        self, request: pb.PullModelRequest, context: Context
    ) -> None:
        """Pulls a model's files."""
        self._permitted(request.permit, Action.PULL, request.source)
        added, form = self._adding(), form_of(request.form)
        following = follow_pull(lambda show: added.pull(request.source, form, show))
        async with aclosing(following) as steps:
            async for step in steps:
                if isinstance(step, model_store_pb2.StoredModel):
                    await context.write(pb.PullModelResponse(model=step))
                else:
                    await context.write(pb.PullModelResponse(progress=step))

    async def AddModel(  # type: ignore[override]  # noqa: N802 - as Load
        self, request: pb.AddModelRequest, context: Context
    ) -> None:
        """Serves a model by its source."""
        self._permitted(request.permit, Action.ADD, request.source)
        added = self._adding()
        following = follow_pull(lambda show: added.add(request.source, request.name, request.options, show))
        async with aclosing(following) as steps:
            async for step in steps:
                if isinstance(step, added_model_pb2.AddedModel):
                    await context.write(pb.AddModelResponse(model=shown(step)))
                else:
                    await context.write(pb.AddModelResponse(progress=step))

    @override
    async def RemoveModel(self, request: pb.RemoveModelRequest, context: Context) -> pb.RemoveModelResponse:
        self._permitted(request.permit, Action.REMOVE, request.model)
        model, freed = await self._adding().remove(request.model)
        return pb.RemoveModelResponse(memory_freed_bytes=freed, model=model)

    @override
    async def YieldMemory(self, request: pb.YieldMemoryRequest, context: Context) -> pb.YieldMemoryResponse:
        self._permitted(request.permit, Action.YIELD, request.model)
        priority = _priority_of(request.priority)
        wanted_by = "".join(filter(str.isprintable, request.wanted_by[:MAX_NAME_CHARS]))
        instance = self._instance(request.model)
        await instance.yield_memory(request.lease_id, priority, wanted_by)
        return pb.YieldMemoryResponse()

    @override
    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        self._permitted(request.permit, Action.FLUSH, request.model)
        return await self._cache.flush(request)

    @override
    async def GetRequest(self, request: pb.GetRequestRequest, context: Context) -> pb.GetRequestResponse:
        found = [instance.records.find(request.request_id) for instance in self._instances.values()]
        # A request that failed over to another model of this runner has a record at each; the newest one is
        # returned.
        record = max(filter(None, found), key=lambda record: record.started, default=None)
        if record is None:
            raise WeftError(
                Reason.NOT_FOUND, f"this runner has no record of the request {request.request_id[:MAX_NAME_CHARS]}"
            )
        return pb.GetRequestResponse(record=request_record_message(record), output=record.output)

    @override
    async def TailLogs(self, request: pb.TailLogsRequest, context: Context) -> AsyncGenerator[pb.TailLogsResponse]:
        async with answering(context):
            instance = self._instance(request.model)
            log = instance.backend.log
            if instance.config.server:
                # The log of the runner's own runtime has nothing about a followed server.
                yield pb.TailLogsResponse(lines=[NO_OUTPUT])
            _require_line_count("line_count", request.line_count)
            with log.follow(request.line_count) as follower:
                first = follower.take()
                if first.lines:
                    yield self._batch(first)
                while request.follow and await follower.wait():
                    yield self._batch(follower.take())

    @override
    async def WatchPrefixes(
        self, request: pb.WatchPrefixesRequest, context: Context
    ) -> AsyncGenerator[pb.WatchPrefixesResponse]:
        async with answering(context):
            instance = self._instance(request.model)
            reports = instance.backend.prefix_reports
            if request.model != instance.model:
                message = f"{request.model} is an adapter; the prefixes in its cache are not reported"
                raise WeftError(Reason.UNSUPPORTED_OPERATION, message)
            if reports is None:
                async with aclosing(self._cache.stored(request.model)) as stored:
                    async for prompts in stored:
                        yield pb.WatchPrefixesResponse(stored=prompts)
                return
            with reports.follow() as follower:
                async for changes in follower.messages():
                    yield changes

    @override
    async def FetchPrompt(
        self, request: pb.FetchPromptRequest, context: Context
    ) -> AsyncGenerator[pb.FetchPromptResponse]:
        async with answering(context):
            permit = self._tickets.admit(request.ticket, now=self._clock.utc_now().timestamp())
            if not permit.moved_prefix:
                raise WeftError(Reason.TICKET_INVALID, "the ticket is for a request, not for a stored prompt")
            instance = self._instance(permit.model)
            lent = self._cache.lent(instance.model, permit.tenant, permit.moved_prefix, request.state_kind)
            async with aclosing(lent) as messages:
                async for message in messages:
                    yield message

    @override
    async def FindStoredModel(self, request: pb.FindStoredModelRequest, context: Context) -> pb.FindStoredModelResponse:
        return pb.FindStoredModelResponse(
            model=await self._sharing().find(request.source_digest, form_of(request.form))
        )

    @override
    async def ReadModelFile(
        self, request: pb.ReadModelFileRequest, context: Context
    ) -> AsyncGenerator[pb.ReadModelFileResponse]:
        async with answering(context), aclosing(self._sharing().read(request.sha256, request.offset)) as parts:
            async for part in parts:
                yield pb.ReadModelFileResponse(content=part)

    def _sharing(self) -> SharedModels:
        if self.shared is None:
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "this runner does not share its models (model_store.share)")
        return self.shared

    def end_tails(self) -> None:
        """Ends every log stream and every stream of prefixes because the runner is stopping."""
        self._cache.end_followers()
        for instance in self._instances.values():
            instance.backend.log.end_followers()
            if (reports := instance.backend.prefix_reports) is not None:
                reports.end()

    def _permitted(self, permit: permit_pb2.OperationPermit, action: Action, model: str) -> None:
        self._permits.admit(permit, action, model=model, now=self._clock.utc_now().timestamp())

    def _adding(self) -> AddedModels:
        if self._added is None:
            raise WeftError(
                Reason.UNSUPPORTED_OPERATION, "this runner serves only its configured models; models cannot be added"
            )
        return self._added

    async def _load_spec(self, instance: Instance, options: load_pb2.LoadOptions) -> LoadSpec:
        own = ""
        if options.quantization and options.quantization not in instance.config.quantizations:
            own = await asyncio.to_thread(own_quantization, instance.model_path)
        return load_spec_from(options, instance.backend, instance.config.quantizations, own)

    def _instance(self, model: str) -> Instance:
        instance = self._instances.get(model)
        if instance is None:
            raise WeftError(Reason.MODEL_NOT_FOUND, f"this runner does not serve {model[:MAX_NAME_CHARS]}")
        return instance

    def _batch(self, batch: LogBatch) -> pb.TailLogsResponse:
        return pb.TailLogsResponse(lines=map(self._report.redact, batch.lines), lost_line_count=batch.lost_line_count)


def form_of(form: model_store_pb2.StoredForm.ValueType) -> ModelForm | None:
    """Returns the form of model files in a request; None: any. Raises INVALID_ARGUMENT."""
    if form == model_store_pb2.STORED_FORM_UNSPECIFIED:
        return None
    found = next((each for each, number in FORMS.items() if number == form), None)
    if found is None:
        raise invalid_field("form", f"must be one of: {', '.join(ModelForm)}")
    return found


def _priority_of(number: int) -> Priority:
    band = Priority.from_wire(number)
    if band is None or not number:
        raise invalid_field("priority", "must be high, normal or low")
    return band


def _require_line_count(field: str, count: int) -> None:
    if not 0 <= count <= MAX_LOG_LINES:
        raise invalid_field(field, f"must be 0 to {MAX_LOG_LINES}")


NO_OUTPUT = "weft did not start this server; its output is where it was started"
LOOK_SECONDS = 0.25
"""Interval of a load's progress messages; only changes are sent."""


async def follow_pull(work: Callable[[ShowPull], Awaitable[T]]) -> AsyncGenerator[model_store_pb2.PullProgress | T]:
    """Runs work that pulls files; yields its progress, then its result. Closing the generator cancels the work."""
    newest: list[model_store_pb2.PullProgress] = []
    came = asyncio.Event()

    def show(progress: model_store_pb2.PullProgress) -> None:
        message = model_store_pb2.PullProgress()
        message.CopyFrom(progress)
        newest[:] = [message]
        came.set()

    task = asyncio.ensure_future(work(show))
    task.add_done_callback(lambda _: came.set())
    try:
        while not task.done():
            await came.wait()
            came.clear()
            while newest and not task.done():
                yield newest.pop()
        yield task.result()
    finally:
        await end_tasks(task)


async def follow_load(
    instance: Instance, spec: LoadSpec, clock: Clock, redact: Callable[[str], str]
) -> AsyncGenerator[pb.LoadResponse]:
    """Loads a model; yields its progress, then its result. Closing the generator cancels Instance.load."""
    began = clock.monotonic()
    loading = asyncio.create_task(instance.load(spec))
    told = pb.LoadProgress()
    try:
        while not loading.done():
            progress = _progress(instance, redact)
            if progress != told and instance.phase is not Phase.READY:
                told = progress
                yield pb.LoadResponse(progress=progress)
            timer = asyncio.create_task(clock.sleep(LOOK_SECONDS))
            await asyncio.wait({loading, timer}, return_when=asyncio.FIRST_COMPLETED)
            await end_tasks(timer)
        yield pb.LoadResponse(
            result=_result(instance, was_loaded=loading.result(), load_seconds=clock.monotonic() - began)
        )
    finally:
        await end_tasks(loading)


def _progress(instance: Instance, redact: Callable[[str], str]) -> pb.LoadProgress:
    stage = instance.load_stage or instance.phase.name.lower()
    progress = pb.LoadProgress(
        stage=stage,
        detail="" if instance.detail == stage else redact(instance.detail).removeprefix(f"{stage}: "),
        progress=instance.load_progress,
    )
    eta_seconds = instance.load_eta_seconds
    if eta_seconds is not None:
        # In whole seconds, so that the passage of time alone causes few messages.
        progress.eta.CopyFrom(duration_of(float(round(eta_seconds))))
    return progress


def _result(instance: Instance, *, was_loaded: bool, load_seconds: float) -> pb.LoadResult:
    return pb.LoadResult(
        memory_bytes=instance.memory.held_bytes,
        memory_measured=instance.memory.seen_bytes is not None,
        load_time=duration_of(0.0 if was_loaded else load_seconds),
        was_loaded=was_loaded,
    )
