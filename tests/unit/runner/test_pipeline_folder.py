"""The folder of a pipeline: which weights are loaded, what is refused, and the memory that follows from it."""

import json
from pathlib import Path
from typing import Any

import pytest
from kit.failures import fails
from kit.presence import present

from runner_svc.model_files.pipeline_folder import PipelineFolderError, read_pipeline_folder
from runner_svc.policy.load_options import AS_CONFIGURED, LoadPlan
from runner_svc.policy.memory_estimate import EstimateSource
from runner_svc.runtimes.model_engine import ModelContext, ModelEngine
from weft.kernel.requests.request_values import Operation
from weft_extensions.engines.diffusers.families import FAMILIES, PIPELINE_CLASSES, Mode
from weft_extensions.engines.diffusers.runtime import RUNTIME, DiffusersModel
from weft_extensions.engines.diffusers.server import preview_steps

MEBIBYTE = 1024 * 1024
INDEX = {
    "_class_name": "FluxPipeline",
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "text_encoder_2": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "image_encoder": [None, None],
}
WEIGHTS = {
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors": 3,
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors": 5,
    "text_encoder_2/model.safetensors": 2,
}


def _folder(folder: Path, weights: dict[str, int] = WEIGHTS, **index: Any) -> Path:
    """A folder with weights of so many MiB each, none of which takes a block of the disk."""
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps(INDEX | index))
    for name, size in weights.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            file.truncate(size * MEBIBYTE)
    return folder


def test_only_component_weights_are_counted(tmp_path: Path) -> None:
    extra = {"flux1-dev.safetensors": 50, "transformer/diffusion_pytorch_model.fp16.safetensors": 4}
    found = read_pipeline_folder(_folder(tmp_path / "m", WEIGHTS | extra))
    assert found.weight_bytes == 10 * MEBIBYTE
    assert found.sizes == {"transformer": 8 * MEBIBYTE, "text_encoder_2": 2 * MEBIBYTE}
    assert found.absent == {"image_encoder"}
    assert found.components == {"transformer", "text_encoder_2", "tokenizer"}


def test_named_variant_is_used_or_else_the_existing_one(tmp_path: Path) -> None:
    weights = {
        "transformer/diffusion_pytorch_model.fp16.safetensors": 4,
        "text_encoder_2/model.safetensors": 2,
        "text_encoder_2/model.fp16.safetensors": 1,
    }
    folder = _folder(tmp_path / "m", weights)
    found = read_pipeline_folder(folder)
    assert (found.variant, found.weight_bytes) == ("fp16", 5 * MEBIBYTE)
    with pytest.raises(PipelineFolderError, match="no weights of the variant 'bf16'; available: fp16"):
        read_pipeline_folder(folder, "bf16")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"_class_name": 5}', '{"_class_name": "a.b"}', "x" * 1_100_000])
def test_invalid_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model_index.json").write_text(text)
    with pytest.raises(PipelineFolderError, match=r"model_index\.json"):
        read_pipeline_folder(tmp_path)


@pytest.mark.parametrize(
    "entry", [["os", "system"], ["diffusers", "../evil"], ["diffusers"], ["diffusers", None], [1, 2], []]
)
def test_component_from_an_unknown_library_is_refused(tmp_path: Path, entry: list[Any]) -> None:
    with pytest.raises(PipelineFolderError, match="the component transformer is"):
        read_pipeline_folder(_folder(tmp_path / "m", transformer=entry))


def test_component_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    index: dict[str, Any] = {"../up": ["diffusers", "AutoencoderKL"]}
    with pytest.raises(PipelineFolderError, match="a component with an invalid name"):
        read_pipeline_folder(_folder(tmp_path / "m", **index))


def test_folder_without_an_index_error_shows_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(PipelineFolderError, match="expected a pipeline folder"):
        read_pipeline_folder(tmp_path)


def test_each_family_has_a_class_per_mode_and_each_class_one_family() -> None:
    assert len(PIPELINE_CLASSES) == len(FAMILIES) * len(Mode)
    assert all(set(family.classes) == set(Mode) for family in FAMILIES.values())
    assert all(set(family.strength) == {Mode.IMAGE, Mode.INPAINTING} for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("steps", "previews", "expected"),
    [(9, 2, [3, 6]), (4, 0, []), (1, 3, []), (2, 8, [1]), (30, 1, [15]), (5, 8, [1, 2, 3, 4])],
)
def test_previews_are_evenly_spaced_and_exclude_the_final_image(steps: int, previews: int, expected: list[int]) -> None:
    assert preview_steps(steps, previews) == expected


def _engine(folder: Path, **settings: Any) -> ModelEngine:
    return RUNTIME.build(DiffusersModel(name="m", path=folder, **settings), ModelContext(where="runners.r.models.m"))


@pytest.mark.parametrize(
    ("settings", "plan", "mebibytes"),
    [
        ({}, AS_CONFIGURED, 13),
        ({"cpu_offload": "model"}, AS_CONFIGURED, 10.4),
        ({"cpu_offload": "sequential"}, AS_CONFIGURED, 1.95),
        ({"quantization": "bitsandbytes_4bit"}, AS_CONFIGURED, 5.2),
        ({"device": "cpu"}, AS_CONFIGURED, 0),
        ({"memory_mb": 7}, AS_CONFIGURED, 7),
        ({}, LoadPlan(parameters={"cpu_offload": "sequential"}), 1.95),
    ],
)
async def test_load_memory_is_derived_from_weights_and_offloading(
    tmp_path: Path, settings: dict[str, Any], plan: LoadPlan, mebibytes: float
) -> None:
    engine = _engine(_folder(tmp_path / "m"), **settings)
    estimate = present(await engine.forecast.expect(plan))
    assert estimate.bytes == pytest.approx(mebibytes * MEBIBYTE, rel=0.01)
    if plan is AS_CONFIGURED and not settings:
        assert estimate.source is EstimateSource.FILE_SIZE
    assert engine.operations == {Operation.IMAGE}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"slots": 2}, "slots"),
        ({"device_map": "balanced", "cpu_offload": "model"}, "device_map"),
        ({"device": "cpu", "quantization": "bitsandbytes_8bit"}, "quantization"),
    ],
)
def test_contradicting_settings_are_refused(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    with fails(field=f"runners.r.models.m.{field}"):
        _engine(_folder(tmp_path / "m"), **settings)
