"""Models added to a runner by their source: finds or pulls the files and chooses engine and size."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from typing_extensions import override

from runner_svc.added_models import MAX_REASONS, AddRequest, ModelAdder, ShowPull, added_model
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.model_store.found import FoundFiles
from runner_svc.model_store.store import FORMS
from runner_svc.policy.engine_choice import (
    CONFIGURATION,
    EngineCandidate,
    WeightFormat,
    choose_engine,
    folder_format,
)
from runner_svc.policy.repository_files import ModelForm
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.runtime_settings import ModelSettings
from runner_svc.runtimes.table import find_runtime, usable_names, why_off
from weft.api.runner.v1 import added_model_pb2, model_store_pb2
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import LoadParameter
from weft.kernel.models.model_source import HubSource, ModelSource, PathSource, SourceScheme, names_gguf, parse_source
from weft_app.compose.model_sizes import size_by_memory, size_settings
from weft_app.compose.model_sources import ModelSources
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

MAX_CONFIGURATION_BYTES = 1024**2
GGUF_BEGINNING = b"GGUF"
BuildModel = Callable[[RunnerSettings, ModelSettings], ServedModel]
"""Builds the served model from a runner's section. Raises INVALID_ARGUMENT naming a setting."""


class SectionAdder(ModelAdder):
    """Builds models from their sources for one configured runner."""

    def __init__(
        self,
        section: RunnerSettings,
        sources: ModelSources,
        context: ModelContext,
        build: BuildModel,
    ) -> None:
        self._section = section
        self._sources = sources
        self._environments, self._disabled = context.environments, context.disabled
        self._build = build

    @override
    async def pull(self, source: ModelSource, form: ModelForm | None, show: ShowPull) -> model_store_pb2.StoredModel:
        return await self._sources.pull(source, form, show)

    @override
    async def prepare(self, request: AddRequest, show: ShowPull) -> ServedModel:
        _require_absolute(request.source)
        memory = await request.memory()
        files = await self._sources.files(request.source, show, memory.most_bytes)
        return await self._prepared(request, files)

    @override
    def restored(self, added: added_model_pb2.AddedModel) -> ServedModel:
        runtime = find_runtime(added.runtime)
        if runtime is None:
            raise invalid_field("runtime", f"{added.runtime} is not installed any more")
        if why := why_off(runtime.name, self._disabled):
            raise invalid_field("runtime", why)
        source = parse_source(added.stored_source, "source")
        return self._served(added, runtime, source, None)

    @override
    def load_parameters(self, source: ModelSource) -> list[Sequence[LoadParameter]]:
        candidates, files, own = self._candidates(), self._sources.found(source), self._section.runtime
        if files is None and not names_gguf(source):
            names = sorted((each.name for each in candidates if not each.remedy), key=lambda name: name != own)
        else:
            weights = WeightFormat.GGUF if files is None else _format_of(files.path)
            names = [choose_engine(weights, own, candidates).name]
        return [self._parameters_of(name, source, files) for name in names]

    def _parameters_of(self, engine: str, source: ModelSource, files: FoundFiles | None) -> Sequence[LoadParameter]:
        runtime = find_runtime(engine)
        assert runtime is not None, "only runtimes of the table are candidates"
        added = added_model_pb2.AddedModel(name="model", runtime=engine)
        return self._served(added, runtime, source, files).make_backend().load_parameters

    async def _prepared(self, request: AddRequest, files: FoundFiles) -> ServedModel:
        weights = await asyncio.to_thread(_format_of, files.path)
        candidates = await asyncio.to_thread(self._candidates)
        choice = choose_engine(weights, self._section.runtime, candidates)
        runtime = find_runtime(choice.name)
        assert runtime is not None, "only runtimes of the table are candidates"
        memory = await request.memory()
        sizing, reasons = await size_by_memory(request.source, files, runtime, memory, request.options)
        added = added_model(request)
        added.form = FORMS[ModelForm.GGUF if weights is WeightFormat.GGUF else ModelForm.FOLDER]
        added.runtime = choice.name
        added.sizing.CopyFrom(sizing)
        added.reasons.extend([choice.reason, *reasons][:MAX_REASONS])
        added.add_time.CopyFrom(_now())
        return await asyncio.to_thread(self._served, added, runtime, request.source, files)

    def _served(
        self, added: added_model_pb2.AddedModel, runtime: Runtime[Any], source: ModelSource, files: FoundFiles | None
    ) -> ServedModel:
        """Returns the served model, parsed from the document that weft.yaml would have for it."""
        # The path may be a folder that holds the file.
        if isinstance(source, PathSource) and files is None:
            files = self._sources.files_here(source)
        document = model_document(added, runtime, source, files)
        runner = {"name": self._section.name, "runtime": runtime.name, "models": [document]}
        (model,) = parse_section(ConfiguredRunner, runner).models
        is_own = runtime.name == self._section.runtime
        section = replace(
            self._section, runtime=runtime.name, command=self._section.command if is_own else None, models=(model,)
        )
        served = self._sources.served(model, lambda settings: self._build(section, settings))
        return replace(served, added=added)

    def _candidates(self) -> list[EngineCandidate]:
        return [
            EngineCandidate(name=name, formats=runtime.formats, remedy=self._remedy(runtime))
            for name in usable_names()
            if (runtime := find_runtime(name)) is not None and runtime.formats and not why_off(name, self._disabled)
        ]

    def _remedy(self, runtime: Runtime[Any]) -> str:
        """Returns the command that installs the engine of a runtime; empty: it is installed."""
        is_own = runtime.name == self._section.runtime
        if is_own and self._section.command:
            return ""
        if runtime.environment is not None and runtime.needs_environment:
            try:
                self._environments.environment_python(runtime.environment)
            except WeftError:
                return self._environments.install_command(runtime.environment.name)
            return ""
        is_installed = runtime.environment is not None and self._environments.link(runtime.environment).is_symlink()
        if runtime.requirement is not None and not is_installed:
            try:
                runtime.requirement.find(None)
            except WeftError:
                return runtime.requirement.remedy
        return ""


def model_document(
    added: added_model_pb2.AddedModel, runtime: Runtime[Any], source: ModelSource, files: FoundFiles | None
) -> dict[str, Any]:
    """Returns an added model in the form of weft.yaml. `files` are the ones found at a path."""
    where = str(files.path) if files is not None and isinstance(source, PathSource) else str(source)
    document: dict[str, Any] = {"name": added.name, "start_asleep": True, "source": where}
    document |= size_settings(added.sizing, runtime)
    known = {each.name for each in fields(runtime.settings)}
    return {name: value for name, value in document.items() if name in known}


class HubAdder(ModelAdder):
    """Adds models of the hub only: other sources open files and addresses of this machine."""

    def __init__(self, adder: ModelAdder) -> None:
        self._adder = adder

    @override
    async def pull(self, source: ModelSource, form: ModelForm | None, show: ShowPull) -> model_store_pb2.StoredModel:
        return await self._adder.pull(_of_hub(source), form, show)

    @override
    async def prepare(self, request: AddRequest, show: ShowPull) -> ServedModel:
        _of_hub(request.source)
        return await self._adder.prepare(request, show)

    @override
    def load_parameters(self, source: ModelSource) -> list[Sequence[LoadParameter]]:
        return self._adder.load_parameters(_of_hub(source))

    @override
    def restored(self, added: added_model_pb2.AddedModel) -> ServedModel:
        _of_hub(parse_source(added.stored_source, "source"))
        return self._adder.restored(added)


def _of_hub(source: ModelSource) -> HubSource:
    """Raises PERMISSION_DENIED for another source."""
    if not isinstance(source, HubSource) or source.scheme is not SourceScheme.HUB:
        raise WeftError(
            Reason.PERMISSION_DENIED, "this machine accepts only models of the hub (hf:OWNER/REPOSITORY) from the mesh"
        )
    return source


def _require_absolute(source: ModelSource) -> None:
    if isinstance(source, PathSource) and not source.path.startswith(("/", "~")):
        raise invalid_field(
            "source", f"{source} must be an absolute path, because the runner has its own working directory"
        )


def _format_of(path: Path) -> WeightFormat:
    """Returns the format of the weights at a path. Raises NOT_FOUND and UNSUPPORTED_OPERATION."""
    if path.is_dir():
        configuration: Mapping[str, object] = {}
        with suppress(OSError, ValueError), (path / CONFIGURATION).open("rb") as file:
            found = json.loads(file.read(MAX_CONFIGURATION_BYTES))
            configuration = found if isinstance(found, dict) else {}
        return folder_format((each.name for each in path.iterdir()), configuration)
    try:
        with path.open("rb") as file:
            begins = file.read(len(GGUF_BEGINNING))
    except OSError as error:
        raise WeftError(Reason.NOT_FOUND, f"{path} cannot be read on the runner's machine: {error.strerror}") from error
    if begins != GGUF_BEGINNING:
        raise invalid_field("source", f"{path.name} is not a GGUF file")
    return WeightFormat.GGUF


def _now() -> Timestamp:
    now = Timestamp()
    now.GetCurrentTime()
    now.nanos = 0
    return now
