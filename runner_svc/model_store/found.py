"""Models that other programs have pulled on this machine: the hub's cache, Ollama, LM Studio and llama.cpp.

Their folders are read, never written: a model is served from its place, and is gone if that program removes it.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from runner_svc.model_store.store import FORMS
from runner_svc.policy.repository_files import (
    FileChoice,
    FileRole,
    ModelForm,
    RepositoryFile,
    choose_files,
    gguf_models,
    quantization_of,
)
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import HubSource, LmStudioSource, OllamaSource, SourceScheme, is_safe_path

MAX_FILES = 10_000
"""Maximum number of files examined per folder."""
MAX_FOUND = 1_000
"""Maximum number of models listed per program."""
MAX_MANIFEST_BYTES = 1024**2
FIELD = "source"
OLLAMA, LM_STUDIO, LLAMA_CPP, HUGGING_FACE = "ollama", "lmstudio", "llama.cpp", "huggingface"
_OLLAMA_REGISTRY, _OLLAMA_LIBRARY = "registry.ollama.ai", "library"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_PROJECTOR_LAYER = "application/vnd.ollama.image.projector"
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")

FoundSource = HubSource | OllamaSource | LmStudioSource


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFiles:
    """The files of a model in another program's folder."""

    path: Path
    projector: Path | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFolders:
    """Model folders of other programs; a missing folder has no models."""

    hub_cache: Path
    ollama: tuple[Path, ...]
    lm_studio: tuple[Path, ...]
    llama_cpp: tuple[Path, ...] = ()


def program_folders(environment: Mapping[str, str] = os.environ) -> ProgramFolders:
    """Returns the folders from the programs' environment variables and their usual places."""
    home = Path(environment.get("HOME") or Path.home())
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(environment.get("HF_HOME") or cache / "huggingface") / "hub"
    own = environment.get("OLLAMA_MODELS")
    # The second is used by the service that Ollama's installer creates.
    ollama = (Path(own),) if own else (home / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))
    return ProgramFolders(
        hub_cache=Path(environment.get("HF_HUB_CACHE") or hub).expanduser(),
        ollama=ollama,
        lm_studio=(home / ".lmstudio" / "models", cache / "lm-studio" / "models"),
        llama_cpp=(Path(environment.get("LLAMA_CACHE") or cache / "llama.cpp").expanduser(),),
    )


def found_models(folders: ProgramFolders) -> list[pb.FoundModel]:
    """Returns the models of all programs, sorted by program and name. Unreadable ones are skipped."""
    found: list[pb.FoundModel] = []
    for models in (
        _ollama_models(folders),
        _lm_studio_models(folders),
        _llama_cpp_models(folders),
        _cached_models(folders),
    ):
        found += islice(models, MAX_FOUND)
    return found


def locate(source: FoundSource, form: ModelForm | None, folders: ProgramFolders) -> FoundFiles:
    """Returns the files of a model of another program.

    Raises NOT_FOUND if it is not on this machine or not readable, INVALID_ARGUMENT if its files cannot be loaded.
    """
    try:
        return _located(source, form, folders)
    except OSError as error:
        message = f"{source} cannot be read on this machine: {error.strerror} ({error.filename})"
        raise WeftError(Reason.NOT_FOUND, message) from error


def _located(source: FoundSource, form: ModelForm | None, folders: ProgramFolders) -> FoundFiles:
    match source:
        case OllamaSource():
            return _ollama_files(source, form, folders)
        case LmStudioSource():
            for folder in folders.lm_studio:
                if (folder / source.repository).is_dir():
                    return _chosen_files(folder / source.repository, source.wanted, form)
            raise _absent(source, folders.lm_studio)
        case HubSource():
            snapshot = _snapshot(source, folders.hub_cache)
            if snapshot is None:
                raise _absent(source, (folders.hub_cache,))
            return _chosen_files(snapshot, source.wanted, form)


def found_in_folder(folder: Path) -> FoundFiles:
    """Returns the files of a folder's model, preferring GGUF. Raises INVALID_ARGUMENT unless it has exactly one."""
    return _chosen_files(folder, "", None)


def _absent(source: FoundSource, folders: Iterable[Path]) -> WeftError:
    where = ", ".join(map(str, folders))
    return WeftError(
        Reason.NOT_FOUND, f"{source} is not on this machine ({where}); weft models ls --found lists those that are"
    )


def _chosen_files(folder: Path, wanted: str, form: ModelForm | None) -> FoundFiles:
    return _files_of(folder, choose_files(_listed(folder), wanted, form, FIELD))


def _files_of(folder: Path, choice: FileChoice) -> FoundFiles:
    projectors = (folder / file.path for file in choice.files if file.role is FileRole.PROJECTOR)
    path = folder / choice.main_path if choice.main_path else folder
    return FoundFiles(path=path, projector=next(projectors, None), size_bytes=choice.size_bytes)


def _listed(folder: Path) -> list[RepositoryFile]:
    """Returns the files in a folder and two levels below it, without broken links."""
    found = []
    for pattern in ("*", "*/*", "*/*/*"):
        for file in islice(folder.glob(pattern), MAX_FILES):
            with suppress(OSError):
                name = file.relative_to(folder).as_posix()
                if file.is_file() and is_safe_path(name):
                    found.append(RepositoryFile(path=name, size_bytes=file.stat().st_size))
    return found


def _listed_models(folder: Path, program: str, source_of: Callable[[str], str]) -> Iterator[pb.FoundModel]:
    """Yields each model in a folder; `source_of` returns the source for a file name (empty: the folder)."""
    files = _listed(folder)
    for path in (model.path for model in gguf_models(files)):
        with suppress(FieldError):
            yield _found(
                program, source_of(path), ModelForm.GGUF, _files_of(folder, choose_files(files, path, None, ""))
            )
    with suppress(FieldError):
        whole = _files_of(folder, choose_files(files, "", ModelForm.FOLDER, ""))
        yield _found(program, source_of(""), ModelForm.FOLDER, whole)


def _found(program: str, source: str, form: ModelForm, files: FoundFiles, quantization: str = "") -> pb.FoundModel:
    return pb.FoundModel(
        source=source,
        program=program,
        form=FORMS[form],
        quantization=quantization or (quantization_of(files.path.name) if form is ModelForm.GGUF else ""),
        path=str(files.path),
        projector_path=str(files.projector or ""),
        size_bytes=files.size_bytes,
    )


def _lm_studio_models(folders: ProgramFolders) -> Iterator[pb.FoundModel]:
    for root in folders.lm_studio:
        for repository in _folders(root, "*/*"):
            name = repository.relative_to(root).as_posix()

            def source_of(path: str, name: str = name) -> str:
                return str(LmStudioSource(repository=name, wanted=path))

            yield from _listed_models(repository, LM_STUDIO, source_of)


def _llama_cpp_models(folders: ProgramFolders) -> Iterator[pb.FoundModel]:
    """Yields files pulled by llama.cpp's programs, without projectors: the folder does not assign them to models."""
    for root in folders.llama_cpp:
        files = [file for file in _listed(root) if "/" not in file.path]
        for path in (model.path for model in gguf_models(files)):
            with suppress(FieldError):
                chosen = replace(_files_of(root, choose_files(files, path, None, "")), projector=None)
                yield _found(LLAMA_CPP, str(root / path), ModelForm.GGUF, chosen)


def _cached_models(folders: ProgramFolders) -> Iterator[pb.FoundModel]:
    for cached in _folders(folders.hub_cache, "models--*--*"):
        owner, _, name = cached.name.removeprefix("models--").partition("--")
        for reference in _references(cached):
            snapshot = cached / "snapshots" / _text_of(cached / "refs" / reference)

            def source_of(path: str, repository: str = f"{owner}/{name}", reference: str = reference) -> str:
                scheme = SourceScheme.HUB_CACHE
                return str(HubSource(repository=repository, wanted=path, revision=reference, scheme=scheme))

            if snapshot.is_dir():
                yield from _listed_models(snapshot, HUGGING_FACE, source_of)


def _references(cached: Path) -> list[str]:
    root = cached / "refs"
    return [file.relative_to(root).as_posix() for file in _folders(root, "**/*", files=True)]


def _snapshot(source: HubSource, cache: Path) -> Path | None:
    """Returns a revision's folder in the hub's cache; None: it is missing."""
    cached = cache / f"models--{source.repository.replace('/', '--')}"
    for commit in (_text_of(cached / "refs" / source.revision), source.revision):
        snapshot = cached / "snapshots" / commit
        if commit and "/" not in commit and snapshot.is_dir():
            return snapshot
    return None


def _ollama_models(folders: ProgramFolders) -> Iterator[pb.FoundModel]:
    for root in folders.ollama:
        manifests = root / "manifests"
        for file in _folders(manifests, "*/*/*/*", files=True):
            registry, namespace, name, tag = file.relative_to(manifests).parts
            source = OllamaSource(name=_ollama_name(registry, namespace, name), tag=tag)
            with suppress(WeftError):
                found = _files_of_manifest(root, file, source)
                yield _found(OLLAMA, str(source), ModelForm.GGUF, found, quantization_of(f"x-{tag}.gguf"))


def _ollama_name(registry: str, namespace: str, name: str) -> str:
    if registry != _OLLAMA_REGISTRY:
        return f"{registry}/{namespace}/{name}"
    return name if namespace == _OLLAMA_LIBRARY else f"{namespace}/{name}"


def _ollama_files(source: OllamaSource, form: ModelForm | None, folders: ProgramFolders) -> FoundFiles:
    if form is ModelForm.FOLDER:
        raise invalid_field(FIELD, f"{source} is a GGUF file, and this engine loads a folder")
    parts = source.name.split("/")
    steps = [_OLLAMA_REGISTRY, _OLLAMA_LIBRARY, "", ""][: 3 - len(parts)] + parts
    for root in folders.ollama:
        manifest = root.joinpath("manifests", *steps, source.tag)
        if manifest.is_file():
            return _files_of_manifest(root, manifest, source)
    raise _absent(source, folders.ollama)


def _files_of_manifest(root: Path, manifest: Path, source: OllamaSource) -> FoundFiles:
    """Returns the blobs of a manifest. Raises INVALID_ARGUMENT unless it has exactly one complete model."""
    try:
        with manifest.open("rb") as file:
            layers = [layer for layer in json.loads(file.read(MAX_MANIFEST_BYTES))["layers"] if isinstance(layer, dict)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise invalid_field(FIELD, f"the manifest of {source} cannot be read") from error
    weights = [_blob(root, layer) for layer in layers if layer.get("mediaType") == _MODEL_LAYER]
    projectors = [_blob(root, layer) for layer in layers if layer.get("mediaType") == _PROJECTOR_LAYER]
    if len(weights) != 1 or weights[0] is None:
        raise invalid_field(FIELD, f"{source} has no single GGUF file that is complete")
    projector = projectors[0] if projectors else None
    size = sum(file.stat().st_size for file in (weights[0], projector) if file is not None)
    return FoundFiles(path=weights[0], projector=projector, size_bytes=size)


def _blob(root: Path, layer: Mapping[str, object]) -> Path | None:
    """Returns a layer's file; None: it is missing or incomplete."""
    found = _DIGEST.fullmatch(str(layer.get("digest")))
    if found is None:
        return None
    blob = root / "blobs" / f"sha256-{found[1]}"
    with suppress(OSError):
        if blob.stat().st_size == layer.get("size"):
            return blob
    return None


def _folders(root: Path, pattern: str, *, files: bool = False) -> list[Path]:
    """Returns the matches in a folder with printable names, sorted; empty if it is unreadable."""
    try:
        found = islice(root.glob(pattern), MAX_FILES)
        named = (path for path in found if is_safe_path(path.relative_to(root).as_posix()))
        return sorted(path for path in named if (path.is_file() if files else path.is_dir()))
    except OSError:
        return []


def _text_of(file: Path) -> str:
    """Returns the short text in a file; empty if it is unreadable."""
    with suppress(OSError, UnicodeDecodeError), file.open("rb") as opened:
        return opened.read(256).decode().strip()
    return ""
