"""The runner behind an HTTP API: its facts, the port that returns them, and its devices."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from typing_extensions import override

from weft.api.common.v1 import error_reason_pb2
from weft.api.registry.v1.model_pb2 import MODEL_SKILL_TOOLS
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.api.runner.v1 import runner_service_pb2
from weft.gpu.snapshot import DeviceSnapshot, DeviceUse
from weft.kernel.services.service_lifecycle import BackgroundLoop
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock


class RunnerStage(Enum):
    """Life-cycle stage of the runner process."""

    STARTING = auto()
    SERVING = auto()
    STOPPING = auto()


class ModelStage(Enum):
    """Life-cycle stage of a model, as the API publishes it."""

    AVAILABLE = auto()
    LOADING = auto()
    LOADED = auto()
    FAILED = auto()
    """It crashed too often in succession, or cannot be started."""


_STAGES = {
    InstanceState.PHASE_READY: ModelStage.LOADED,
    # The runner finishes its running requests.
    InstanceState.PHASE_DRAINING: ModelStage.LOADED,
    InstanceState.PHASE_LOADING: ModelStage.LOADING,
    InstanceState.PHASE_CRASH_LOOP: ModelStage.FAILED,
    InstanceState.PHASE_FAILED: ModelStage.FAILED,
}
_APART = {
    runner_service_pb2.CACHE_ISOLATION_SLOTS: True,
    runner_service_pb2.CACHE_ISOLATION_WHOLE: True,
    runner_service_pb2.CACHE_ISOLATION_SALT: True,
    runner_service_pb2.CACHE_ISOLATION_NONE: False,
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model of the runner, as the runner describes it. The messages must not be modified."""

    state: InstanceState
    description: runner_service_pb2.InstanceDescription
    takes_chats: bool = False
    called: frozenset[str] = frozenset()
    """Its other names: its source, with and without `hf:`, or its path, as configured."""

    @property
    def name(self) -> str:
        """The model's name in the mesh."""
        return self.state.model

    @property
    def calls_tools(self) -> bool:
        """Whether it supports chats, and is not known to lack tools."""
        return self.takes_chats and MODEL_SKILL_TOOLS not in self.state.abilities.lacking

    @property
    def stage(self) -> ModelStage:
        """Its life-cycle stage."""
        return _STAGES.get(self.state.phase, ModelStage.AVAILABLE)

    @property
    def loaded_at(self) -> int | None:
        """Unix time of the last load; None: not loaded, or unknown."""
        if self.stage is not ModelStage.LOADED or not self.description.HasField("last_ready_time"):
            return None
        return self.description.last_ready_time.seconds

    @property
    def memory_bytes(self) -> int | None:
        """Accelerator memory, measured or else leased; None: unknown."""
        memory = self.state.memory
        return memory.measured_bytes if memory.HasField("measured_bytes") else memory.leased_bytes or None

    @property
    def tenants_apart(self) -> bool | None:
        """Whether the prefixes of different tenants are isolated; None: unknown."""
        return _APART.get(self.description.cache_isolation)

    @property
    def out_of_memory(self) -> bool:
        """Whether the last fault was a lack of memory, from which the engine has not recovered."""
        if self.stage is ModelStage.LOADED or not self.description.restarts:
            return False
        last = self.description.restarts[-1]
        return last.reason == error_reason_pb2.ERROR_REASON_OUT_OF_MEMORY and not last.HasField("recovery")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """The runner's state at one moment."""

    name: str
    kind: str
    """Runtime and version, such as `llama_server-weft-0.1.0`."""
    stage: RunnerStage
    models: tuple[ModelFacts, ...] = ()
    adds_models: bool = False
    """Whether it serves models by source that its configuration does not name."""
    device_use: Mapping[int, DeviceUse] = field(default_factory=dict)
    """Use of the sampled devices, by index."""

    def find(self, model_id: str) -> str | None:
        """Returns the name of the first model with this name, source or path; None: no such model."""
        if any(model.name == model_id for model in self.models):
            return model_id
        return next((model.name for model in self.models if model_id in model.called), None)


class RunnerPort(Protocol):
    """The runner of this process."""

    def facts(self) -> RunnerFacts:
        """Returns the current facts. Cheap, because every health check calls it."""
        ...

    async def devices(self) -> tuple[DeviceSnapshot, ...] | None:
        """Returns the accelerators that it may use, by index; None: unknown."""
        ...


TTL_SECONDS = 5.0
"""Interval at which devices are read; also the `max-age` of the capabilities."""
STALE_SECONDS = 3 * TTL_SECONDS
"""Age of the last reading beyond which the runner's state is unknown."""
DEVICES_TIMEOUT_SECONDS = 2.0

log = get_logger("weft.gateway")


class KeptDevices(BackgroundLoop):
    """The runner's devices, read in the background."""

    loop_name = "runner-devices"

    def __init__(self, runner: RunnerPort, clock: Clock) -> None:
        self._runner = runner
        self._clock = clock
        self._seen_at = 0.0
        self.found: tuple[DeviceSnapshot, ...] | None = None
        """The devices at the last reading; None: unknown."""

    @property
    def is_stale(self) -> bool:
        """Whether the last reading is too old."""
        return self._clock.monotonic() - self._seen_at > STALE_SECONDS

    @override
    async def start(self) -> None:
        await self._look()
        await super().start()

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(DEVICES_TIMEOUT_SECONDS):
                self.found = await self._runner.devices()
        except TimeoutError:
            self.found = None
        self._seen_at = self._clock.monotonic()

    @override
    async def _run(self) -> None:
        while True:
            await self._clock.sleep(TTL_SECONDS)
            try:
                await self._look()
            except Exception:
                log.exception("the devices of the runner could not be read")
