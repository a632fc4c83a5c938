"""The work of one operation: sequential calls to runners that can be cancelled and undone."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from google.protobuf import duration_pb2

from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.operations.live_operations import OPERATION_PREFIX
from registry_svc.operations.policy.loads import LoadTimes, plan_pool
from registry_svc.operations.runner_presence import RunnerPresence
from registry_svc.operations.targets import (
    RunnerDirectory,
    SourceTarget,
    choose_runner,
    is_single,
    load_target,
    models_named,
    models_to_unload,
)
from weft.api.operations.v1 import operation_pb2 as pb
from weft.api.runner.v1 import added_model_pb2, load_pb2, model_store_pb2
from weft.api.runner.v1 import runner_service_pb2 as runner_pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import PULLING, WAITING_FOR_PULL, Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import duration_of
from weft.kernel.values.units import size_words
from weft.kernel.values.unknown_names import MODEL_OR_POOL, unknown_name

T = TypeVar("T")

log = get_logger("weft.registry.operations")

MAX_AMOUNT = 2**50
"""Maximum bytes, tokens and entries, also in total: 1 PiB, more than any mesh has."""
MAX_SECONDS = 31_622_400.0
"""366 days; no load takes longer."""


def amount(reported: int) -> int:
    """Returns a number of bytes, tokens or entries, limited to 0 to MAX_AMOUNT."""
    return min(max(reported, 0), MAX_AMOUNT)


def amount_of_all(reported: Iterable[int]) -> int:
    """Returns the sum of amounts, limited as `amount`."""
    return amount(sum(map(amount, reported)))


def seconds_of(reported: duration_pb2.Duration) -> float:
    """Returns a duration in seconds, limited to 0 to MAX_SECONDS."""
    return min(max(reported.seconds + reported.nanos / 1e9, 0.0), MAX_SECONDS)


def pull_words(said: model_store_pb2.PullProgress) -> str:
    """Returns the progress of a pull, in words."""
    if said.stage == model_store_pb2.PULL_STAGE_WAITING:
        return f"{WAITING_FOR_PULL} of it"
    if said.total_bytes <= 0:
        return "looking for its files"
    return f"{PULLING} {size_words(amount(said.done_bytes))} of {size_words(amount(said.total_bytes))}"


PUBLISHED_SECONDS = 10.0
PUBLISHED_CHECK_SECONDS = 0.05
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_FLUSHES_AT_ONCE = 16
MAX_NAMED_FAILURES = 3
# A page of operations must fit into one gRPC message of 64 MiB.
MAX_NAMED_MODELS = 256
UNDO_PATIENCE_SECONDS = 120.0
WAITING_FOR_MEMORY = "waiting for memory"
"""Stage of a load in `runner.v1.LoadProgress`."""
# A restarted runner has ended all backends of its earlier process.
_NOTHING_TO_UNLOAD = frozenset({Reason.UNSUPPORTED_OPERATION, Reason.MODEL_NOT_FOUND, Reason.WORKER_RESTARTED})


class JobCancelled(Exception):  # noqa: N818 - an outcome, not an error
    """The job was cancelled and has no running calls. What it has loaded is still there, see Job.undo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """Callbacks for a job's reports."""

    progress: Callable[[pb.Operation, float | None], None]
    """Called with the stage and other fields that are not stored, and the estimated end in monotonic seconds."""
    assigned: Callable[[str], Awaitable[None]]
    """Called with the runner if there is only one; the report is stored when this returns."""
    begun: Callable[[Sequence[str]], Awaitable[None]]
    """Called with the models whose loads have begun or are about to; stored when this returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDeps:
    """The dependencies of jobs."""

    calls: RunnerCalls
    directory: RunnerDirectory
    clock: Clock
    times: LoadTimes
    presence: RunnerPresence


class Job:
    """The work of one operation.

    The result of `operation` has the models that an earlier registry process began to load for it. Calls to unreachable
    runners are retried until `patient_until`, on the monotonic clock.
    """

    def __init__(
        self, deps: JobDeps, operation: pb.Operation, report: JobReport, *, patient_until: float = 0.0
    ) -> None:
        self._deps = deps
        self._operation_id = operation.name.removeprefix(OPERATION_PREFIX)
        self._action = operation.action
        self._report = report
        self._begun = list(operation.result.models)
        self._patient_until = patient_until
        self._cancel_requested = False
        self._calling: asyncio.Task[Any] | None = None
        """A load or pull, which can be cancelled immediately."""
        self._added = ""
        """The model added for this load; empty: none, or it was served before."""
        self._runners: dict[str, str] = {}
        """Runners of models added for it, which the mesh does not know yet."""
        self._result = pb.OperationResult()

    def request_cancel(self) -> None:
        """Ends the job as soon as possible: a load or pull immediately, an unload or flush before its next call."""
        self._cancel_requested = True
        if self._calling is not None:
            self._calling.cancel()

    async def run(self) -> pb.OperationResult:
        """Does the work. Returns its result. Raises JobCancelled, and the WeftError of the runner that failed."""
        self._require_wanted()
        match self._action.WhichOneof("kind"):
            case "load_model":
                await self._load(self._action.load_model)
            case "unload_model":
                await self._unload_named(self._action.unload_model.model)
            case "pull_model":
                await self._pull(self._action.pull_model)
            case "remove_model":
                await self._remove(self._action.remove_model.model)
            case _:
                await self._flush(self._action.flush_cache)
        del self._result.models[MAX_NAMED_MODELS:]
        return self._result

    async def undo(self) -> str:
        """Unloads what was loaded. Returns what could not be unloaded, as text.

        A runner that is gone has no backends left; calls to an active but unreachable one are retried for
        UNDO_PATIENCE_SECONDS.
        """
        failures: list[str] = []
        until = self._deps.clock.monotonic() + UNDO_PATIENCE_SECONDS
        # A model that was added for this load is removed, not unloaded.
        loaded = [model for model in self._begun if model != self._added]
        await self._remove_again()
        for model in loaded:
            self._tell("unloading", f"unloading {model}")
            runner = self._deps.directory.holder_of(model) or self._runners.get(model, "")
            try:
                await self._unload_patiently(runner, model, until, while_there=True)
            except WeftError as error:
                if error.reason not in _NOTHING_TO_UNLOAD and self._deps.directory.is_active(runner):
                    failures.append(f"{model}: {error.log_message}")
        return "" if not failures else "could not be unloaded: " + "; ".join(failures[:MAX_NAMED_FAILURES])

    async def _load(self, load: pb.LoadModel) -> None:
        if load.evict_model:
            await self._unload(load.evict_model)
        if load.source:
            await self._load_source(load)
            return
        if is_single(load, self._deps.directory):
            await self._report.assigned(self._deps.directory.runner_of(load.model) or "")
            await self._load_one(load.model, load.options)
            return
        await self._load_pool(load)

    async def _load_source(self, load: pb.LoadModel) -> None:
        target = load_target(load, self._deps.directory)
        await self._report.assigned(target.runner)
        added = await self._call_cancellably(target.runner, lambda: self._add_call(target, load))
        self._runners[added.name] = target.runner
        if added.HasField("server"):
            await self._until_listed(added)
            return
        if not target.is_served:
            self._added = added.name
        try:
            await self._load_one(added.name, load.options)
            await self._until_published(added.name, target.runner)
        except WeftError:
            await self._remove_again()
            raise
        self._result.added.CopyFrom(added)

    async def _until_listed(self, added: added_model_pb2.AddedModel) -> None:
        """Waits at most PUBLISHED_SECONDS until the mesh knows the models of an attached server."""
        names = [model.name for model in added.server.models]
        until = self._deps.clock.monotonic() + PUBLISHED_SECONDS
        missing = names
        while missing and self._deps.clock.monotonic() < until:
            missing = [name for name in missing if self._deps.directory.runner_of(name) is None]
            if missing:
                await self._deps.clock.sleep(PUBLISHED_CHECK_SECONDS)
        self._result.models.extend(name for name in names if name not in missing)
        self._result.added.CopyFrom(added)

    async def _until_published(self, model: str, runner: str) -> None:
        """Waits until the mesh knows a model added on a runner; another runner may have taken its name meanwhile.

        Raises MODEL_NOT_FOUND after PUBLISHED_SECONDS, because the runner could not publish it.
        """
        until = self._deps.clock.monotonic() + PUBLISHED_SECONDS
        while self._deps.directory.runner_of(model) != runner and self._deps.clock.monotonic() < until:
            await self._deps.clock.sleep(PUBLISHED_CHECK_SECONDS)
        if self._deps.directory.runner_of(model) != runner:
            raise WeftError(
                Reason.MODEL_NOT_FOUND, f"{model} was loaded, and its runner could not publish it; its log says why"
            )

    async def _remove_again(self) -> None:
        """Removes the model that was added for this failed load."""
        name, self._added = self._added, ""
        if not name:
            return
        runner = self._runners[name]
        try:
            await self._deps.presence.call(
                runner, lambda: self._deps.calls.remove_model(runner, name, operation_id=self._operation_id)
            )
        except WeftError as error:
            log.warning("a model that could not be loaded stays", model=name, reason=error.reason.name)

    async def _add_call(self, target: SourceTarget, load: pb.LoadModel) -> added_model_pb2.AddedModel:
        self._tell("asking the runner", f"adding {target.model}")
        responses = self._deps.calls.add_model(target.runner, target.model, load, operation_id=self._operation_id)
        model: added_model_pb2.AddedModel = await _last(responses, self._tell_pull, "the call without a model")
        return model

    async def _pull(self, pull: pb.PullModel) -> None:
        runner = choose_runner(pull.runner, "action.pull_model.runner", self._deps.directory)
        await self._report.assigned(runner)
        stored = await self._call_cancellably(runner, lambda: self._pull_call(runner, pull))
        self._result.pulled.CopyFrom(stored)

    async def _pull_call(self, runner: str, pull: pb.PullModel) -> model_store_pb2.StoredModel:
        responses = self._deps.calls.pull(runner, pull, operation_id=self._operation_id)
        stored: model_store_pb2.StoredModel = await _last(responses, self._tell_pull, "the pull without a result")
        return stored

    async def _remove(self, model: str) -> None:
        self._tell("unloading", f"removing {model}")
        directory = self._deps.directory
        runner = directory.holder_of(model) or directory.runner_of_server(model) or ""
        await self._report.assigned(runner)
        answer = await self._deps.presence.patient_call(
            runner,
            lambda: self._deps.calls.remove_model(runner, model, operation_id=self._operation_id),
            self._patient_until,
        )
        self._result.memory_freed_bytes = amount(answer.memory_freed_bytes)
        self._result.added.CopyFrom(answer.model)
        self._result.models.append(model)

    def _tell_pull(self, said: model_store_pb2.PullProgress) -> None:
        share = said.done_bytes / said.total_bytes if said.total_bytes > 0 else None
        left = (said.total_bytes - said.done_bytes) / said.bytes_per_second if said.bytes_per_second > 0 else None
        ends_at = None if left is None or share is None else self._deps.clock.monotonic() + min(left, MAX_SECONDS)
        progress = pb.Operation(
            stage=PULLING,
            detail=said.detail or pull_words(said),
            progress=share,
            done_bytes=amount(said.done_bytes) if said.total_bytes > 0 else None,
            total_bytes=amount(said.total_bytes) if said.total_bytes > 0 else None,
            digest=f"sha256:{said.file_sha256}" if _SHA256.fullmatch(said.file_sha256) else "",
        )
        self._report.progress(progress, ends_at)

    async def _call_cancellably(self, runner: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of a call to a runner. Cancellation ends it immediately and raises JobCancelled."""
        self._require_wanted()
        self._calling = calling = asyncio.create_task(
            self._deps.presence.patient_call(runner, call, self._patient_until), name=f"call-{runner}"
        )
        try:
            return await calling
        except asyncio.CancelledError:
            # Either the job was cancelled, which only cancelled the call, or its task.
            if calling.cancelled() and self._cancel_requested:
                raise JobCancelled from None
            calling.cancel()
            raise
        finally:
            self._calling = None

    async def _load_pool(self, load: pb.LoadModel) -> None:
        plan = plan_pool(self._deps.directory.pool(load.model), load.replicas or 1)
        missing, failures = plan.missing, list[WeftError]()
        if load.HasField("options") and load.options.ByteSize():
            for model in plan.keep:
                await self._load_one(model, load.options)
        else:
            self._result.models.extend(plan.keep)
        for model in plan.load:
            if not missing:
                break
            try:
                await self._load_one(model, load.options)
                missing -= 1
            except WeftError as error:
                failures.append(error)
        if missing:
            raise _too_few(missing, failures)
        for model in plan.unload:
            await self._unload(model)

    async def _load_one(self, model: str, options: load_pb2.LoadOptions) -> None:
        self._require_wanted()
        is_new = model not in self._begun
        if is_new:
            await self._report.begun([*self._begun, model])
            self._begun.append(model)
        runner = self._runners.get(model) or self._deps.directory.runner_of(model) or ""
        result = await self._call_cancellably(runner, lambda: self._load_call(runner, model, options))
        if result.was_loaded:
            # The model was already loaded, so the duration is not that of a load.
            result.ClearField("load_time")
            if is_new:
                self._begun.remove(model)
                await self._report.begun(self._begun)
        elif result.HasField("load_time"):
            self._deps.times.learn(model, seconds_of(result.load_time))
        self._add_load(model, result)

    async def _load_call(self, runner: str, model: str, options: load_pb2.LoadOptions) -> runner_pb.LoadResult:
        began = self._deps.clock.monotonic()
        self._tell_load(model, began, runner_pb.LoadProgress(stage="asking the runner"))
        responses = self._deps.calls.load(runner, model, options, operation_id=self._operation_id)
        tell = partial(self._tell_load, model, began)
        result: runner_pb.LoadResult = await _last(responses, tell, "the load without a result")
        return result

    def _tell_load(self, model: str, began: float, said: runner_pb.LoadProgress) -> None:
        now = self._deps.clock.monotonic()
        # Earlier loads do not predict when memory becomes free.
        waits = said.stage == WAITING_FOR_MEMORY
        eta = None if waits else self._deps.times.eta_seconds(model, now - began)
        if said.HasField("eta"):
            eta = seconds_of(said.eta)
        progress = pb.Operation(
            stage=said.stage,
            detail=said.detail or f"loading {model}",
            progress=said.progress if said.HasField("progress") else None,
        )
        self._report.progress(progress, None if eta is None else now + max(eta, 0.0))

    def _add_load(self, model: str, result: runner_pb.LoadResult) -> None:
        total = self._result
        first = not total.models
        total.memory_measured = result.memory_measured and (first or total.memory_measured)
        total.memory_bytes = amount_of_all((total.memory_bytes, result.memory_bytes))
        total.models.append(model)
        if result.HasField("load_time"):
            total.load_time.CopyFrom(duration_of(seconds_of(total.load_time) + seconds_of(result.load_time)))

    async def _unload_named(self, name: str) -> None:
        models = models_to_unload(name, self._deps.directory)
        if not models:
            raise unknown_name(MODEL_OR_POOL, name)
        there = [model for model in models if self._is_there(model)]
        # Pool members of inactive runners hold nothing. If all runners are inactive, report the first error.
        for model in there or models[:1]:
            await self._unload(model)

    async def _unload(self, model: str) -> None:
        self._require_wanted()
        self._tell("unloading", f"unloading {model}")
        runner = self._deps.directory.holder_of(model) or ""
        answer = await self._unload_patiently(runner, model, self._patient_until)
        freed = (self._result.memory_freed_bytes, answer.memory_freed_bytes)
        self._result.memory_freed_bytes = amount_of_all(freed)
        self._result.cache_flushed |= answer.cache_flushed
        if self._action.WhichOneof("kind") == "unload_model":
            self._result.models.append(model)

    async def _unload_patiently(
        self, runner: str, model: str, until: float, *, while_there: bool = False
    ) -> runner_pb.UnloadResponse:
        return await self._deps.presence.patient_call(
            runner,
            lambda: self._deps.calls.unload(runner, model, operation_id=self._operation_id),
            until,
            while_there=while_there,
        )

    async def _flush(self, flush: pb.FlushCache) -> None:
        requests = self._flush_requests(flush)
        if not requests:
            raise _no_runner_to_flush(flush.model)
        if len(requests) == 1:
            await self._report.assigned(requests[0][0])
        self._tell("flushing", f"asking {len(requests)} runners")
        answers: list[runner_pb.FlushCacheResponse] = []
        failures: list[WeftError] = []
        for start in range(0, len(requests), MAX_FLUSHES_AT_ONCE):
            self._require_wanted()
            some = requests[start : start + MAX_FLUSHES_AT_ONCE]
            for outcome in await asyncio.gather(*(self._flush_one(*each) for each in some)):
                if isinstance(outcome, WeftError):
                    failures.append(outcome)
                else:
                    answers.append(outcome)
            self._tell("flushing", share=(start + len(some)) / len(requests))
        _require_flushed(answers, failures)
        self._add_flushes(answers)

    def _flush_requests(self, flush: pb.FlushCache) -> list[tuple[str, runner_pb.FlushCacheRequest]]:
        directory = self._deps.directory
        if not flush.model:
            runners = [flush.runner] if flush.runner else directory.active_runners()
            return [(runner, _flush_request(flush, "")) for runner in runners]
        served = [(directory.runner_of(model) or "", model) for model in models_named(flush.model, directory)]
        self._result.models.extend(model for runner, model in served if flush.runner in {"", runner})
        return [(runner, _flush_request(flush, model)) for runner, model in served if flush.runner in {"", runner}]

    async def _flush_one(
        self, runner: str, request: runner_pb.FlushCacheRequest
    ) -> runner_pb.FlushCacheResponse | WeftError:
        try:
            return await self._deps.presence.patient_call(
                runner,
                lambda: self._deps.calls.flush_cache(runner, request, operation_id=self._operation_id),
                self._patient_until,
            )
        except WeftError as error:
            return error

    def _add_flushes(self, answers: Sequence[runner_pb.FlushCacheResponse]) -> None:
        total = self._result
        total.cache_flushed = True
        total.entry_count = amount_of_all(answer.entry_count for answer in answers)
        if answers and all(answer.HasField("token_count") for answer in answers):
            total.token_count = amount_of_all(answer.token_count for answer in answers)
        if answers and all(answer.HasField("reusable_bytes") for answer in answers):
            total.reusable_bytes = amount_of_all(answer.reusable_bytes for answer in answers)

    def _is_there(self, model: str) -> bool:
        return self._deps.directory.is_active(self._deps.directory.holder_of(model) or "")

    def _require_wanted(self) -> None:
        if self._cancel_requested:
            raise JobCancelled

    def _tell(self, stage: str, detail: str = "", *, share: float | None = None) -> None:
        self._report.progress(pb.Operation(stage=stage, detail=detail, progress=share), None)


async def _last(responses: AsyncGenerator[Any], tell: Callable[[Any], None], missing: str) -> Any:
    """Returns the model or result in the last response of a call. `tell` is called with each progress before it."""
    async with aclosing(responses):
        async for response in responses:
            kind = response.WhichOneof("kind")
            if kind in ("model", "result"):
                return getattr(response, kind)
            tell(response.progress)
    raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the runner ended {missing}")


def _flush_request(flush: pb.FlushCache, model: str) -> runner_pb.FlushCacheRequest:
    return runner_pb.FlushCacheRequest(scope=flush.scope, model=model, tenant=flush.tenant, tag=flush.tag)


def _no_runner_to_flush(model: str) -> WeftError:
    if model:
        return unknown_name(MODEL_OR_POOL, model)
    return WeftError(Reason.NO_RUNNER_AVAILABLE, "there are no runners, so no cache was flushed; start one")


def _require_flushed(answers: Sequence[runner_pb.FlushCacheResponse], failures: Sequence[WeftError]) -> None:
    """Raises unless all runners that can flush did. If some did, engines that cannot flush are no failure."""
    grave = [error for error in failures if error.reason is not Reason.UNSUPPORTED_OPERATION]
    if grave or (failures and not answers):
        first = (grave or list(failures))[0]
        total = len(answers) + len(failures)
        raise WeftError(first.reason, f"{len(failures)} of {total} caches were not flushed; the first: {first.message}")


def _too_few(missing: int, failures: Sequence[WeftError]) -> WeftError:
    if not failures:
        return WeftError(
            Reason.NO_RUNNER_AVAILABLE, f"{missing} more members are wanted and none hibernates on an active runner"
        )
    return WeftError(
        failures[-1].reason, f"{missing} more members could not be loaded; the last: {failures[-1].message}"
    )
