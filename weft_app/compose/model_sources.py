"""Models of weft.yaml with a `source`: served from this machine, or pulled first."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from runner_svc.added_models import ShowPull
from runner_svc.instance.instance_settings import NoteFetch, ServedModel
from runner_svc.memory.port import MemoryForecast
from runner_svc.model_store.background_pull import pull_in_background
from runner_svc.model_store.found import FoundFiles, found_in_folder, locate, program_folders
from runner_svc.model_store.peers import ModelPeers
from runner_svc.model_store.pull import PullSettings
from runner_svc.model_store.store import FORMS, ModelStore
from runner_svc.policy.repository_files import ModelForm, RepositoryFile
from runner_svc.runner_settings import ModelStoreSettings
from runner_svc.runtimes.runtime_settings import ModelSettings, SourcedModelSettings
from weft.api.registry.v1 import model_pb2
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import PULLING, WAITING_FOR_PULL, Reason
from weft.kernel.models.model_source import (
    HubSource,
    LmStudioSource,
    ModelSource,
    OllamaSource,
    PathSource,
    SourceScheme,
    UrlSource,
    parse_source,
    shown_source,
)
from weft.kernel.requests.capabilities import UNKNOWN
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.units import size_words

log = get_logger("weft.runner")

Build = Callable[[ModelSettings], ServedModel]
"""Builds a served model. Raises INVALID_ARGUMENT naming a setting."""


@dataclass(frozen=True, slots=True)
class ModelSources:
    """Finds models by source in a store and on this machine, and pulls others."""

    store: ModelStore
    settings: ModelStoreSettings
    peers: ModelPeers | None = None
    """The other runners of the mesh; None: there are none."""

    def served(self, model: ModelSettings, build: Build) -> ServedModel:
        """Returns a served model. If its source is not on this machine, the first load pulls it."""
        if not isinstance(model, SourcedModelSettings) or model.source is None:
            return build(model)
        source = parse_source(model.source, f"{model.name}.source")
        with suppress(WeftError):
            here = self._files_here(source, model.form)
            if here is not None:
                return self._fetched_again(_built(model, here, build), model, source, build)
        # Properties of the files are unknown, so none are published.
        return replace(
            build(model),
            capabilities=UNKNOWN,
            model_file=model_pb2.ModelFile(),
            forecast=MemoryForecast(),
            model_path=None,
            lack=None,
            fetch=lambda note: self._fetch(model, source, build, note),
        )

    async def pull(self, source: ModelSource, form: ModelForm | None, show: ShowPull) -> pb.StoredModel:
        """Pulls a model into the store, even if it is there, as it may have changed. Raises as `Puller.pull`."""
        return await self._pulled(source, form, self._limits, show)

    async def files(self, source: ModelSource, show: ShowPull, memory_bytes: int | None) -> FoundFiles:
        """Returns the files of a source in any form, pulled if they are not on this machine.

        `memory_bytes` is this machine's total memory; None: unknown. Raises as `pull`, INSUFFICIENT_MEMORY for larger
        weights of the hub, and NOT_FOUND if a local source is missing.
        """
        here = await asyncio.to_thread(self._files_here, source, None)
        if here is None:
            limits = replace(self._limits, memory_bytes=memory_bytes)
            here = self._stored_files(await self._pulled(source, None, limits, show))
        return here

    def found(self, source: ModelSource) -> FoundFiles | None:
        """Returns the files of a source on this machine; None if there are none or they cannot be read."""
        try:
            here = self._files_here(source, None)
        except (OSError, WeftError):
            return None
        return here if here is not None and here.path.exists() else None

    def files_here(self, source: ModelSource) -> FoundFiles:
        """Returns the files of a source on this machine. Raises NOT_FOUND if there are none."""
        here = self._files_here(source, None)
        if here is None:
            raise WeftError(Reason.NOT_FOUND, f"{shown_source(source)} is not stored any more; pull it again")
        return here

    @property
    def _limits(self) -> PullSettings:
        return PullSettings(disk_limit_bytes=self.settings.disk_limit_bytes, allow_http=self.settings.allow_http)

    async def _pulled(
        self, source: ModelSource, form: ModelForm | None, limits: PullSettings, show: ShowPull
    ) -> pb.StoredModel:
        """Pulls a model. Files that the source lists are copied from another runner that has them, not downloaded.

        If the source states no digest and cannot be reached, a new model is used as a runner of the mesh has it.
        """
        peers, is_listed = self.peers, isinstance(source, UrlSource) and bool(source.sha256)

        async def copy(files: Sequence[RepositoryFile]) -> None:
            nonlocal is_listed
            is_listed = True
            if peers is not None and files:
                await peers.copy(source, form, self.store, limits, show, files)

        is_new = await asyncio.to_thread(self.store.find, source, form) is None
        try:
            return await pull_in_background(source, form, self.store, limits, show, copy)
        except WeftError as error:
            if error.reason is not Reason.SERVICE_UNAVAILABLE or is_listed or not is_new or peers is None:
                raise
            copied = await peers.copy(source, form, self.store, limits, show, None)
            if copied is None:
                raise
        log.warning("model was copied unverified", source=shown_source(source), runner=copied.copied_from)
        known = next(known for known, word in FORMS.items() if word == copied.form)
        return await asyncio.to_thread(self.store.publish, source, known, copied)

    async def _fetch(
        self, model: SourcedModelSettings, source: ModelSource, build: Build, note: NoteFetch
    ) -> ServedModel:
        def show(progress: pb.PullProgress) -> None:
            note(_words(progress), _share(progress))

        here = await asyncio.to_thread(self._files_here, source, model.form)
        if here is None:
            here = self._stored_files(await self.pull(source, model.form, show))
        served = await asyncio.to_thread(_built, model, here, build)
        if served.lack is not None:
            raise served.lack
        return self._fetched_again(served, model, source, build)

    def _fetched_again(
        self, served: ServedModel, model: SourcedModelSettings, source: ModelSource, build: Build
    ) -> ServedModel:
        """Returns a model whose files are here, and are pulled again before a load if they are not any more."""
        if served.fetch is not None or isinstance(source, PathSource):
            return served
        return replace(
            served,
            fetch=lambda note: self._fetch(model, source, build, note),
            is_here=lambda: self._is_here(source, model.form),
        )

    def _is_here(self, source: ModelSource, form: ModelForm | None) -> bool:
        try:
            here = self._files_here(source, form)
        except WeftError:
            return False
        return here is not None and here.path.exists()

    def _files_here(self, source: ModelSource, form: ModelForm | None) -> FoundFiles | None:
        """Returns the files of a source on this machine; None: they must be pulled.

        Raises NOT_FOUND and INVALID_ARGUMENT for a missing local source, which cannot be pulled.
        """
        match source:
            case PathSource():
                try:
                    path = Path(source.path).expanduser()
                    # A folder may contain a GGUF file or be the model itself.
                    return found_in_folder(path) if form is None and path.is_dir() else FoundFiles(path=path)
                except (OSError, RuntimeError) as error:
                    why = error.strerror if isinstance(error, OSError) else "there is no such user"
                    message = f"{source} cannot be read on the runner's machine: {why}"
                    raise WeftError(Reason.NOT_FOUND, message) from error
            case OllamaSource() | LmStudioSource() | HubSource(scheme=SourceScheme.HUB_CACHE):
                return locate(source, form, program_folders())
        stored = self.store.find(source, form)
        return None if stored is None else self._stored_files(stored)

    def _stored_files(self, stored: pb.StoredModel) -> FoundFiles:
        return FoundFiles(path=self.store.path_of(stored), projector=self.store.projector_of(stored))


def _built(model: SourcedModelSettings, here: FoundFiles, build: Build) -> ServedModel:
    served = build(model.pulled(here.path, here.projector))
    # Folder names in the store are hashes of their content.
    return replace(served, upstream_name=model.upstream_name) if here.path.is_dir() else served


def _words(progress: pb.PullProgress) -> str:
    if progress.stage == pb.PULL_STAGE_WAITING:
        return f"{WAITING_FOR_PULL} of it"
    if progress.stage == pb.PULL_STAGE_LOADING and progress.detail:
        return f"{PULLING} ({progress.detail})"
    if not progress.total_bytes:
        return PULLING
    return f"{PULLING} {size_words(progress.done_bytes)} of {size_words(progress.total_bytes)}"


def _share(progress: pb.PullProgress) -> float | None:
    return progress.done_bytes / progress.total_bytes if progress.total_bytes else None
