"""What a runner of weft.yaml leaves unsaid and its other settings say."""

import json
from pathlib import Path
from typing import Any

import pytest

from runner_svc.runtimes.openai_http.runtime import OpenAiHttpModel
from weft.kernel.errors.error_tree import FieldError
from weft_app.config.config import WeftConfig
from weft_app.config.loader import load_config, parse_config
from weft_app.config.runners import ConfiguredRunner

URL = "http://127.0.0.1:11434"


def config_of(**runner: Any) -> WeftConfig:
    return parse_config({"runners": [{"name": "box", **runner}]})


def runner_of(**runner: Any) -> ConfiguredRunner:
    (found,) = config_of(**runner).runners or ()
    return found


def test_runner_with_only_a_url_follows_that_server() -> None:
    runner = runner_of(url=URL)
    assert (runner.runtime, runner.follows_server, runner.models) == ("openai_http", True, ())


def test_model_with_a_url_needs_no_runtime() -> None:
    assert runner_of(models=[{"name": "llama", "url": URL}]).runtime == "openai_http"


def test_models_inherit_address_and_key_of_their_runner() -> None:
    runner = runner_of(
        url=URL, api_key_env="BOX_KEY", models=[{"name": "a", "upstream_model": "x"}, {"name": "b", "url": "http://c"}]
    )
    found = [(model.url, model.api_key_env) for model in runner.models if isinstance(model, OpenAiHttpModel)]
    assert found == [(URL, "BOX_KEY"), ("http://c", None)]
    assert not runner.follows_server


def test_explicit_runtime_is_kept() -> None:
    runner = runner_of(runtime="openai_remote", models=[{"name": "a", "url": "https://api.example.com/v1"}])
    assert runner.runtime == "openai_remote"


@pytest.mark.parametrize(
    ("model", "runtime"),
    [
        ({"path": "/models/a.gguf"}, "llama_server"),
        ({"source": "hf:acme/smol-GGUF"}, "llama_server"),
        ({"source": "ollama:llama3.2"}, "llama_server"),
        ({"model": "Qwen/Qwen3-8B"}, "vllm"),
    ],
)
def test_runtime_is_inferred_from_the_model(model: dict[str, str], runtime: str) -> None:
    assert runner_of(models=[{"name": "a", **model}]).runtime == runtime


def folder(place: Path, *files: str, **configuration: Any) -> Path:
    for name in files:
        (place / name).touch()
    (place / "config.json").write_text(json.dumps(configuration))
    return place


def test_runtime_is_inferred_from_folder_contents(tmp_path: Path) -> None:
    assert runner_of(models=[{"name": "a", "path": str(folder(tmp_path, "model.bin"))}]).runtime == "ctranslate2"
    quantized = folder(tmp_path, "a.safetensors", quantization_config={"quant_method": "exl3"})
    assert runner_of(models=[{"name": "a", "path": str(quantized)}]).runtime == "exllamav3"
    pipeline = folder(tmp_path, "model_index.json")
    assert runner_of(models=[{"name": "a", "path": str(pipeline)}]).runtime == "diffusers"


def test_safetensors_folder_error_names_the_setting_of_its_engine(tmp_path: Path) -> None:
    where = folder(tmp_path, "a.safetensors")
    assert runner_of(models=[{"name": "a", "model": str(where)}]).runtime == "vllm"
    with pytest.raises(FieldError, match=f"which vllm loads: write `model: {where}`"):
        config_of(models=[{"name": "a", "path": str(where)}])


def test_nested_configuration_of_a_folder_is_ignored(tmp_path: Path) -> None:
    """A configuration with 100,000 brackets ended `weft up` with a RecursionError."""
    where = folder(tmp_path, "a.safetensors")
    (where / "config.json").write_text("[" * 100_000)
    assert runner_of(models=[{"name": "a", "model": str(where)}]).runtime == "vllm"


def test_models_of_several_runtimes_are_refused_with_each_reason(tmp_path: Path) -> None:
    file = tmp_path / "weft.yaml"
    models = [{"name": "a", "url": URL}, {"name": "b", "path": "/models/b.gguf"}]
    file.write_text(json.dumps({"runners": [{"name": "box", "models": models}]}))
    with pytest.raises(FieldError) as refused:
        load_config(file)
    assert refused.value.field == "runners.0.runtime"
    assert "llama_server for the path of b, openai_http for the url of a (in weft.yaml line 1)" in refused.value.message


def test_runner_without_models_and_url_is_refused() -> None:
    with pytest.raises(FieldError, match=r"runners\.0\.models"):
        config_of()
