"""Models of vLLM with a `source`: the folder that is pulled is what vLLM is started with."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runner_svc.backend.port import LoadOrder
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.model_store.store import ModelStore
from runner_svc.runner_settings import ModelStoreSettings
from runner_svc.runtimes.runtime_settings import NOT_PULLED, ModelSettings
from runner_svc.runtimes.vllm.arguments import model_location
from runner_svc.runtimes.vllm.runtime import VllmModel
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.model_sources import ModelSources
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner
from weft_testing.model_hub import HubRepository, ModelHub

SOURCE = "hf:acme/tiny"
WEIGHTS = bytes(range(256)) * 100
RUNTIMES = ("vllm", "vllm_serve")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    hub = ModelHub()
    hub.repositories["acme/tiny"] = HubRepository(
        files={"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"{}", "tiny-Q4_0.gguf": WEIGHTS}
    )
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub.running():
        yield hub


@dataclass
class Builds:
    """The settings that models were built from."""

    settings: list[ModelSettings] = field(default_factory=list)

    def build(self, model: ModelSettings) -> ServedModel:
        self.settings.append(model)
        return ServedModel(
            name=model.name,
            upstream_name=model.upstream_name,
            make_backend=lambda: pytest.fail("nothing is loaded here"),
        )

    @property
    def last(self) -> VllmModel:
        model = self.settings[-1]
        assert isinstance(model, VllmModel)
        return model


def _model(runtime: str, **settings: Any) -> VllmModel:
    section = {"name": "box", "runtime": runtime, "models": [{"name": "tiny", **settings}]}
    (model,) = parse_section(ConfiguredRunner, section).models
    assert isinstance(model, VllmModel)
    return model


def _names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.slow("starts engine processes")
@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_folder_source_is_pulled_at_the_first_load_and_passed_to_vllm(
    hub: ModelHub, tmp_path: Path, runtime: str
) -> None:
    builds, store = Builds(), ModelStore(tmp_path / "models")
    sources = ModelSources(store, ModelStoreSettings())
    served = sources.served(_model(runtime, source=SOURCE), builds.build)
    assert builds.last.file == NOT_PULLED
    assert builds.last.folder is None
    assert not hub.requests, "nothing is asked before the load"
    assert served.fetch is not None
    shown: list[str] = []
    fetched = await served.fetch(lambda words, _: shown.append(words))
    assert shown[0] == "pulling"
    folder = Path(model_location(builds.last, LoadOrder()))
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert _names(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert fetched.upstream_name == SOURCE, "not the digest that names the folder"

    hub.requests.clear()
    again = sources.served(_model(runtime, source=SOURCE), builds.build)
    assert again.is_here is not None
    assert again.is_here()
    assert builds.last.location == str(folder)
    assert not hub.requests, "what is stored is served without the hub"


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "model tiny needs model, because the runtime is vllm; or a source"),
        ({"model": "acme/tiny", "source": SOURCE}, "model tiny has a model and a source; leave one of them out"),
    ],
)
def test_vllm_model_needs_either_a_model_or_a_source(runtime: str, settings: dict[str, str], why: str) -> None:
    with pytest.raises(FieldError) as refused:
        _model(runtime, **settings)
    assert why in str(refused.value)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_hub_id_is_passed_to_vllm_unchanged(tmp_path: Path, runtime: str) -> None:
    builds = Builds()
    served = ModelSources(ModelStore(tmp_path / "models"), ModelStoreSettings()).served(
        _model(runtime, model="acme/tiny"), builds.build
    )
    assert served.fetch is None
    assert model_location(builds.last, LoadOrder()) == "acme/tiny"
