"""Performs wakes: runs a recipe or calls a runner, and watches the view until the model is ready."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, cast

from typing_extensions import override

from router_svc.fleet_view import candidate_of, wake_plan
from router_svc.loop import WakeEnd, WakeFinished, WakeStarter
from router_svc.policy.decisions import LOST_RUNNER, Wakes
from router_svc.policy.endpoints.candidates import Readiness
from weft.api.registry.v1 import wake_pb2
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.fleet import FleetView
from weft.kernel.channels.rpc import ChannelPool, calling
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, wait_for_event
from weft.kernel.values.address import metadata_of
from weft.wake.recipes import mesh_recipe

if TYPE_CHECKING:
    from weft.api.runner.v1.runner_service_pb2_grpc import RunnerServiceAsyncStub

log = get_logger("weft.waker")

MARGIN_SECONDS = 5.0
"""How much later than its limit a wake is given up: its runner or recipe has the same limit, and reports the cause. A
call to a runner times out as much later again."""
LOST_RUNNER_RETRY_SECONDS = 1.0
"""Pause before calling a runner again that is still in the view although its host is being woken."""
CONFIRM_SECONDS = 2.0
"""Time in which the view must confirm a runner's report that the model is awake, before the runner is called again. The
model may have fallen asleep again, and would sleep until `max_wait`; or the registry is unreachable and did not get the
report."""
MAX_ERROR_CHARS = 500
"""Maximum length of error messages, as every waiting request gets a copy."""


class RecipeRunner(Protocol):
    """Port that executes a recipe."""

    async def __call__(self, recipe: wake_pb2.WakeRecipe, *, timeout_seconds: float) -> None:
        """Return after the recipe's action succeeded. Raises WAKE_FAILED with the cause, free of secrets."""
        ...


class _Step(Enum):
    DONE = "done"
    WAIT = "wait"
    CONFIRM = "confirm"
    RUN_RECIPE = "run_recipe"
    CALL_RUNNER = "call_runner"


@dataclass(slots=True, kw_only=True)
class _Attempt:
    wakes: Wakes
    ends_at: float
    """On the router's monotonic clock."""
    recipe_ran: bool = False
    runner_was_lost: bool = False
    woken_at: dict[str, float] = field(default_factory=dict)
    """When each incarnation of its runner reported it as awake; the view shows it after the runner's next report."""
    runner_insists: bool = False
    """Whether the runner insists that it is awake although the view shows something else."""


class Waker(WakeStarter):
    """Runs a background task for each waking model."""

    def __init__(
        self, run_recipe: RecipeRunner, channels: ChannelPool, clock: Clock, allowed_recipes: frozenset[str]
    ) -> None:
        self._run_recipe = run_recipe
        self._channels = channels
        self._clock = clock
        self._allowed_recipes = allowed_recipes
        self._view = FleetView()
        self._view_changed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._given_up: dict[str, asyncio.Event] = {}
        """The event that ends each wake under way."""

    def update_view(self, view: FleetView) -> None:
        """Apply a new view of the registry."""
        self._view = view
        self._view_changed.set()
        self._view_changed = asyncio.Event()

    @override
    def begin(self, wakes: Wakes, finished: WakeFinished) -> None:
        assert wakes.model not in self._tasks, "a model is woken once at a time"
        self._given_up[wakes.model] = asyncio.Event()
        self._tasks[wakes.model] = start_task(self._wake(wakes, finished), name=f"wake-{wakes.model}")

    @override
    def give_up(self, model: str) -> None:
        given_up = self._given_up.get(model)
        if given_up is not None:
            given_up.set()

    async def stop(self) -> None:
        """Cancel every wake without reporting its end."""
        await stop_tasks(self._tasks.values())
        self._tasks.clear()
        self._given_up.clear()

    async def _wake(self, wakes: Wakes, finished: WakeFinished) -> None:
        log.info("waking", model=wakes.model, runner=wakes.runner, max_wait_seconds=wakes.max_wait_seconds)
        error: WeftError | None = None
        self_reported = False
        try:
            self_reported = await self._within_bound(wakes)
        except WeftError as failed:
            error = _as_wake_failure(failed)
            log.warning("wake failed", model=wakes.model, runner=wakes.runner, error=error.message)
        except Exception:
            error = WeftError(Reason.WAKE_FAILED, "an internal error; the router's log has the details")
            log.exception("wake failed unexpectedly", model=wakes.model, runner=wakes.runner)
        else:
            log.info("woke", model=wakes.model, runner=wakes.runner, self_reported=self_reported)
        # Before the end is reported, as the next request may immediately begin another wake.
        del self._tasks[wakes.model], self._given_up[wakes.model]
        finished(WakeEnd(error=error, self_reported=self_reported))

    async def _within_bound(self, wakes: Wakes) -> bool:
        """Return whether only the runner reports that the model is awake."""
        seconds, given_up = wakes.max_wait_seconds, self._given_up[wakes.model]
        attempt = _Attempt(wakes=wakes, ends_at=self._clock.monotonic() + seconds)
        working: asyncio.Task[Any] = asyncio.create_task(self._bring_up(attempt))
        ending: asyncio.Task[Any] = asyncio.create_task(wait_for_event(given_up, self._clock, seconds + MARGIN_SECONDS))
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                return attempt.runner_insists
        finally:
            await stop_tasks(task for task in (working, ending) if not task.done())
        if given_up.is_set():
            message = "its memory is held by models and programs that are never evicted"
            raise WeftError(Reason.INSUFFICIENT_MEMORY, message)
        raise WeftError(
            Reason.WAKE_FAILED,
            f"it did not take requests within {seconds:.0f} s; a larger max_wait_seconds in its wake recipe waits "
            "longer",
        )

    async def _bring_up(self, attempt: _Attempt) -> None:
        while (step := _next_step(self._view, attempt, self._clock.monotonic())) is not _Step.DONE:
            match step:
                case _Step.RUN_RECIPE:
                    await self._carry_out_recipe(attempt)
                case _Step.CALL_RUNNER:
                    await self._call_runner(attempt)
                case _Step.WAIT:
                    await self._view_changed.wait()
                case _Step.CONFIRM:
                    await wait_for_event(self._view_changed, self._clock, CONFIRM_SECONDS)

    async def _carry_out_recipe(self, attempt: _Attempt) -> None:
        recipe = mesh_recipe(wake_plan(self._view.models[attempt.wakes.model]))
        assert recipe is not None, "only a model with a recipe gets this step"
        kind = recipe.WhichOneof("action")
        if kind not in self._allowed_recipes:
            raise WeftError(
                Reason.WAKE_FAILED,
                f"router.wake_recipes does not allow recipes of type {kind}; add {kind} to it on the router's host, "
                "or let the model's runner wake it (by: runner)",
            )
        await self._run_recipe(recipe, timeout_seconds=self._seconds_left(attempt))
        attempt.recipe_ran = True

    async def _call_runner(self, attempt: _Attempt) -> None:
        model = self._view.models[attempt.wakes.model]
        runner = self._view.runners[model.runner]
        channel = await self._channels.get(runner.address)
        stub = cast("RunnerServiceAsyncStub", runner_service_pb2_grpc.RunnerServiceStub(channel))
        try:
            with calling(Reason.WORKER_LOST, Reason.RUNNER_UNREACHABLE):
                await stub.Wake(
                    runner_service_pb2.WakeRequest(
                        model=attempt.wakes.model,
                        priority=attempt.wakes.priority.wire,  # type: ignore[arg-type]  # same numbers
                    ),
                    timeout=self._seconds_left(attempt) + 2 * MARGIN_SECONDS,
                    metadata=metadata_of(runner.address),
                )
        except WeftError as failure:
            if failure.reason is Reason.SHUTTING_DOWN:
                # The model was replaced, or its runner stops: the view shows it soon.
                await wait_for_event(self._view_changed, self._clock, CONFIRM_SECONDS)
                return
            if failure.reason not in LOST_RUNNER or mesh_recipe(wake_plan(model)) is None:
                raise
            # Its host fell asleep unnoticed by the registry, or is just coming back.
            attempt.runner_was_lost = True
            if attempt.recipe_ran:
                await self._clock.sleep(LOST_RUNNER_RETRY_SECONDS)
            return
        attempt.runner_insists = attempt.wakes.doubted or runner.incarnation in attempt.woken_at
        attempt.woken_at[runner.incarnation] = self._clock.monotonic()

    def _seconds_left(self, attempt: _Attempt) -> float:
        return max(0.0, attempt.ends_at - self._clock.monotonic())


def _next_step(view: FleetView, attempt: _Attempt, now: float) -> _Step:
    """Return the next action for the current view. Raises WAKE_FAILED if the model can no longer start."""
    model = view.models.get(attempt.wakes.model)
    if model is None:
        raise WeftError(Reason.WAKE_FAILED, "it is not in the mesh any more")
    candidate = candidate_of(view, model)
    if attempt.runner_insists or (candidate.readiness is Readiness.READY and not attempt.wakes.doubted):
        return _Step.DONE
    if candidate.readiness is Readiness.LOADING:
        return _Step.WAIT
    runner = view.runners.get(model.runner)
    runner_is_up = runner is not None and runner.active and model.reachable
    if runner_is_up and candidate.readiness is Readiness.DOWN:
        raise WeftError(Reason.WAKE_FAILED, candidate.detail or "its engine cannot be started")
    plan = wake_plan(model)
    has_recipe = mesh_recipe(plan) is not None
    recipe_is_due = has_recipe and not attempt.recipe_ran
    if runner_is_up and plan.by_runner and not (attempt.runner_was_lost and recipe_is_due):
        woken_at = attempt.woken_at.get(candidate.incarnation)
        was_woken_just_now = woken_at is not None and now < woken_at + CONFIRM_SECONDS
        return _Step.CONFIRM if was_woken_just_now else _Step.CALL_RUNNER
    if recipe_is_due:
        return _Step.RUN_RECIPE
    if not has_recipe:
        raise WeftError(Reason.WAKE_FAILED, "its runner is gone")
    return _Step.WAIT


def _as_wake_failure(error: WeftError) -> WeftError:
    """Return the failure of a wake. What may be temporary keeps its own reason: lack of memory, and a lost runner."""
    is_temporary = error.reason is Reason.INSUFFICIENT_MEMORY or error.reason in LOST_RUNNER
    reason = error.reason if is_temporary else Reason.WAKE_FAILED
    return WeftError(reason, error.message[:MAX_ERROR_CHARS], metadata=error.metadata)
