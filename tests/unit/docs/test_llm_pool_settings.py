"""The table of an LLM pool's settings names each of them, and only settings that exist here."""

import re
from pathlib import Path
from typing import Any

import pytest

from weft_app.config.loader import config_files
from weft_app.config.schema import schema

SETTINGS = frozenset(
    {
        *(
            "LLM_POOL_SETTINGS_PATH",
            "LLM_POOL_LOCAL_SETTINGS_PATH",
            "service.host",
            "service.port",
            "service.log_level",
        ),
        *("engine.backend", "engine.decoding", "engine.models", "decoding.beam_size"),
        *("model_path", "backend", "prompt_format", "enable_thinking", "enabled", "replicas", "replica_max"),
        *("target_inflight", "modalities", "device", "compute_type"),
        *(f"exllama_{name}" for name in ("cache_size", "cache_quant", "gpu_split", "tensor_parallel", "tp_backend")),
        *(f"exllama_max_{name}" for name in ("batch_size", "chunk_size", "q_size", "rq_tokens")),
        *(f"gguf_{name}" for name in ("n_gpu_layers", "n_ctx", "flash_attn", "type_k", "type_v")),
        *(f"llama_server_{name}" for name in ("binary", "host", "port", "library_path", "n_ctx", "n_gpu_layers")),
        *(f"llama_server_{name}" for name in ("flash_attn", "mmproj_path", "image_max_tokens", "draft_model_path")),
        *(f"llama_server_spec_{name}" for name in ("type", "draft_n_max", "draft_p_min", "draft_ngl")),
        *("llama_server_reasoning", "llama_server_extra_args", "vllm_model", "vllm_dtype"),
        *(f"vllm_{name}" for name in ("gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype")),
        *(f"vllm_{name}" for name in ("max_model_len", "tensor_parallel_size", "limit_mm_per_prompt", "max_pixels")),
        *(f"vllm_{name}" for name in ("mm_processor_kwargs", "trust_remote_code", "num_speculative_tokens")),
        *(f"vllm_speculative_{name}" for name in ("method", "model", "moe_backend", "attention_backend")),
        *(f"vllm_serve_{name}" for name in ("binary", "host", "port", "library_path", "env", "api_key", "extra_args")),
        "vllm_serve_start_timeout_s",
        *(f"remote_{name}" for name in ("api_kind", "base_url", "api_key_env", "model", "timeout_s", "health_check")),
        *("remote_max_retries", "remote_thinking"),
    }
)
"""The settings of such a pool: those of its file, its environment, its models and its backends."""
MODELS = {
    "ctranslate2": "CTranslate2Model",
    "exllamav3": "ExllamaV3Model",
    "llama_cpp_python": "LlamaCppPythonModel",
    "llama_server": "LlamaServerModel",
    "openai_remote": "OpenAiRemoteModel",
    "vllm": "VllmModel",
}
"""The part of the published schema by runtime."""
_ROW = re.compile(r"^\| `([^`]+)` \| (?:`([^`]+)`|-) \|(.*)\|$", re.MULTILINE)


def _rows() -> list[tuple[str, str, str]]:
    return _ROW.findall(Path(__file__).with_name("llm_pool_settings.md").read_text())


def _exists(name: str, schema: dict[str, Any]) -> bool:
    place, _, field = name.partition(".")
    parts: dict[str, Any] = schema["$defs"]
    if place == "file":
        found: Any = schema
        for step in field.split("."):
            found = parts[found["$ref"].rpartition("/")[2]] if "$ref" in found else found
            found = found["properties"].get(step)
            if found is None:
                return False
        return True
    if place == "runner":
        return field in parts["ConfiguredRunner"]["properties"]
    kinds = MODELS.values() if place == "model" else [MODELS[place]]
    return all(field in parts[kind]["properties"] for kind in kinds)


def test_each_llm_pool_setting_has_one_row() -> None:
    named = [name for name, _, _ in _rows()]
    assert len(named) == len(set(named))
    assert set(named) == SETTINGS


def test_row_names_an_existing_setting_or_explains_why_there_is_none() -> None:
    found = schema()
    for name, here, note in _rows():
        assert _exists(here, found) if here else note.strip(), name


def test_each_llm_pool_environment_variable_names_a_file_here(tmp_path: Path) -> None:
    files = {}
    for name in (name for name, _, _ in _rows() if name.startswith("LLM_POOL_")):
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text("{}")
        assert files[name] in config_files(None, {name: str(files[name])})
    assert set(files) == {name for name in SETTINGS if name.startswith("LLM_POOL_")}


@pytest.mark.parametrize("name", ["model.path", "runner.nothing", "file.log.nothing", "vllm.gguf_n_ctx"])
def test_unknown_setting_name_is_detected(name: str) -> None:
    """The control."""
    assert not _exists(name, schema())
