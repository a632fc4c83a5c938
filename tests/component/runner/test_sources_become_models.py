"""What a runner of weft.yaml makes of a source: the engine by its files, and the settings that weft.yaml would have."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from kit.failures import fails

from runner_svc.added_models import AddRequest
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.model_store.store import ModelStore
from runner_svc.policy.engine_choice import EngineCandidate, WeightFormat
from runner_svc.runner_settings import ModelStoreSettings, RunnerSettings
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.runtime_settings import ModelSettings
from weft.api.runner.v1 import added_model_pb2, model_store_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import asked_source
from weft_app.compose.added_models import SectionAdder
from weft_app.compose.model_sources import ModelSources
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

if TYPE_CHECKING:
    from runner_svc.backend.port import Backend

CANDIDATES = [
    EngineCandidate(name="exllamav3", formats=frozenset({WeightFormat.EXL3}), remedy="weft runtime install exllamav3"),
    EngineCandidate(name="vllm", formats=frozenset({WeightFormat.SAFETENSORS})),
    EngineCandidate(name="llama_server", formats=frozenset({WeightFormat.GGUF})),
]
UNLOADED = cast("Backend", SimpleNamespace(load_parameters=()))
SIZING = added_model_pb2.ModelSizing(context_tokens=4096, slots=2, gpu_layers=7)


def _hide(_: model_store_pb2.PullProgress) -> None:
    """A ShowPull that shows nothing."""


@dataclass
class Workshop:
    """A SectionAdder for one runner, and the settings that it has built models from."""

    folder: Path
    built: list[tuple[RunnerSettings, ModelSettings]] = field(default_factory=list)
    sized: int = 0

    def __post_init__(self) -> None:
        section = parse_section(
            ConfiguredRunner,
            {"name": "local", "command": ["engine"], "models": [{"name": "own", "path": "/own.gguf"}]},
        )
        sources = ModelSources(ModelStore(self.folder / "models"), ModelStoreSettings())
        environments = EnvironmentFolder(self.folder / "runtimes")
        self.adder = SectionAdder(section, sources, ModelContext(where="", environments=environments), self._build)

    def _build(self, section: RunnerSettings, model: ModelSettings) -> ServedModel:
        self.built.append((section, model))
        return ServedModel(name=model.name, make_backend=lambda: UNLOADED)

    async def size(self, *_: object) -> tuple[added_model_pb2.ModelSizing, tuple[str, ...]]:
        """In place of `size_by_memory`."""
        self.sized += 1
        return SIZING, ("it fits",)

    async def prepare(self, source: str) -> added_model_pb2.AddedModel:
        served = await self.adder.prepare(AddRequest(source=asked_source(source, "source"), name="tiny"), _hide)
        assert served.added is not None
        return served.added

    @property
    def settings(self) -> ModelSettings:
        return self.built[-1][1]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(tmp_path)
    monkeypatch.setattr("weft_app.compose.added_models.size_by_memory", made.size)
    return made


def _gguf(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "tiny-Q4_0.gguf"
    file.write_bytes(b"GGUF and more")
    return file


async def test_gguf_file_becomes_a_model_of_the_runner_runtime_with_its_size(
    workshop: Workshop, tmp_path: Path
) -> None:
    file = _gguf(tmp_path)
    added = await workshop.prepare(str(file))
    section, model = workshop.built[-1]
    assert (section.name, section.runtime, section.command) == ("local", "llama_server", ("engine",))
    assert (model.name, model.location) == ("tiny", str(file))
    assert (model.context_tokens, model.slots) == (4096, 2)
    assert model.extra_arguments == ("--gpu-layers", "7")  # type: ignore[attr-defined]
    assert model.start_asleep  # type: ignore[attr-defined]
    assert (added.runtime, added.form, added.sizing) == ("llama_server", model_store_pb2.STORED_FORM_GGUF, SIZING)
    assert list(added.reasons) == [
        "llama_server serves it, the runner's own runtime: it is a GGUF file",
        "it fits",
    ]


def test_the_engines_that_may_load_a_source_follow_from_its_files_or_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters of loads by source were checked after the pull alone."""
    monkeypatch.setattr(SectionAdder, "_candidates", lambda _: CANDIDATES)
    workshop = Workshop(tmp_path)

    def engines(source: str) -> list[str]:
        workshop.built.clear()
        workshop.adder.load_parameters(asked_source(source, "source"))
        return [section.runtime for section, _ in workshop.built]

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", "utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    of_gguf = (str(_gguf(tmp_path)), "hf:acme/tiny:Q4_0", "acme/tiny-GGUF", "ollama:tiny", "/nowhere/tiny.gguf")
    for source in (*of_gguf, "https://models.example/tiny.gguf", "lmstudio:acme/tiny-GGUF"):
        assert engines(source) == ["llama_server"], source
    assert engines(str(folder)) == ["vllm"]
    for source in ("hf:acme/tiny", "/nowhere/tiny"):
        assert engines(source) == ["llama_server", "vllm"], source


async def test_restored_model_has_the_same_settings(workshop: Workshop, tmp_path: Path) -> None:
    added = await workshop.prepare(str(_gguf(tmp_path)))
    before = workshop.settings
    restored = workshop.adder.restored(added)
    assert workshop.settings == before
    assert restored.added == added
    assert workshop.sized == 1


async def test_folder_with_one_gguf_file_resolves_to_it_even_after_a_restart(
    workshop: Workshop, tmp_path: Path
) -> None:
    file = _gguf(tmp_path / "tiny")
    added = await workshop.prepare(str(file.parent))
    assert workshop.settings.location == str(file)
    workshop.adder.restored(added)
    assert workshop.settings.location == str(file)
    file.unlink()
    with pytest.raises(WeftError):
        workshop.adder.restored(added)


@pytest.mark.parametrize(
    ("configuration", "command"),
    [
        ({}, "weft runtime install vllm"),
        ({"quantization_config": {"quant_method": "exl3"}}, "weft runtime install exllamav3"),
    ],
)
async def test_folder_without_an_installed_engine_is_rejected_with_the_install_command(
    workshop: Workshop, tmp_path: Path, configuration: dict[str, object], command: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configuration), "utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    with fails(Reason.UNSUPPORTED_OPERATION, match=command):
        await workshop.prepare(str(folder))
    assert workshop.built == []


@pytest.mark.parametrize(
    ("source", "reason", "words"),
    [
        ("./tiny.gguf", Reason.INVALID_ARGUMENT, "absolute path"),
        ("{folder}/absent.gguf", Reason.NOT_FOUND, "cannot be read"),
        (f"/{'x' * 300}.gguf", Reason.NOT_FOUND, "cannot be read on the runner's machine: File name too long"),
        ("~nobody-here/tiny.gguf", Reason.NOT_FOUND, "cannot be read on the runner's machine: there is no such user"),
        ("{folder}/notes.txt", Reason.INVALID_ARGUMENT, "is not a GGUF file"),
        ("ollama:absent", Reason.NOT_FOUND, "is not on this machine"),
    ],
)
async def test_source_that_is_no_model_is_rejected(
    workshop: Workshop, tmp_path: Path, source: str, reason: Reason, words: str
) -> None:
    (tmp_path / "notes.txt").write_text("notes", "utf-8")
    with fails(reason, match=words):
        await workshop.prepare(source.format(folder=tmp_path))


def test_missing_runtime_is_reported(workshop: Workshop) -> None:
    gone = added_model_pb2.AddedModel(name="tiny", stored_source="hf:a/b", runtime="gone")
    with pytest.raises(WeftError, match="gone is not installed any more"):
        workshop.adder.restored(gone)
