"""The catalog of models to pull: short names, the hub's repositories, and whether each fits this mesh."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.failures import fails

from weft.api.gateway.v1.model_catalog_pb2 import CatalogModel, ModelCatalog
from weft.api.registry.v1.lease_service_pb2 import HostMemory
from weft.kernel.errors.reasons import Reason
from weft_app.compose import model_catalog
from weft_app.compose.home import WeftHome
from weft_app.compose.model_catalog import mesh_catalog
from weft_app.config.config import WeftConfig
from weft_testing.model_hub import HubRepository, ModelHub

GIB = 1024**3
WEIGHTS = b"GGUF" + bytes(2_000_000)
DOWNLOADS = 7_000

pytestmark = pytest.mark.usefixtures("hub")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    hub = ModelHub()
    files = {
        f"tiny-{name}.gguf": WEIGHTS[: len(WEIGHTS) // part] for name, part in (("F16", 1), ("Q4_K_M", 4), ("Q2_K", 8))
    }
    hub.repositories = {
        "acme/tiny-GGUF": HubRepository(files=files, context_tokens=8_192, downloads=DOWNLOADS),
        "acme/secret-GGUF": HubRepository(files={"secret-Q4_0.gguf": WEIGHTS}, private=True),
        "acme/folder": HubRepository(files={"config.json": b"{}", "model.safetensors": WEIGHTS}),
    }
    monkeypatch.setattr(model_catalog, "host_memory_bytes", lambda: 4 * GIB)
    for name, value in {"HF_ENDPOINT": hub.url, "HF_TOKEN": "", "HF_HOME": str(tmp_path / "hf")}.items():
        monkeypatch.setenv(name, value)
    with hub.running():
        yield hub


async def listed(tmp_path: Path, text: str = "", source: str = "", *hosts: HostMemory) -> ModelCatalog:
    return await mesh_catalog(text, source, hosts, WeftConfig(), WeftHome(tmp_path / "home"))


async def only(tmp_path: Path, text: str = "", source: str = "", *hosts: HostMemory) -> CatalogModel:
    (model,) = (await listed(tmp_path, text, source, *hosts)).models
    return model


async def test_search_lists_repositories_of_the_hub_with_their_quantizations(tmp_path: Path) -> None:
    model = await only(tmp_path, "acme tiny")
    assert (model.name, model.context_tokens, model.downloads) == ("acme/tiny-GGUF", 8_192, DOWNLOADS)
    assert [each.quantization for each in model.variants] == ["Q4_K_M", "F16", "Q2_K"]
    assert model.variants[0].source == "hf:acme/tiny-GGUF:Q4_K_M"


async def test_source_has_exact_sizes_and_the_wanted_quantization_first(tmp_path: Path) -> None:
    model = await only(tmp_path, source="hf:acme/tiny-GGUF:f16")
    assert [(each.quantization, each.size_bytes) for each in model.variants[:2]] == [
        ("F16", len(WEIGHTS)),
        ("Q4_K_M", len(WEIGHTS) // 4),
    ]
    assert model.variants[0].needed_bytes > len(WEIGHTS)
    assert not any(each.lacking_bytes for each in model.variants)


async def test_folder_of_safetensors_is_one_variant(tmp_path: Path) -> None:
    (variant,) = (await only(tmp_path, source="hf:acme/folder")).variants
    assert (variant.source, variant.size_bytes) == ("hf:acme/folder", len(WEIGHTS) + 2)


async def test_model_that_fits_on_another_machine_of_the_mesh_fits(tmp_path: Path) -> None:
    alone = (await only(tmp_path, "qwen3:0.6b qwen3-0.6b")).variants[0]
    large = (await only(tmp_path, "llama3.3")).variants[0]
    box = HostMemory(host="box")
    account = box.devices.add(margin_bytes=GIB)
    account.device.name, account.device.total_bytes = "GPU", 80 * GIB
    on_box = (await only(tmp_path, "llama3.3", "", box)).variants[0]
    assert alone.needed_bytes
    assert not alone.lacking_bytes
    assert large.lacking_bytes > 30 * GIB
    assert on_box.needed_bytes
    assert not on_box.lacking_bytes


async def test_without_the_hub_short_names_are_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    found = await listed(tmp_path, "smollm2")
    assert [model.name for model in found.models] == ["smollm2", "smollm2:135m", "smollm2:360m"]
    assert "http://127.0.0.1:9 cannot be reached" in found.hub_detail
    assert found.hub == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/tmp/x.gguf", Reason.INVALID_ARGUMENT),
        ("https://example.com/x.gguf", Reason.INVALID_ARGUMENT),
        ("ollama:qwen3", Reason.INVALID_ARGUMENT),
        ("hf:acme/none", Reason.NOT_FOUND),
    ],
)
async def test_source_that_the_hub_lacks_is_refused(tmp_path: Path, source: str, reason: Reason) -> None:
    with fails(reason):
        await listed(tmp_path, source=source)
