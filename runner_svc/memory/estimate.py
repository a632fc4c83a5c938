"""Estimates the memory of a model on disk: reads its files for `policy/memory_estimate.py`."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from runner_svc.memory.learned_memory import FileIdentity, LearnedMemory
from runner_svc.memory.port import MemoryForecast
from runner_svc.model_files.gguf import is_gguf, model_parts, read_gguf_model
from runner_svc.model_files.pipeline_folder import PipelineFolderError, is_pipeline, read_pipeline_folder
from runner_svc.model_files.safetensors import is_safetensors, read_safetensors_model
from runner_svc.policy.load_options import AS_CONFIGURED, LoadPlan
from runner_svc.policy.memory_estimate import (
    MEBIBYTE,
    EngineHabits,
    EstimateSource,
    FileKind,
    KnownModel,
    MemoryEstimate,
    MemoryPart,
    MemorySettings,
    estimate_memory,
    largest_context,
    settings_for,
)
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.models.load_parameters import LoadValue
from weft.kernel.telemetry.log import get_logger

log = get_logger("weft.memory")

MAX_CACHED_FACTS = 128
"""Maximum number of model files whose facts are cached."""
_SPECIFIC_SOURCES = frozenset({EstimateSource.LEARNED, EstimateSource.MANIFEST, EstimateSource.HEADER})
"""Sources that are better than a declaration for another load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(KnownModel):
    """Facts in a model's files. 0 and empty texts: unknown."""

    context_tokens: int = 0
    """The model's training context."""
    quantization: str = ""
    architecture: str = ""
    parameter_count: int = 0
    templates: tuple[str, ...] = ()
    identity: FileIdentity | None = None


def read_model_facts(path: Path) -> ModelFacts:
    """Reads the facts in a model's files. Blocks for 20 ms or more: call it in a thread.

    Returns few or no facts for files that are unreadable or have broken headers: the engine decides whether it can load
    them.
    """
    try:
        if path.is_file() and is_gguf(path):
            return _gguf_facts(path)
        if is_pipeline(path):
            return _pipeline_facts(path)
        if is_safetensors(path):
            return _safetensors_facts(path)
        return ModelFacts(file_bytes=path.stat().st_size if path.is_file() else 0)
    except OSError:
        return ModelFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files that an engine loads for one model."""

    path: Path
    """Its weights, or their first part."""
    projector: Path | None = None
    """The image and audio encoder."""
    draft: Path | None = None
    adapters: tuple[Path, ...] = ()


class MemoryEstimator:
    """Memory estimates for a runner's models. Headers of unchanged files are read once.

    Its methods read files, so call them in a thread.
    """

    def __init__(self, learned: LearnedMemory | None = None) -> None:
        self._learned = learned
        self._lock = threading.Lock()
        self._facts: OrderedDict[tuple[str, int, int], ModelFacts] = OrderedDict()

    def estimate(
        self, name: str, files: ModelFiles | None, settings: MemorySettings, manifest_bytes: int | None = None
    ) -> MemoryEstimate | None:
        """Returns the estimate of a load, from the name if there are no files; None: unknown."""
        facts = ModelFacts() if files is None else loaded_facts(files, self._facts_of)
        measured: tuple[int, ...] = ()
        if self._learned is not None and facts.identity is not None:
            measured = tuple(self._learned.measurements(facts.identity, settings))
        known = replace(facts, name=name, manifest_bytes=manifest_bytes, learned_bytes=measured)
        return estimate_memory(known, settings)

    def largest_context(self, files: ModelFiles, settings: MemorySettings, budget_bytes: int) -> int | None:
        """Returns the largest context of one slot that fits a budget; None: unknown, or none fits."""
        facts = loaded_facts(files, self._facts_of)
        if facts.shape is None:
            return None
        fits = largest_context(facts, settings, budget_bytes)
        return min(fits, facts.context_tokens or fits) or None

    def learn(self, files: ModelFiles, settings: MemorySettings, measured_bytes: int) -> None:
        """Records the measured memory of a load over all devices."""
        identity = loaded_facts(files, self._facts_of).identity
        if self._learned is not None and identity is not None:
            self._learned.learn(identity, settings, measured_bytes)

    def _facts_of(self, path: Path) -> ModelFacts:
        try:
            seen = path.stat()
        except OSError:
            return ModelFacts()
        key = (str(path), seen.st_size, seen.st_mtime_ns)
        with self._lock:
            facts = self._facts.pop(key, None) or read_model_facts(path)
            self._facts[key] = facts
            while len(self._facts) > MAX_CACHED_FACTS:
                self._facts.popitem(last=False)
        return facts


def loaded_facts(files: ModelFiles, read: Callable[[Path], ModelFacts] = read_model_facts) -> ModelFacts:
    """Returns a model's facts with those of the files loaded with it. Blocks as `read_model_facts`."""
    facts = read(files.path)
    projector = None if files.projector is None else read(files.projector)
    draft = None if files.draft is None else read(files.draft)
    adapters = [read(file) for file in files.adapters]
    identity = facts.identity
    if identity is not None:
        beside = tuple(
            one.identity for one in (projector, draft, *adapters) if one is not None and one.identity is not None
        )
        identity = replace(identity, companions=beside)
    projector_bytes = 0 if projector is None else projector.file_bytes
    return replace(
        facts,
        projector_bytes=projector_bytes,
        adapter_bytes=sum(adapter.file_bytes for adapter in adapters),
        draft=draft,
        identity=identity,
    )


def manifest_bytes_of(memory_mb: int | None) -> int | None:
    """Converts the `memory_mb` setting to bytes."""
    return None if memory_mb is None else memory_mb * MEBIBYTE


def _gguf_facts(path: Path) -> ModelFacts:
    try:
        parts = [part for part in model_parts(path) if part.is_file()]
        header = read_gguf_model(path)
    except WeftError as error:
        log.warning("header of a model file cannot be used for an estimate", file=path.name, error=error.message)
        return ModelFacts(file_bytes=path.stat().st_size, file_kind=FileKind.GGUF, identity=_identity([path]))
    return ModelFacts(
        file_bytes=sum(part.stat().st_size for part in parts),
        file_kind=FileKind.GGUF,
        shape=header.shape,
        context_tokens=header.context_tokens,
        quantization=header.quantization,
        architecture=header.architecture,
        parameter_count=header.parameter_count,
        templates=header.templates,
        identity=_identity(parts),
    )


def _safetensors_facts(path: Path) -> ModelFacts:
    try:
        model = read_safetensors_model(path)
    except WeftError as error:
        log.warning("header of a model file cannot be used for an estimate", file=path.name, error=error.message)
        size = (
            path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.glob("*.safetensors"))
        )
        return ModelFacts(file_bytes=size, file_kind=FileKind.SAFETENSORS)
    return ModelFacts(
        file_bytes=model.file_bytes,
        file_kind=FileKind.SAFETENSORS,
        shape=model.shape,
        context_tokens=model.context_tokens,
        identity=_identity([path], model.file_bytes),
    )


def _pipeline_facts(path: Path) -> ModelFacts:
    try:
        pipeline = read_pipeline_folder(path)
    except PipelineFolderError as error:
        log.warning("pipeline folder cannot be used for an estimate", file=path.name, error=str(error))
        return ModelFacts()
    weights = [file for files in pipeline.files.values() for file in files]
    identity = replace(_identity(weights), path=str(path.resolve()))
    return ModelFacts(
        file_bytes=pipeline.weight_bytes,
        file_kind=FileKind.SAFETENSORS,
        architecture=pipeline.class_name,
        identity=identity,
    )


def _identity(files: list[Path], size: int | None = None) -> FileIdentity:
    seen = [file.stat() for file in files]
    return FileIdentity(
        path=str(files[0].resolve()),
        bytes=sum(one.st_size for one in seen) if size is None else size,
        modified_ns=max(one.st_mtime_ns for one in seen),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastModel:
    """The configuration that determines a model's memory."""

    name: str
    files: ModelFiles
    quantizations: Mapping[str, Path] = field(default_factory=dict)
    """Other weight files, by quantization."""
    context_tokens: int
    slots: int
    parameters: Mapping[str, LoadValue] = field(default_factory=dict)
    """Other configured values, by load parameter."""
    habits: EngineHabits = field(default_factory=EngineHabits)
    manifest_bytes: int | None = None
    """Memory that the operator declared for the configured load."""


class DeclaredForecast(MemoryForecast):
    """The MemoryForecast of a model with only the operator's declaration."""

    def __init__(self, declared_bytes: int | None) -> None:
        """None: unknown."""
        self._declared_bytes = declared_bytes

    @override
    async def expect(self, plan: LoadPlan) -> MemoryEstimate | None:
        declared = self._declared_bytes
        if declared is None:
            return None
        parts = (MemoryPart(name="declared", bytes=declared),)
        return MemoryEstimate(bytes=declared, source=EstimateSource.MANIFEST, parts=parts)


class FileForecast(MemoryForecast):
    """The MemoryForecast of a model in files."""

    def __init__(self, model: ForecastModel, estimator: MemoryEstimator) -> None:
        """`estimator` is shared by a runner's models."""
        self._model = model
        self._estimator = estimator

    @override
    async def expect(self, plan: LoadPlan) -> MemoryEstimate | None:
        # The operator's declaration is for the configured load. For another load the files are better, if more than
        # their size is known.
        declared = self._model.manifest_bytes
        estimate = await self._estimate(plan, declared if plan == AS_CONFIGURED else None)
        if declared is not None and (estimate is None or estimate.source not in _SPECIFIC_SOURCES):
            estimate = await self._estimate(plan, declared)
        return estimate

    def inputs(self, plan: LoadPlan) -> tuple[ModelFiles, MemorySettings]:
        """Returns the inputs of a load's estimate: the files to load, and the settings."""
        return self._files(plan), self._settings(plan)

    @override
    async def context_within(self, plan: LoadPlan, budget_bytes: int) -> int | None:
        files, settings = self.inputs(plan)
        return await asyncio.to_thread(self._estimator.largest_context, files, settings, budget_bytes)

    @override
    def note_taken(self, plan: LoadPlan, taken_bytes: int) -> None:
        learn = partial(self._estimator.learn, *self.inputs(plan), taken_bytes)
        asyncio.get_running_loop().run_in_executor(None, learn)

    async def _estimate(self, plan: LoadPlan, manifest_bytes: int | None) -> MemoryEstimate | None:
        files, settings = self.inputs(plan)
        return await asyncio.to_thread(self._estimator.estimate, self._model.name, files, settings, manifest_bytes)

    def _files(self, plan: LoadPlan) -> ModelFiles:
        files = self._model.files
        return replace(files, path=self._model.quantizations.get(plan.quantization, files.path))

    def _settings(self, plan: LoadPlan) -> MemorySettings:
        parameters = {**self._model.parameters, **plan.parameters}
        return settings_for(self._model.context_tokens, self._model.slots, parameters, self._model.habits)
