"""Reads a pipeline folder: `model_index.json`, and the weights of the components it lists.

Standard library only: the runner uses it to estimate memory, and the server program before loading. Only safetensors
weights are supported. A folder that contains Python, or a component from an unknown library, is rejected.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_NAME = "model_index.json"
MAX_INDEX_BYTES = 1024 * 1024
MAX_FILES = 20_000
MAX_COMPONENTS = 64
SAFETENSORS = ".safetensors"
PICKLES = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
"""Suffixes of weights that are pickled Python."""
PROGRAM = ".py"
LIBRARIES = frozenset({"diffusers", "transformers", "stable_diffusion"})
"""Allowed libraries of component classes; `stable_diffusion` is part of diffusers."""
USUAL_VARIANTS = ("fp16", "bf16")
"""Order of weight variants for a component without default ones."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|model)"
    r"(?:\.(?P<variant>[A-Za-z0-9_]{1,32}))?(?:-\d{5}-of-\d{5})?(?:\.(?P<late_variant>[A-Za-z0-9_]{1,32}))?\.safetensors"
)


class PipelineFolderError(ValueError):
    """The folder is not a pipeline, or has parts that are not loaded; the message says which and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFolder:
    """The facts in a pipeline folder."""

    class_name: str
    components: frozenset[str]
    absent: frozenset[str]
    """Optional components of such a pipeline that this one lacks."""
    variant: str
    """The weight variant; empty: the default one."""
    files: Mapping[str, tuple[Path, ...]]
    """Weight files to load, by component."""
    sizes: Mapping[str, int]
    """Size of these files in bytes, by component."""

    @property
    def weight_bytes(self) -> int:
        """Total size of all weights to load."""
        return sum(self.sizes.values())


def is_pipeline(path: Path) -> bool:
    """Whether the path is a folder with a pipeline index. Raises OSError."""
    return (path / INDEX_NAME).is_file()


def read_pipeline_folder(folder: Path, variant: str | None = None) -> PipelineFolder:
    """Reads a pipeline folder; `variant`: that of the weights, None: the one that it has.

    Raises PipelineFolderError, OSError.
    """
    index = _index(folder)
    class_name = index.get("_class_name")
    if not isinstance(class_name, str) or _NAME.fullmatch(class_name) is None:
        raise PipelineFolderError(f"{INDEX_NAME} does not name a pipeline class of diffusers")
    _refuse_programs(folder)
    entries = {name: _entry(name, value) for name, value in index.items() if isinstance(value, list)}
    if len(entries) > MAX_COMPONENTS:
        raise PipelineFolderError(f"{INDEX_NAME} has more than {MAX_COMPONENTS} components")
    present = sorted(name for name, exists in entries.items() if exists)
    found = {name: _weights_in(folder / name) for name in present}
    chosen = (
        variant if variant is not None else _own_variant([by_variant for by_variant in found.values() if by_variant])
    )
    files = {name: _chosen(name, by_variant, chosen) for name, by_variant in found.items() if by_variant}
    if not files:
        raise PipelineFolderError(f"none of its components has a {SAFETENSORS} file; other weights are not loaded")
    return PipelineFolder(
        class_name=class_name,
        components=frozenset(present),
        absent=frozenset(entries) - frozenset(present),
        variant=chosen,
        files=files,
        sizes={name: sum(file.stat().st_size for file in weights) for name, weights in files.items()},
    )


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_NAME
    if not path.is_file():
        raise PipelineFolderError(
            f"there is no {INDEX_NAME} in {folder}: expected a pipeline folder as written by save_pretrained"
        )
    with path.open("rb") as file:
        raw = file.read(MAX_INDEX_BYTES + 1)
    if len(raw) > MAX_INDEX_BYTES:
        raise PipelineFolderError(f"{INDEX_NAME} is longer than {MAX_INDEX_BYTES} bytes")
    try:
        index = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PipelineFolderError(f"{INDEX_NAME} is not valid JSON: {error}") from None
    if not isinstance(index, dict):
        raise PipelineFolderError(f"{INDEX_NAME} is not a JSON object")
    return index


def _entry(name: str, value: list[Any]) -> bool:
    """Whether a component is present. Raises PipelineFolderError for one from an unknown library."""
    if _NAME.fullmatch(name) is None:
        raise PipelineFolderError(f"{INDEX_NAME} has a component with an invalid name: {name[:64]!r}")
    if value in ([None, None], [None]):
        return False
    is_known = len(value) == 2 and value[0] in LIBRARIES and isinstance(value[1], str)
    if not is_known or _NAME.fullmatch(value[1]) is None:
        shown = json.dumps(value)[:128]
        raise PipelineFolderError(f"the component {name} is {shown}: code that comes with a model is never run")
    return True


def _refuse_programs(folder: Path) -> None:
    for count, file in enumerate(_files(folder)):
        if count >= MAX_FILES:
            raise PipelineFolderError(f"{folder} has more than {MAX_FILES} files")
        if file.suffix == PROGRAM:
            where = file.relative_to(folder)
            raise PipelineFolderError(f"{where} is a program: code that comes with a model is never run; remove it")


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (Path(root) / name for name in names)


def _weights_in(folder: Path) -> dict[str, list[Path]]:
    """Returns a component's safetensors by variant; empty: it has no weights. Raises PipelineFolderError."""
    names = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    found: dict[str, list[Path]] = {}
    for file in names:
        if (match := _WEIGHTS.fullmatch(file.name)) is not None:
            found.setdefault(match["variant"] or match["late_variant"] or "", []).append(file)
    pickled = next((file for file in names if file.suffix in PICKLES), None)
    if not found and pickled is not None:
        where = f"{folder.name}/{pickled.name}"
        raise PipelineFolderError(f"{where} is pickled Python, which is never loaded; use a folder with {SAFETENSORS}")
    return found


def _own_variant(components: list[dict[str, list[Path]]]) -> str:
    """Returns the variant that the components have; empty if all have default weights."""
    lacking = [by_variant for by_variant in components if "" not in by_variant]
    if not lacking:
        return ""
    shared = set.intersection(*(set(by_variant) for by_variant in lacking))
    return next((name for name in (*USUAL_VARIANTS, *sorted(shared)) if name in shared), "")


def _chosen(name: str, by_variant: dict[str, list[Path]], variant: str) -> tuple[Path, ...]:
    weights = by_variant.get(variant) or by_variant.get("")
    if weights is None:
        there = ", ".join(sorted(by_variant))
        raise PipelineFolderError(f"the component {name} has no weights of the variant {variant!r}; available: {there}")
    return tuple(weights)
