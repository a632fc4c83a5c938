"""Which files of a repository are a model."""

import pytest
from kit.failures import fails

from runner_svc.policy.repository_files import (
    FileRole,
    ModelForm,
    RepositoryFile,
    choose_files,
    quantization_of,
)
from weft.kernel.errors.error_tree import FieldError

MANY = (
    "README.md",
    "m-Q2_K.gguf",
    "m-Q4_K_M.gguf",
    "m-Q4_K_S.gguf",
    "m-UD-Q5_K_XL.gguf",
    "m-Q8_0.gguf",
    "BF16/m-BF16-00001-of-00002.gguf",
    "BF16/m-BF16-00002-of-00002.gguf",
    "mmproj-F32.gguf",
    "mmproj-F16.gguf",
    "m-imatrix.gguf",
)


def _files(*paths: str) -> list[RepositoryFile]:
    return [RepositoryFile(path=path, size_bytes=10) for path in paths]


def _chosen(paths: tuple[str, ...], wanted: str = "", form: ModelForm | None = None) -> list[str]:
    return [chosen.path for chosen in choose_files(_files(*paths), wanted, form, "source").files]


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4-K-M", "m-Q4_K_M.gguf"),
        ("m-Q8_0.gguf", "m-Q8_0.gguf"),
        ("m-q8_0", "m-Q8_0.gguf"),
        ("Q8", "m-Q8_0.gguf"),
        ("Q5_K_XL", "m-UD-Q5_K_XL.gguf"),
        ("UD-Q5_K_XL", "m-UD-Q5_K_XL.gguf"),
    ],
)
def test_quantization_is_found_by_its_name_or_alias(wanted: str, path: str) -> None:
    choice = choose_files(_files(*MANY), wanted, None, "source")
    assert choice.form is ModelForm.GGUF
    assert choice.main_path == path
    assert choice.files[0].role is FileRole.WEIGHTS


def test_half_precision_projector_is_chosen_with_its_gguf() -> None:
    choice = choose_files(_files(*MANY), "Q8_0", None, "source")
    assert [(chosen.path, chosen.role) for chosen in choice.files] == [
        ("m-Q8_0.gguf", FileRole.WEIGHTS),
        ("mmproj-F16.gguf", FileRole.PROJECTOR),
    ]


@pytest.mark.parametrize("wanted", ["BF16", "BF16/m-BF16-00002-of-00002.gguf"])
def test_all_parts_of_a_split_model_are_chosen_and_the_engine_gets_the_first(wanted: str) -> None:
    choice = choose_files(_files(*reversed(MANY)), wanted, None, "source")
    assert choice.main_path == "BF16/m-BF16-00001-of-00002.gguf"
    assert [chosen.path for chosen in choice.files[:2]] == list(MANY[6:8])


def test_split_model_with_a_missing_part_is_not_a_model() -> None:
    with pytest.raises(FieldError, match="has no GGUF file"):
        _chosen(("m-00001-of-00003.gguf", "m-00003-of-00003.gguf"))


@pytest.mark.parametrize(
    ("paths", "wanted", "message"),
    [
        (MANY, "Q6_K", "'Q6_K' is not in the repository; available: BF16, Q2_K, Q4_K_M, Q4_K_S, Q8_0, UD-Q5_K_XL"),
        (MANY, "Q4_K", "'Q4_K' is ambiguous: name one of the files: m-Q4_K_M.gguf, m-Q4_K_S.gguf"),
        (("a-Q2_K.gguf", "b-Q3_K.gguf"), "", "add one of the repository's quantizations"),
        (("a/m-Q8_0.gguf", "b/m-Q8_0.gguf"), "Q8_0", "'Q8_0' is ambiguous"),
        (("README.md",), "", "has no GGUF file"),
        (("../x.gguf",), "", "an invalid name"),
        (("/etc/x.gguf",), "", "an invalid name"),
    ],
)
def test_ambiguous_choice_is_refused_with_the_available_options(
    paths: tuple[str, ...], wanted: str, message: str
) -> None:
    with fails(field="source") as raised:
        _chosen(paths, wanted)
    assert message in raised.value.message


def test_safetensors_folder_has_weights_configuration_and_tokenizer_and_no_code() -> None:
    kept = (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "merges.txt",
    )
    left_out = (
        "consolidated.safetensors",
        "pytorch_model.bin",
        "modeling_evil.py",
        "onnx/model.onnx",
        "README.md",
    )
    choice = choose_files(_files(*kept, *left_out), "", None, "source")
    assert choice.form is ModelForm.FOLDER
    assert choice.main_path == ""
    assert {chosen.path for chosen in choice.files} == set(kept)


def test_ctranslate2_folder_has_its_own_weights() -> None:
    paths = ("config.json", "model.bin", "shared_vocabulary.json", "tokenizer.json")
    assert set(_chosen(paths, form=ModelForm.FOLDER)) == set(paths)


def test_pipeline_folder_has_the_weights_of_each_component_once() -> None:
    kept = (
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "text_encoder/model.fp16.safetensors",
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "tokenizer/merges.txt",
        "scheduler/scheduler_config.json",
    )
    left_out = (
        "whole_model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "unet/diffusion_pytorch_model.bin",
        "unet/evil.py",
        "deep/er/model.safetensors",
    )
    choice = choose_files(_files(*kept, *left_out), "", None, "source")
    assert choice.form is ModelForm.FOLDER
    assert {chosen.path for chosen in choice.files} == set(kept)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("model_index.json", "unet/diffusion_pytorch_model.bin"), "pickled weights are not loaded"),
        (("config.json", "pytorch_model.bin"), "pickled Python, which is not loaded"),
        (("config.json", "model.bin"), "pickled Python, which is not loaded"),
        (("config.json",), "no .safetensors file"),
        (("model.safetensors",), "has no config.json"),
    ],
)
def test_folder_unsafe_for_every_engine_is_refused(paths: tuple[str, ...], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        _chosen(paths, form=ModelForm.FOLDER)


def test_form_follows_the_engine_if_a_repository_has_both() -> None:
    paths = ("config.json", "model.safetensors", "m-Q8_0.gguf")
    assert _chosen(paths) == ["m-Q8_0.gguf"]
    assert _chosen(paths, form=ModelForm.FOLDER) == ["model.safetensors", "config.json"]
    with pytest.raises(FieldError, match="loads the whole folder"):
        _chosen(paths, "Q8_0", ModelForm.FOLDER)


@pytest.mark.parametrize(
    ("path", "quantization"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Qwen3-8B-UD-IQ2_M.gguf", "UD-IQ2_M"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Q8_0/model-00001-of-00002.gguf", "Q8_0"),
        ("model.gguf", ""),
    ],
)
def test_quantization_is_read_from_the_name(path: str, quantization: str) -> None:
    assert quantization_of(path) == quantization


VOICES = (
    "README.md",
    "voices.json",
    "en/en_US/joe/medium/MODEL_CARD",
    "en/en_US/joe/medium/en_US-joe-medium.onnx",
    "en/en_US/joe/medium/en_US-joe-medium.onnx.json",
    "en/en_GB/alan/low/en_GB-alan-low.onnx",
    "en/en_GB/alan/low/en_GB-alan-low.onnx.json",
    "en/en_GB/alan/low/no-configuration.onnx",
)


@pytest.mark.parametrize(
    "wanted", ["en_US-joe-medium", "en_US-joe-medium.onnx", "en/en_US/joe/medium/en_US-joe-medium.onnx"]
)
def test_voice_is_its_model_and_its_configuration(wanted: str) -> None:
    model = "en/en_US/joe/medium/en_US-joe-medium.onnx"
    assert _chosen(VOICES, wanted, ModelForm.FOLDER) == [model, f"{model}.json"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("", "add one of its voices after a colon; available: en_GB-alan-low, en_US-joe-medium"),
        ("en_US-joe", "'en_US-joe' is not a voice of the repository; available: en_US-joe-medium"),
        ("no-configuration", "is not a voice"),
    ],
)
def test_voice_repository_lists_its_voices(wanted: str, said: str) -> None:
    with pytest.raises(FieldError) as refused:
        _chosen(VOICES, wanted, ModelForm.FOLDER)
    assert said in refused.value.message


def test_only_voice_of_a_repository_needs_no_name() -> None:
    assert _chosen(VOICES[:5], "", ModelForm.FOLDER) == list(VOICES[3:5])


def test_model_with_onnx_files_beside_its_weights_is_not_a_voice() -> None:
    files = ("config.json", "model.safetensors", "onnx/model.onnx", "onnx/model.onnx.json")
    assert _chosen(files, "", ModelForm.FOLDER) == ["model.safetensors", "config.json"]
