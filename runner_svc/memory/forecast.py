"""What loads of one model take, from its files, its configuration and what its loads really took."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runner_svc.memory.estimate import LLAMA_SERVER_HABITS, EngineHabits, MemoryEstimator, settings_for
from runner_svc.memory.memory_port import ExpectedMemory
from runner_svc.policy.load_parameters import LoadValue
from runner_svc.policy.load_plan import AS_CONFIGURED, LoadPlan
from runner_svc.policy.memory_estimate import EstimateSource, MemoryEstimate, MemorySettings, largest_context

_BETTER = frozenset({EstimateSource.LEARNED, EstimateSource.MANIFEST, EstimateSource.HEADER})
"""Than what is declared for another load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastModel:
    """What is configured about a model, as far as its memory goes."""

    name: str
    path: Path
    quantizations: Mapping[str, Path] = field(default_factory=dict)
    context_tokens: int
    slots: int
    parameters: Mapping[str, LoadValue] = field(default_factory=dict)
    """What is configured beside that, by names of load parameters."""
    habits: EngineHabits = LLAMA_SERVER_HABITS
    manifest_bytes: int | None = None
    """What an operator says that it takes as it is configured."""


class FileForecast:
    """See memory_port.MemoryForecast."""

    def __init__(self, model: ForecastModel, estimator: MemoryEstimator) -> None:
        """`estimator` is shared by the models of a runner."""
        self._model = model
        self._estimator = estimator

    async def expect(self, plan: LoadPlan) -> ExpectedMemory | None:
        """See MemoryForecast.expect."""
        # What an operator said is about the model as it is configured; of another load the files themselves know more,
        # if they know more than their size.
        declared = self._model.manifest_bytes
        estimate = await self._estimate(plan, declared if plan == AS_CONFIGURED else None)
        if declared is not None and (estimate is None or estimate.source not in _BETTER):
            estimate = await self._estimate(plan, declared)
        return None if estimate is None else ExpectedMemory(bytes=estimate.bytes, source=estimate.source.value)

    async def context_within(self, plan: LoadPlan, budget_bytes: int) -> int | None:
        """See MemoryForecast.context_within."""
        facts = await self._estimator.facts(self._path(plan))
        if facts.shape is None:
            return None
        fits = largest_context(facts.shape, self._settings(plan), budget_bytes)
        return min(fits, facts.context_tokens or fits) or None

    def note_taken(self, plan: LoadPlan, taken_bytes: int) -> None:
        """See MemoryForecast.note_taken."""
        learn = self._estimator.learn
        asyncio.get_running_loop().run_in_executor(None, learn, self._path(plan), self._settings(plan), taken_bytes)

    async def _estimate(self, plan: LoadPlan, manifest_bytes: int | None) -> MemoryEstimate | None:
        path, settings = self._path(plan), self._settings(plan)
        return await self._estimator.estimate(self._model.name, path, settings, manifest_bytes)

    def _path(self, plan: LoadPlan) -> Path:
        return self._model.quantizations.get(plan.quantization, self._model.path)

    def _settings(self, plan: LoadPlan) -> MemorySettings:
        parameters = {**self._model.parameters, **plan.parameters}
        return settings_for(self._model.context_tokens, self._model.slots, parameters, self._model.habits)
