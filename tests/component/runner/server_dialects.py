"""Fakes of the server programs that have presets: what each does otherwise than llama-server, by its documents."""

from typing import Any

from kit.engine_settings import engine_settings

from runner_svc.policy.timeouts import StopGraces
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.server.presets import PresetName
from runner_svc.runtimes.server.runtime import ServerModel
from weft_testing.fake_backend.dialect import Dialect
from weft_testing.fake_backend.process import fake_backend_command

GRACES = StopGraces(first_term_seconds=0.5, second_term_seconds=0.5)
TOLD = ("--port", "{port}", "--alias", "{name}", "--parallel", "{slots}")
OWN_ROUTES = ("/props", "/slots", "/apply-template")
"""Routes that llama-server alone has."""
DIALECTS: dict[PresetName, Dialect] = {
    "sglang": Dialect(
        owned_by="sglang",
        lacks=OWN_ROUTES,
        answers=("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"),
        metrics=("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    ),
    "tgi": Dialect(owned_by="fake-tgi", lacks=OWN_ROUTES, metrics=("tgi_batch_current_size", "tgi_queue_size")),
    "lmdeploy": Dialect(
        owned_by="lmdeploy",
        lacks=(*OWN_ROUTES, "/tokenize", "/v1/embeddings"),
        answers=("/sleep", "/wakeup"),
        metrics=("lmdeploy:num_requests_running", "lmdeploy:num_requests_waiting", "lmdeploy:gpu_cache_usage_perc"),
    ),
    "tabbyapi": Dialect(owned_by="tabbyAPI", lacks=(*OWN_ROUTES, "/tokenize", "/metrics")),
    "mlx_lm": Dialect(lacks=(*OWN_ROUTES, "/tokenize", "/metrics", "/v1/embeddings"), thinking_field="reasoning"),
    "ollama": Dialect(
        owned_by="library",
        lacks=(*OWN_ROUTES, "/health", "/tokenize", "/metrics"),
        answers=("/api/generate",),
        thinking_field="reasoning",
        other_models=("llama3.2:latest", "qwen3:8b"),
        refuses_other_names=True,
    ),
}
"""What each program does otherwise than llama-server, by its documents (see `presets.py`)."""
FLAGS: dict[PresetName, tuple[str, ...]] = {
    "sglang": (*TOLD, "--speaks-vllm"),
    "tgi": (*TOLD, "--key-variable", "API_KEY"),
    # The name of the model in requests is another than the one in the list of the hub's cache.
    "mlx_lm": ("--port", "{port}", "--alias", "some/cached-model", "--parallel", "{slots}"),
    "ollama": ("--listen-variable", "OLLAMA_HOST", "--alias", "{name}"),
}


def fake_command(*flags: str, dialect: Dialect | None = None, **switches: Any) -> tuple[str, ...]:
    if dialect is not None:
        switches["dialect"] = dialect
    return tuple(fake_backend_command(*flags, **switches))


def server_settings(**given: Any) -> tuple[ServerModel, ModelContext]:
    return engine_settings(ServerModel, **{"name": "fake", "graces": GRACES, "load_stall_seconds": 20.0, **given})


def preset_settings(
    name: PresetName, switches: dict[str, Any] | None = None, **given: Any
) -> tuple[ServerModel, ModelContext]:
    command = fake_command(*FLAGS.get(name, TOLD), dialect=given.pop("dialect", DIALECTS[name]), **(switches or {}))
    return server_settings(preset=name, command=command, **given)
