"""Models of other programs, in folders laid out as theirs: found, served from where they lie, and never written."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.failures import fails

from runner_svc.model_store.found import FoundSource, ProgramFolders, found_models, locate, program_folders
from runner_svc.policy.repository_files import ModelForm
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import HubSource, LmStudioSource, OllamaSource, parse_source

WEIGHTS, PROJECTOR = b"GGUF weights", b"GGUF projector"
COMMIT = "a" * 40


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home with models of all programs; it is as it was when the test has ended."""
    home = tmp_path / "home"
    _ollama(home / ".ollama/models", "registry.ollama.ai/library/llama3.2/3b", WEIGHTS)
    _ollama(home / ".ollama/models", "registry.ollama.ai/me/seer/latest", WEIGHTS, PROJECTOR)
    _ollama(home / ".ollama/models", "hf.co/acme/tiny-GGUF/Q4_K_M", WEIGHTS)
    studio = home / ".lmstudio/models/acme/tiny-GGUF"
    _write(studio / "tiny-Q4_K_M.gguf", WEIGHTS)
    _write(studio / "tiny-Q8_0.gguf", WEIGHTS)
    _write(studio / "mmproj-tiny-f16.gguf", PROJECTOR)
    cached = home / ".cache/huggingface/hub"
    _cached(cached, "acme/tiny-GGUF", {"tiny-Q4_K_M.gguf": WEIGHTS})
    _cached(cached, "acme/whole", {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"})
    before = _state(home)
    yield home
    assert _state(home) == before


@pytest.fixture
def folders(home: Path) -> ProgramFolders:
    return program_folders({"HOME": str(home)})


def _write(file: Path, content: bytes) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _layer(root: Path, kind: str, content: bytes) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    _write(root / "blobs" / f"sha256-{digest}", content)
    media = f"application/vnd.ollama.image.{kind}"
    return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}


def _ollama(root: Path, name: str, weights: bytes, projector: bytes | None = None) -> None:
    layers = [_layer(root, "model", weights), _layer(root, "template", b"{{ .Prompt }}")]
    layers += [] if projector is None else [_layer(root, "projector", projector)]
    _write(root / "manifests" / name, json.dumps({"schemaVersion": 2, "layers": layers}).encode())


def _cached(root: Path, repository: str, files: dict[str, bytes]) -> None:
    cached = root / f"models--{repository.replace('/', '--')}"
    _write(cached / "refs/main", COMMIT.encode())
    (cached / "snapshots" / COMMIT).mkdir(parents=True)
    for name, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        _write(cached / "blobs" / digest, content)
        (cached / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{digest}")


def _state(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def _source(text: str) -> FoundSource:
    source = parse_source(text, "source")
    assert isinstance(source, HubSource | OllamaSource | LmStudioSource)
    return source


def test_models_of_all_programs_are_found_and_each_source_resolves_to_its_file(folders: ProgramFolders) -> None:
    found = found_models(folders)
    assert [(model.source, model.quantization) for model in found] == [
        ("ollama:hf.co/acme/tiny-GGUF:Q4_K_M", "Q4_K_M"),
        ("ollama:llama3.2:3b", ""),
        ("ollama:me/seer:latest", ""),
        ("lmstudio:acme/tiny-GGUF:tiny-Q4_K_M.gguf", "Q4_K_M"),
        ("lmstudio:acme/tiny-GGUF:tiny-Q8_0.gguf", "Q8_0"),
        ("hfcache:acme/tiny-GGUF:tiny-Q4_K_M.gguf", "Q4_K_M"),
        ("hfcache:acme/whole", ""),
    ]
    for model in found:
        files = locate(_source(model.source), None, folders)
        assert (str(files.path), str(files.projector or "")) == (model.path, model.projector_path)
        assert files.size_bytes == model.size_bytes


@pytest.mark.parametrize(
    ("text", "has_projector"),
    [
        ("ollama:llama3.2:3b", False),
        ("ollama:me/seer", True),
        ("ollama:hf.co/acme/tiny-GGUF:Q4_K_M", False),
        ("lmstudio:acme/tiny-GGUF:q4_k_m", True),
        ("hfcache:acme/tiny-GGUF", False),
        (f"hfcache:acme/tiny-GGUF@{COMMIT}", False),
    ],
)
def test_model_is_served_from_its_location(folders: ProgramFolders, text: str, has_projector: bool) -> None:
    files = locate(_source(text), ModelForm.GGUF, folders)
    assert files.path.read_bytes() == WEIGHTS
    assert (files.projector is not None) == has_projector
    assert files.projector is None or files.projector.read_bytes() == PROJECTOR


def test_hub_cache_folder_is_served_completely(folders: ProgramFolders) -> None:
    files = locate(_source("hfcache:acme/whole"), ModelForm.FOLDER, folders)
    assert sorted(path.name for path in files.path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        ("ollama:llama3.2:70b", Reason.NOT_FOUND, "is not on this machine"),
        ("lmstudio:acme/other", Reason.NOT_FOUND, "weft models ls --found lists those that are"),
        ("hfcache:acme/other", Reason.NOT_FOUND, "is not on this machine"),
        ("hfcache:acme/tiny-GGUF@v2", Reason.NOT_FOUND, "is not on this machine"),
        ("lmstudio:acme/tiny-GGUF:Q2_K", Reason.INVALID_ARGUMENT, "available: Q4_K_M, Q8_0"),
    ],
)
def test_missing_model_error_lists_the_searched_locations(
    folders: ProgramFolders, text: str, reason: Reason, words: str
) -> None:
    with fails(reason) as raised:
        locate(_source(text), None, folders)
    assert words in raised.value.message


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b'{"layers": 5}',
        b'{"layers": []}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../etc/passwd"}]}',
        b'{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:' + b"0" * 64 + b'"}]}',
    ],
)
def test_damaged_or_dangling_manifest_is_not_a_model(tmp_path: Path, manifest: bytes) -> None:
    _write(tmp_path / ".ollama/models/manifests/registry.ollama.ai/library/x/latest", manifest)
    folders = program_folders({"HOME": str(tmp_path)})
    assert found_models(folders) == []
    with fails(Reason.INVALID_ARGUMENT):
        locate(_source("ollama:x"), None, folders)


def test_folders_follow_the_program_variables(tmp_path: Path) -> None:
    given = {"HOME": "/h", "OLLAMA_MODELS": str(tmp_path / "o"), "HF_HUB_CACHE": str(tmp_path / "c")}
    folders = program_folders(given)
    assert folders.ollama == (tmp_path / "o",)
    assert folders.hub_cache == tmp_path / "c"
    assert program_folders({"HOME": "/h", "HF_HOME": "/f"}).hub_cache == Path("/f/hub")


def test_unreadable_folder_has_no_models(tmp_path: Path) -> None:
    _write(tmp_path / ".lmstudio", b"a file in its place")
    assert found_models(program_folders({"HOME": str(tmp_path), "OLLAMA_MODELS": os.devnull})) == []


def test_name_that_is_not_text_hides_no_other_model(tmp_path: Path) -> None:
    """`weft models ls --found` and a start without a configuration failed with a UnicodeEncodeError."""
    odd = os.fsdecode(b"caf\xe9")
    for name in ("caf", odd):
        _ollama(tmp_path / ".ollama/models", f"registry.ollama.ai/library/{name}/latest", WEIGHTS)
        _write(tmp_path / ".lmstudio/models/acme" / name / "tiny-Q4_K_M.gguf", WEIGHTS)
    found = found_models(program_folders({"HOME": str(tmp_path)}))
    assert [one.source for one in found] == ["ollama:caf:latest", "lmstudio:acme/caf:tiny-Q4_K_M.gguf"]


def test_folder_that_cannot_be_searched_is_an_error_of_the_source(tmp_path: Path) -> None:
    """As that of Ollama's service for users outside of its group: the load failed with an internal error."""
    folders = program_folders({"HOME": str(tmp_path), "OLLAMA_MODELS": f"{tmp_path}/{'x' * 300}"})
    with fails(Reason.NOT_FOUND, match="ollama:x:latest"):
        locate(_source("ollama:x"), None, folders)
