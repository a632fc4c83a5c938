"""The model store, `<home>/models`: content by digest, and a manifest per source.

    blobs/sha256-<hex>          immutable content
    snapshots/<id>/<path>       links with the names that engines expect; <id> is a digest of names and digests
    manifests/<key>.json        the `StoredModel` of a source, written last and atomically
    partial/<key>               content of a running or interrupted pull; `<key>.json`: its validator
    locks/<key>                 locked while a process downloads this; `store`: shared by pulls, exclusive for removals

A model exists once its manifest does. Files of a killed process have no manifest: the next pull resumes them, or
`collect` removes them.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from runner_svc.policy.repository_files import FileRole, ModelForm
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import lock_file, replace_file
from weft.kernel.models.model_source import ModelSource, shown_source
from weft.kernel.values.units import size_words

SCHEMA_VERSION = 1
MAX_MANIFEST_BYTES = 8 * 1024**2
KEY_CHARS = 32
MIN_FREE_BYTES = 256 * 1024**2
"""Disk space that a pull leaves free, because the mesh's state and logs are usually on the same disk."""
ROOM_BYTES = 64 * 1024**2
"""A growing file's space is checked again after this many bytes, because others use the disk meanwhile."""
STALE_PARTIAL_SECONDS = 7 * 86_400.0
"""Age after which `collect` removes the rest of an interrupted pull."""
LOCK_PAUSE_SECONDS = 0.1
LOCK_ATTEMPTS = 20
_STORE_LOCK = "store"
_STATE_SUFFIX = ".json"
"""Suffix of the validator beside a partial file."""

FORMS = {ModelForm.GGUF: pb.STORED_FORM_GGUF, ModelForm.FOLDER: pb.STORED_FORM_FOLDER}
ROLES = {
    FileRole.WEIGHTS: pb.STORED_FILE_ROLE_WEIGHTS,
    FileRole.PROJECTOR: pb.STORED_FILE_ROLE_PROJECTOR,
    FileRole.OTHER: pb.STORED_FILE_ROLE_OTHER,
}


class RoomChecks:
    """Checks the space for a growing file again and again."""

    def __init__(self, require_room: Callable[[int], None]) -> None:
        """`require_room` is called with the bytes to come, at most ROOM_BYTES, and raises if they do not fit."""
        self._require_room = require_room
        self._checked = 0

    def before(self, size: int, added: int, total: int | None) -> None:
        """Checks, if needed, before `added` bytes follow the `size` existing ones of `total`; None: unknown."""
        if size + added > self._checked:
            coming = max(added, ROOM_BYTES if total is None else min(ROOM_BYTES, total - size))
            self._require_room(coming)
            self._checked = size + coming


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What `collect` removed."""

    blobs: int
    partials: int
    freed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedManifest:
    """An unreadable manifest."""

    file: Path
    why: str


class ModelStore:
    """The store in one folder. Its methods block: in a process with an event loop, call them from a thread."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def partial(self) -> Path:
        """Folder of downloads in progress."""
        return self.root / "partial"

    def blob(self, sha256: str) -> Path:
        """Returns the path of a content, which may be missing."""
        return self.root / "blobs" / f"sha256-{sha256}"

    def has_blob(self, sha256: str, size_bytes: int) -> bool:
        """Whether a content is present with the expected size."""
        try:
            return self.blob(sha256).stat().st_size == size_bytes
        except OSError:
            return False

    def create(self) -> None:
        """Creates the folders, readable only by their owner. Raises INVALID_ARGUMENT if that fails."""
        with self.explained():
            for name in ("blobs", "snapshots", "manifests", "partial", "locks"):
                (self.root / name).mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Converts an OSError in the block to INVALID_ARGUMENT with the folder and the next step."""
        try:
            yield
        except OSError as error:
            where = error.filename or self.root
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"the model store {self.root} cannot be used: {error.strerror} ({where}); make room, or choose another "
                "home with --home",
            ) from error

    def find(self, source: ModelSource, form: ModelForm | None = None) -> pb.StoredModel | None:
        """Returns a source's model if all its files are present; None: it must be pulled.

        `form` None: any form that was pulled, GGUF preferred.
        """
        return self.find_by_digest(source_digest(source), form)

    def find_by_digest(self, digest: str, form: ModelForm | None) -> pb.StoredModel | None:
        """As `find`, by the digest of a source."""
        for known in (ModelForm.GGUF, ModelForm.FOLDER) if form is None else (form,):
            with suppress(_UnreadableError):
                found = self._read(self._manifest(digest, known))
                if found is not None and self.is_whole(found):
                    return found
        return None

    def models(self) -> tuple[list[pb.StoredModel], list[DamagedManifest]]:
        """Returns the stored models sorted by source, and the unreadable manifests."""
        found, damaged = [], []
        folder = self.root / "manifests"
        for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
            try:
                model = self._read(file)
            except _UnreadableError as error:
                damaged.append(DamagedManifest(file=file, why=str(error)))
            else:
                if model is not None:
                    found.append(model)
        return sorted(found, key=lambda model: (model.source, model.form)), damaged

    def is_whole(self, model: pb.StoredModel) -> bool:
        """Whether all files of a model are present with their names and sizes."""
        folder = self.root / "snapshots" / model.folder
        return all(
            self.has_blob(file.sha256, file.size_bytes) and (folder / file.path).exists() for file in model.files
        )

    def path_of(self, model: pb.StoredModel) -> Path:
        """Returns the path for an engine: the main file, or the folder."""
        folder = self.root.absolute() / "snapshots" / model.folder
        return folder / model.main_path if model.main_path else folder

    def projector_of(self, model: pb.StoredModel) -> Path | None:
        """Returns a GGUF's image or audio encoder; None: it has none."""
        folder = self.root.absolute() / "snapshots" / model.folder
        found = (folder / file.path for file in model.files if file.role == pb.STORED_FILE_ROLE_PROJECTOR)
        return next(found, None)

    def add_blob(self, file: Path, sha256: str) -> None:
        """Moves a verified file into the contents and syncs it to disk. Raises OSError."""
        target = self.blob(sha256)
        with file.open("rb") as content:
            os.fsync(content.fileno())
        file.chmod(0o400)
        file.replace(target)
        _sync_folder(target.parent)

    def publish(self, source: ModelSource, form: ModelForm, model: pb.StoredModel) -> pb.StoredModel:
        """Makes a model with complete contents visible, replacing the source's earlier one. Raises OSError."""
        model.schema_version = SCHEMA_VERSION
        model.source, model.source_digest = shown_source(source), source_digest(source)
        model.form = FORMS[form]
        model.size_bytes = sum(file.size_bytes for file in model.files)
        model.digest = _content_digest(model.files)
        model.folder = _names_digest(model.files)[:KEY_CHARS]
        self._link_files(model)
        replace_file(self._manifest(model.source_digest, form), MessageToJson(model).encode())
        return self._shown(model)

    def remove(self, model: pb.StoredModel) -> int:
        """Removes a model and the contents that no other model uses; returns the number of freed bytes.

        During a pull, its contents stay until `collect`. Raises INVALID_ARGUMENT if files cannot be removed.
        """
        with self.explained(), self._alone() as alone:
            for file in (self.root / "manifests").glob("*.json"):
                with suppress(_UnreadableError):
                    found = self._read(file)
                    same = found is not None and found.source_digest == model.source_digest
                    if found is not None and same and found.form == model.form:
                        file.unlink()
            models, damaged = self.models()
            if not alone or damaged:
                return 0
            if all(other.folder != model.folder for other in models):
                shutil.rmtree(self.root / "snapshots" / model.folder, ignore_errors=True)
            kept = {file.sha256 for other in models for file in other.files}
            return sum(_unlink(self.blob(file.sha256)) for file in model.files if file.sha256 not in kept)

    def collect(self, now: float, *, all_partials: bool = False) -> Collected:
        """Removes contents without a manifest, and stale partial files (or all of them).

        `now` is in Unix seconds. Raises RESOURCE_IN_USE during a pull, and INVALID_ARGUMENT for an unreadable manifest,
        whose contents would be lost.
        """
        with self.explained(), self._alone() as alone:
            if not alone:
                raise WeftError(Reason.RESOURCE_IN_USE, "a pull is running; wait until it has ended")
            models, damaged = self.models()
            if damaged:
                raise WeftError(
                    Reason.INVALID_ARGUMENT,
                    f"nothing is removed, because {damaged[0].file} {damaged[0].why}; remove that file first",
                )
            freed = blobs = partials = 0
            kept = {self.blob(file.sha256).name for model in models for file in model.files}
            for blob in _entries(self.root / "blobs"):
                if blob.name not in kept:
                    freed, blobs = freed + _unlink(blob), blobs + 1
            folders = {model.folder for model in models}
            for folder in _entries(self.root / "snapshots"):
                if folder.name not in folders:
                    shutil.rmtree(folder, ignore_errors=True)
            for file in _entries(self.partial):
                if all_partials or _is_older(file, now - STALE_PARTIAL_SECONDS):
                    partials += file.suffix != _STATE_SUFFIX
                    freed += _unlink(file)
            return Collected(blobs=blobs, partials=partials, freed_bytes=freed)

    def used_bytes(self) -> int:
        """Returns the size of all contents, including partial ones."""
        sizes = 0
        for folder in ("blobs", "partial"):
            for file in _entries(self.root / folder):
                with suppress(OSError):
                    sizes += 0 if file.suffix == _STATE_SUFFIX else file.stat().st_size
        return sizes

    def require_room(self, needed_bytes: int, limit_bytes: int | None, what: str) -> None:
        """Checks that this many more bytes fit the disk and the store's limit.

        Raises INVALID_ARGUMENT with the required and free space and the limit.
        """
        if needed_bytes <= 0:
            return
        free = shutil.disk_usage(self.root).free
        used = self.used_bytes()
        limit = "no limit is set" if limit_bytes is None else f"the limit of stored models is {size_words(limit_bytes)}"
        if limit_bytes is not None and used + needed_bytes > limit_bytes:
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"{what} needs {size_words(needed_bytes)} more, {size_words(used)} are stored, and {limit} "
                "(model_store.disk_limit); remove models with weft models rm, or raise it",
            )
        if needed_bytes + MIN_FREE_BYTES > free:
            raise WeftError(
                Reason.INVALID_ARGUMENT,
                f"{what} needs {size_words(needed_bytes)} more on {self.root}, {size_words(free)} are free, "
                f"of which {size_words(MIN_FREE_BYTES)} stay free, and {limit}; make room, or choose another home with "
                "--home",
            )

    @contextmanager
    def pulling(self) -> Iterator[None]:
        """Blocks removals, like other pulls do. Raises RESOURCE_IN_USE while one is running."""
        with self.explained(), (self.root / "locks" / _STORE_LOCK).open("a") as lock:
            if not any(_locks(lock.fileno(), is_shared=True) for _ in range(LOCK_ATTEMPTS)):
                raise WeftError(Reason.RESOURCE_IN_USE, "stored models are being removed; try again")
            yield

    @contextmanager
    def loading(self, key: str, on_waiting: Callable[[], None]) -> Iterator[bool]:
        """Takes the lock of a key; yields whether another process held it before.

        `on_waiting` is called repeatedly while another process holds it.
        """
        with (self.root / "locks" / key).open("a") as lock:
            waited = False
            while not _locks(lock.fileno()):
                waited = True
                on_waiting()
            yield waited

    def is_of(self, model: pb.StoredModel, source: ModelSource) -> bool:
        """Whether a stored model was pulled from a source."""
        return model.source_digest == source_digest(source)

    def source_key(self, source: ModelSource) -> str:
        """Returns the name of a source's lock."""
        return f"source-{source_digest(source)[:KEY_CHARS]}"

    @contextmanager
    def _alone(self) -> Iterator[bool]:
        """Locks the store exclusively; yields False if a pull is running."""
        self.create()
        with (self.root / "locks" / _STORE_LOCK).open("a") as lock:
            yield any(_locks(lock.fileno()) for _ in range(LOCK_ATTEMPTS))

    def _manifest(self, digest: str, form: ModelForm) -> Path:
        return self.root / "manifests" / f"{digest[:KEY_CHARS]}-{form}.json"

    def _read(self, file: Path) -> pb.StoredModel | None:
        """Returns a manifest; None: it does not exist. Raises _UnreadableError."""
        try:
            with file.open("rb") as opened:
                text = opened.read(MAX_MANIFEST_BYTES).decode()
            found = Parse(text, pb.StoredModel(), ignore_unknown_fields=True)
        except FileNotFoundError:
            return None
        except (OSError, ParseError, UnicodeDecodeError) as error:
            raise _UnreadableError("cannot be read") from error
        if found.schema_version > SCHEMA_VERSION:
            raise _UnreadableError("was written by a newer weft")
        return self._shown(found)

    def _shown(self, model: pb.StoredModel) -> pb.StoredModel:
        model.path = str(self.path_of(model))
        return model

    def _link_files(self, model: pb.StoredModel) -> None:
        """Creates the snapshot folder of a model atomically."""
        folder = self.root / "snapshots" / model.folder
        temporary = folder.with_name(f".{model.folder}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            for file in model.files:
                link = temporary / file.path
                link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                depth = file.path.count("/")
                link.symlink_to(Path(*[".."] * (depth + 2), "blobs", self.blob(file.sha256).name))
            if folder.exists() and not self.is_whole(model):
                shutil.rmtree(folder)
            if not folder.exists():
                temporary.replace(folder)
                _sync_folder(folder.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


class _UnreadableError(Exception):
    """A manifest cannot be read; the message says why."""


def source_digest(source: ModelSource) -> str:
    """Returns the SHA-256 of a complete source, in hex."""
    return _digest_of(str(source))


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _content_digest(files: Sequence[pb.StoredFile]) -> str:
    """Returns the digest of a model: that of its only file, or one over names and digests."""
    return f"sha256:{files[0].sha256 if len(files) == 1 else _names_digest(files)}"


def _names_digest(files: Iterable[pb.StoredFile]) -> str:
    return _digest_of(json.dumps(sorted((file.path, file.sha256) for file in files)))


def _locks(file: int, *, is_shared: bool = False) -> bool:
    try:
        lock_file(file, is_shared=is_shared)
    except OSError:
        time.sleep(LOCK_PAUSE_SECONDS)
        return False
    return True


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _is_older(file: Path, than: float) -> bool:
    try:
        return file.lstat().st_mtime < than
    except OSError:
        return False


def _unlink(file: Path) -> int:
    """Removes a file and returns its size; 0: it did not exist."""
    try:
        size = file.lstat().st_size
        file.unlink()
    except FileNotFoundError:
        return 0
    return size


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
