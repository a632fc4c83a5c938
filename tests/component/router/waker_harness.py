"""A scheduling loop and a waker over a fleet written by hand, and a runner that answers Wake over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from kit.fleet import model_view, ready, runner_view
from kit.recipes import wake_plan
from kit.scheduling import placement_request, scheduling_loop
from kit.serving import served

from router_svc.placement import LocalPlacement
from router_svc.waker import Waker
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.registry.v1.wake_pb2 import Wake, WakeRecipe
from weft.api.router.v1.placement_service_pb2 import Granted
from weft.api.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from weft.dispatch.fleet import FleetView
from weft.dispatch.placement import Decision, Placement
from weft.kernel.channels.rpc import ChannelPool, answering
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing
from weft_testing.fake_clock import FakeClock

NOTICE_SECONDS = 10.0
MODEL = "qwen"
RUNNER = "laptop"
BY_RUNNER = wake_plan(by_runner=True, max_wait_seconds=60.0)


class WakingRunner(runner_service_pb2_grpc.RunnerServiceServicer):
    """Answers Wake when the test allows it, and records the calls."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.calls: list[tuple[str, dict[str, str]]] = []
        self.cancelled = asyncio.Event()
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._answers: asyncio.Queue[WeftError | None] = asyncio.Queue()

    async def asked(self) -> str:
        """The model of the next call that has not been noticed yet."""
        async with asyncio.timeout(NOTICE_SECONDS):
            return await self._asked.get()

    def answer(self, error: WeftError | None = None) -> None:
        """Let one call end."""
        self._answers.put_nowait(error)

    async def Wake(  # noqa: N802 - the name of the rpc
        self, request: runner_service_pb2.WakeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> runner_service_pb2.WakeResponse:
        async with answering(context):
            metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
            self.calls.append((request.model, metadata))
            self._asked.put_nowait(request.model)
            try:
                error = await self._answers.get()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
            if error is not None:
                raise error
        return runner_service_pb2.WakeResponse()


class RecordedRecipes:
    """A recipe runner that notes what it was given and does what the test says."""

    def __init__(self) -> None:
        self.ran: list[WakeRecipe] = []
        self.seconds: list[float] = []
        self.error: Exception | None = None

    async def __call__(self, recipe: WakeRecipe, *, timeout_seconds: float) -> None:
        self.ran.append(recipe)
        self.seconds.append(timeout_seconds)
        if self.error is not None:
            raise self.error


class WakingMesh:
    """One sleeping model on one runner, and the router's half that wakes it."""

    def __init__(self, runner: WakingRunner, allowed_recipes: frozenset[str], tracing: Tracing = NO_TRACING) -> None:
        self.runner = runner
        self.clock = FakeClock()
        self.recipes = RecordedRecipes()
        self._channels = ChannelPool()
        self.waker = Waker(self.recipes, self._channels, self.clock, allowed_recipes)
        self.loop = scheduling_loop(clock=self.clock, waker=self.waker, tracing=tracing)
        self._view = FleetView(
            1,
            {RUNNER: runner_view(RUNNER, incarnation="first", address=runner.address)},
            {MODEL: model_view(MODEL, RUNNER, active=False, hibernating=True, wake=BY_RUNNER)},
        )

    async def close(self) -> None:
        self.loop.close()
        await self.waker.stop()
        await self._channels.close()

    def show(
        self,
        phase: "InstanceState.Phase.ValueType",
        *,
        runner: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        detail: str = "",
    ) -> None:
        """The registry reports the model's phase, with the given fields of runner and model. It stays so."""
        shown = replace(
            self._view.runners[RUNNER], instances={MODEL: ready(MODEL, 8, phase=phase, detail=detail)}, **(runner or {})
        )
        declared = replace(
            self._view.models[MODEL],
            hibernating=phase == InstanceState.PHASE_HIBERNATING,
            active=phase != InstanceState.PHASE_HIBERNATING,
            **(model or {}),
        )
        self.tell(FleetView(self._view.revision + 1, {RUNNER: shown}, {MODEL: declared}))

    def tell(self, view: FleetView) -> None:
        self._view = view
        self.waker.update_view(view)
        self.loop.update_view(view)

    async def wait_for_sleepers(self, count: int) -> None:
        """Return once so many of the waker's tasks wait for time to pass; the wake's own bound is one of them."""
        async with asyncio.timeout(NOTICE_SECONDS):
            await self.clock.wait_for_sleepers(count)

    async def until_no_wake_is_under_way(self) -> None:
        for _ in range(2000):
            # Its timer ends some turns of the loop before its end is reported.
            if all(task.get_name() != f"wake-{MODEL}" for task in asyncio.all_tasks()):
                return
            await asyncio.sleep(0.005)
        raise AssertionError("a wake is still under way after 10 s")

    def place(self, request_id: str = "r", traceparent: str = "") -> Placement:
        request = placement_request(request_id, tenant="default", model=MODEL, traceparent=traceparent)
        return LocalPlacement(self.loop).place(request)


@asynccontextmanager
async def waking_mesh(
    tmp_path: Path,
    *,
    plan: Wake = BY_RUNNER,
    allowed_recipes: frozenset[str] = frozenset({"wake_on_lan", "http"}),
    tracing: Tracing = NO_TRACING,
) -> AsyncIterator[WakingMesh]:
    """A mesh whose only model sleeps."""
    async with AsyncExitStack() as stack:
        runner = await stack.enter_async_context(waking_runner(tmp_path / "runner.sock"))
        mesh = WakingMesh(runner, allowed_recipes, tracing)
        stack.push_async_callback(mesh.close)
        mesh.show(InstanceState.PHASE_HIBERNATING, model={"wake": plan})
        yield mesh


@asynccontextmanager
async def waking_runner(socket: Path) -> AsyncIterator[WakingRunner]:
    """A runner that listens."""
    runner = WakingRunner(f"unix:{socket}")  # type: ignore[abstract]  # nobody calls the other methods
    async with served(socket, (runner_service_pb2_grpc.add_RunnerServiceServicer_to_server, runner)):
        yield runner


async def next_word(place: Placement) -> Decision:
    async with asyncio.timeout(NOTICE_SECONDS):
        return await place.next_decision()


async def grant_of(place: Placement) -> Granted:
    """The grant, after all status messages."""
    while not (word := await next_word(place)).HasField("granted"):
        pass
    return word.granted


async def refusal_of(place: Placement) -> WeftError:
    """The refusal, after all status messages."""
    try:
        granted = await grant_of(place)
    except WeftError as error:
        return error
    raise AssertionError(f"expected a refusal, heard {granted}")
