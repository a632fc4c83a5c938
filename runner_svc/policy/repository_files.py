"""Selects a model's files in a repository: one of several quantizations, all its parts, or a whole folder.

From a folder only files that engines load are selected: weights as safetensors (or CTranslate2's), configuration and
tokenizer. Pickled weights and programs are never selected.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import PurePosixPath
from typing import assert_never

from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.models.model_source import GGUF, SPLIT_PART, is_safe_path
from weft.kernel.values.names import closest_names

USUAL_QUANTIZATIONS = ("Q4_K_M", "Q4_0", "Q8_0")
"""Order of preference if no quantization is named, as in other programs."""
PROJECTOR_TYPES = ("F16", "BF16", "Q8_0", "F32")
"""Order of preference among several projectors."""
MAX_LISTED = 24
MAX_FILE_COUNT = 20_000
SAFETENSORS = ".safetensors"
_CONFIGURATION = "config.json"
_CTRANSLATE2_WEIGHTS = "model.bin"
_VOICE, _VOICE_CONFIGURATION = ".onnx", ".json"
_PIPELINE_INDEX = "model_index.json"
_PIPELINE_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|model)(?P<variant>\.[A-Za-z0-9_]{1,32})?(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index)?(?:\.json)?"
)
_PIPELINE_VARIANT = ".fp16"
"""Used if a component has no weights of the default variant."""
_PIPELINE_SUFFIXES = (".json", ".txt", ".model")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FOLDER_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", SAFETENSORS)
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])(?P<name>(?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4(?:_\w+)?|NVFP4|BF16|F16|F32|FP16|FP32))(?=$|[-._/])",
    re.IGNORECASE,
)


class ModelForm(StrEnum):
    """The form of a model's files, determined by its engine."""

    GGUF = "gguf"
    """A GGUF file, or its parts."""
    FOLDER = "folder"
    """A folder with configuration, tokenizer and weights."""


class FileRole(StrEnum):
    """What a file is for."""

    WEIGHTS = "weights"
    PROJECTOR = "projector"
    """The image or audio encoder beside a GGUF."""
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryFile:
    """One file of a repository."""

    path: str
    """Relative path with slashes."""
    size_bytes: int
    sha256: str = ""
    """Hex; empty: unknown."""
    git_digest: str = ""
    """Git's SHA-1 in hex; empty: unknown."""
    role: FileRole = FileRole.OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChoice:
    """The selected files of a model."""

    form: ModelForm
    files: tuple[RepositoryFile, ...]
    main_path: str = ""
    """The file to give to the engine; empty: the folder."""
    quantization: str = ""
    """From the file name; empty: it has none."""

    @property
    def size_bytes(self) -> int:
        """Total size."""
        return sum(file.size_bytes for file in self.files)

    @property
    def weight_bytes(self) -> int:
        """Size of its weights."""
        return sum(file.size_bytes for file in self.files if file.role is FileRole.WEIGHTS)


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF model of a repository: a file, or its parts in order."""

    parts: tuple[RepositoryFile, ...]

    @property
    def path(self) -> str:
        """The path of the file, or of its first part."""
        return self.parts[0].path

    @property
    def quantization(self) -> str:
        """See `quantization_of`."""
        return quantization_of(self.path)

    @property
    def size_bytes(self) -> int:
        """Size of its weights."""
        return sum(part.size_bytes for part in self.parts)


def quantization_of(path: str) -> str:
    """Returns the quantization in the name of a GGUF file or of its folder, such as "Q4_K_M"; empty: none."""
    pure = PurePosixPath(path)
    part = SPLIT_PART.fullmatch(pure.name)
    stem = part["stem"] if part is not None else pure.stem
    for text in (stem, pure.parent.name):
        found = [match["name"] for match in _QUANTIZATION.finditer(text)]
        if found:
            return str(found[-1]).upper()
    return ""


def choose_files(files: Sequence[RepositoryFile], wanted: str, form: ModelForm | None, field: str) -> FileChoice:
    """Returns the files of the wanted model: a quantization or file name; empty: the best choice.

    `form` is the form that its engine loads; None: GGUF if available. Raises INVALID_ARGUMENT naming `field`, with the
    choices.
    """
    if len(files) > MAX_FILE_COUNT:
        raise invalid_field(field, f"the repository has {len(files)} files; at most {MAX_FILE_COUNT} are supported")
    unsafe = next((file.path for file in files if not is_safe_path(file.path)), None)
    if unsafe is not None:
        raise invalid_field(field, f"the repository has a file with an invalid name: {unsafe[:200]!r}")
    models, projectors = gguf_models(files), [file for file in files if _is_projector(file.path)]
    match form if form is not None else _form_of(models, files, wanted):
        case ModelForm.GGUF:
            return _gguf_choice(models, projectors, wanted, field)
        case ModelForm.FOLDER:
            if voices := _voices(files):
                return _voice_choice(voices, wanted, field)
            if wanted:
                raise invalid_field(field, f"{wanted!r} is one part, and this engine loads the whole folder; remove it")
            return _folder_choice(files, field)
        case unknown:
            assert_never(unknown)


def _form_of(models: Sequence[GgufModel], files: Sequence[RepositoryFile], wanted: str) -> ModelForm:
    if models or wanted or not any(_is_weight(file.path) for file in files):
        return ModelForm.GGUF
    return ModelForm.FOLDER


def gguf_models(files: Sequence[RepositoryFile]) -> list[GgufModel]:
    """Returns the GGUF models of a repository, with the parts of split ones combined; incomplete ones are dropped."""
    single: list[GgufModel] = []
    split: dict[tuple[str, int], dict[int, RepositoryFile]] = {}
    for file in files:
        name = PurePosixPath(file.path).name.lower()
        if not name.endswith(GGUF) or _is_projector(file.path) or "imatrix" in name:
            continue
        part = SPLIT_PART.fullmatch(file.path)
        if part is None or int(part["count"]) == 1:
            single.append(GgufModel((file,)))
        else:
            split.setdefault((part["stem"], int(part["count"])), {})[int(part["number"])] = file
    whole = [
        GgufModel(tuple(parts[number] for number in sorted(parts)))
        for (_, count), parts in split.items()
        if sorted(parts) == list(range(1, count + 1))
    ]
    return sorted([*single, *whole], key=lambda model: model.path)


def _gguf_choice(
    models: Sequence[GgufModel], projectors: Sequence[RepositoryFile], wanted: str, field: str
) -> FileChoice:
    if not models:
        raise invalid_field(field, "the repository has no GGUF file, which this engine loads")
    chosen = _named(models, wanted, field) if wanted else _usual(models, field)
    files = [replace(part, role=FileRole.WEIGHTS) for part in chosen.parts]
    projector = _projector_beside(chosen.path, projectors)
    if projector is not None:
        files.append(replace(projector, role=FileRole.PROJECTOR))
    return FileChoice(form=ModelForm.GGUF, files=tuple(files), main_path=chosen.path, quantization=chosen.quantization)


def _named(models: Sequence[GgufModel], wanted: str, field: str) -> GgufModel:
    """Returns the model with this path, name or quantization, or the only one that starts with it."""
    low = wanted.lower()
    tests: tuple[Callable[[GgufModel], bool], ...] = (
        lambda model: any(part.path == wanted for part in model.parts),
        lambda model: any(_matches(part.path, low) for part in model.parts),
        lambda model: model.quantization.lower() == low,
        lambda model: model.quantization.lower().removeprefix("ud-") == low,
        lambda model: _letters(model.quantization) == _letters(wanted),
        lambda model: model.quantization.lower().startswith(f"{low}_"),
    )
    for test in tests:
        found = [model for model in models if test(model)]
        if len(found) == 1:
            return found[0]
        if found:
            raise _choose(field, f"{wanted!r} is ambiguous: name one of the files", (model.path for model in found))
    raise _choose(field, f"{wanted!r} is not in the repository; available", names_of(models))


def _matches(path: str, low: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return low in (path.lower(), name, name.removesuffix(GGUF))


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _usual(models: Sequence[GgufModel], field: str) -> GgufModel:
    if len(models) == 1:
        return models[0]
    for usual in USUAL_QUANTIZATIONS:
        found = [model for model in models if model.quantization == usual]
        if len(found) == 1:
            return found[0]
    raise _choose(field, "add one of the repository's quantizations after a colon; it has", names_of(models))


def names_of(models: Sequence[GgufModel]) -> list[str]:
    """Returns the name to select each model by: its quantization if that is unique, else its file."""
    names = [model.quantization for model in models]
    return [name if name and names.count(name) == 1 else model.path for model, name in zip(models, names, strict=True)]


def _choose(field: str, message: str, names: Iterable[str]) -> FieldError:
    listed = list(names)
    more = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    return invalid_field(field, f"{message}: {', '.join(listed[:MAX_LISTED])}{more}")


def _is_projector(path: str) -> bool:
    name = PurePosixPath(path).name.lower()
    return name.endswith(GGUF) and "mmproj" in name


def _projector_beside(weights: str, projectors: Sequence[RepositoryFile]) -> RepositoryFile | None:
    """Returns the projector for a GGUF, by type: from its folder, else from the root of the repository."""
    for folder in (PurePosixPath(weights).parent, PurePosixPath()):
        near = [file for file in projectors if PurePosixPath(file.path).parent == folder]
        if near:
            return min(near, key=lambda file: (_projector_rank(file.path), file.path))
    return None


def _projector_rank(path: str) -> int:
    kind = quantization_of(path)
    return PROJECTOR_TYPES.index(kind) if kind in PROJECTOR_TYPES else len(PROJECTOR_TYPES)


def _is_weight(path: str) -> bool:
    return path.endswith(SAFETENSORS) or path in (_CTRANSLATE2_WEIGHTS, _PIPELINE_INDEX)


def _voices(files: Sequence[RepositoryFile]) -> dict[str, tuple[RepositoryFile, RepositoryFile]]:
    """Returns the voices of a repository, each an ONNX model with its configuration; empty if it has other models."""
    by_path = {file.path: file for file in files}
    if _CONFIGURATION in by_path:
        return {}
    pairs = ((file, by_path.get(f"{path}{_VOICE_CONFIGURATION}")) for path, file in by_path.items())
    models = ((file, beside) for file, beside in pairs if beside is not None and file.path.endswith(_VOICE))
    return {PurePosixPath(file.path).name.removesuffix(_VOICE): (file, beside) for file, beside in models}


def _voice_choice(voices: Mapping[str, tuple[RepositoryFile, RepositoryFile]], wanted: str, field: str) -> FileChoice:
    """Returns the files of one voice in a folder."""
    name = PurePosixPath(wanted).name.removesuffix(_VOICE) if wanted else ""
    if not name and len(voices) == 1:
        name = next(iter(voices))
    if name not in voices:
        known = closest_names(name, voices, MAX_LISTED) if name else sorted(voices)
        message = f"{wanted!r} is not a voice of the repository" if wanted else "add one of its voices after a colon"
        raise _choose(field, f"{message}; available", known or sorted(voices))
    model, configuration = voices[name]
    return _folder([model], [configuration])


def _folder_choice(files: Sequence[RepositoryFile], field: str) -> FileChoice:
    root = {file.path: file for file in files if "/" not in file.path}
    if _PIPELINE_INDEX in root:
        return _pipeline_choice(files, root[_PIPELINE_INDEX], field)
    if _CONFIGURATION not in root:
        raise invalid_field(field, f"the repository has no {_CONFIGURATION} beside its weights")
    weights = _folder_weights(root)
    if not weights:
        pickled = next((path for path in root if path.endswith(_PICKLES)), None)
        if pickled is not None:
            message = f"its weights ({pickled}) are pickled Python, which is not loaded; use one with safetensors"
            raise invalid_field(field, message)
        raise invalid_field(field, f"the repository has no {SAFETENSORS} file beside its {_CONFIGURATION}")
    others = [
        file
        for path, file in root.items()
        if path.endswith(_FOLDER_SUFFIXES) and not path.endswith(SAFETENSORS) and path not in weights
    ]
    return _folder(weights.values(), others)


def _pipeline_choice(files: Sequence[RepositoryFile], index: RepositoryFile, field: str) -> FileChoice:
    """Returns the files of a pipeline: its index, and each component's configuration and one set of weights."""
    weights: list[RepositoryFile] = []
    others = [index]
    by_component: dict[str, dict[str, list[RepositoryFile]]] = {}
    for file in files:
        pure = PurePosixPath(file.path)
        if len(pure.parts) != 2:
            continue
        if (found := _PIPELINE_WEIGHTS.fullmatch(pure.name)) is not None:
            variants = by_component.setdefault(pure.parts[0], {})
            variants.setdefault(found["variant"] or "", []).append(file)
        elif pure.suffix in _PIPELINE_SUFFIXES and ".index." not in pure.name:
            others.append(file)
    for variants in by_component.values():
        chosen = variants.get("") or variants.get(_PIPELINE_VARIANT) or []
        weights += [file for file in chosen if file.path.endswith(SAFETENSORS)]
        others += [file for file in chosen if not file.path.endswith(SAFETENSORS)]
    if not weights:
        message = f"the components of the pipeline have no {SAFETENSORS} file; pickled weights are not loaded"
        raise invalid_field(field, message)
    return _folder(weights, others)


def _folder(weights: Iterable[RepositoryFile], others: Iterable[RepositoryFile]) -> FileChoice:
    files = [
        replace(file, role=role)
        for role, group in ((FileRole.WEIGHTS, weights), (FileRole.OTHER, others))
        for file in sorted(group, key=lambda file: file.path)
    ]
    return FileChoice(form=ModelForm.FOLDER, files=tuple(files))


def _folder_weights(root: Mapping[str, RepositoryFile]) -> dict[str, RepositoryFile]:
    """Returns one set of a folder's weights as safetensors; some repositories have two layouts."""
    found = {path: file for path, file in root.items() if path.endswith(SAFETENSORS)}
    usual = {path: file for path, file in found.items() if path.startswith("model")}
    if usual:
        return usual
    if found:
        return found
    # CTranslate2's own format, which is not pickled; the engine validates it.
    has_vocabulary = any(path.startswith(("vocabulary.", "shared_vocabulary.", "source_vocabulary.")) for path in root)
    weights = root.get(_CTRANSLATE2_WEIGHTS)
    return {_CTRANSLATE2_WEIGHTS: weights} if weights is not None and has_vocabulary else {}
