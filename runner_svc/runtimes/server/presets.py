"""Known server programs: how to start each one, and its capabilities, with a source for each fact.

The facts are claims from the programs' code or documentation, read at the version that a preset names. `weft
conformance` compares those that are visible from outside with the behavior of a running server.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.metrics_page import LMDEPLOY, NO_METRICS, SGLANG, TEXT_GENERATION_INFERENCE, MetricNames
from runner_svc.runtimes.server import parameters
from weft.kernel.requests.request_values import Operation

PresetName = Literal["sglang", "tgi", "lmdeploy", "tabbyapi", "mlx_lm", "ollama"]
LOOPBACK = "127.0.0.1"
_GENERATES = frozenset({Operation.CHAT, Operation.COMPLETION})


class Cancellation(StrEnum):
    """When a program stops working for a caller that has disconnected."""

    IMMEDIATELY = "immediately"
    AT_NEXT_TOKEN = "at the next token"  # noqa: S105 - not a password
    """It detects this at its next write, so a prompt is processed completely."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A route of a program outside the OpenAI API."""

    method: Literal["GET", "POST"]
    path: str
    body: str = "{}"
    """JSON, with the placeholders of `placeholders.py`."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPreset:
    """How to start a server program, and its capabilities."""

    title: str
    version: str
    """The version or revision that the facts were read from."""
    install: str
    """Command or page that installs it."""
    command: tuple[str, ...]
    """Command line with placeholders."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables with placeholders."""
    key_variable: str = ""
    """Environment variable for the key that it requires; empty: none."""
    health_path: str = "/health"
    """Route that returns 200 once it accepts requests."""
    upstream_model: str = ""
    """Model name in requests; empty: weft's name of the model."""
    lists_model: bool = True
    """Whether GET /v1/models lists the names that requests may use."""
    load: Route | None = None
    """Route that loads the model; None: it is loaded before the program is healthy."""
    operations: frozenset[Operation] = _GENERATES
    """Operations with a model that generates text."""
    other_operations: frozenset[Operation] = frozenset()
    """Operations with other models, in a form that weft supports."""
    usage_in_streams: bool = True
    """Whether streams end with token counts if `stream_options.include_usage` requests them."""
    cached_tokens: bool = False
    """Whether these counts include the cached prompt tokens."""
    cancellation: Cancellation = Cancellation.UNKNOWN
    metrics_path: str = ""
    """Route of its metrics in Prometheus' text format; empty: none."""
    metrics: MetricNames = NO_METRICS
    sleep: Route | None = None
    """Route that frees its accelerator memory without stopping it."""
    wake: Route | None = None
    """Route that takes the memory again; None: the same as `load`."""
    sleep_arguments: tuple[str, ...] = ()
    """Arguments required for sleeping."""
    flush: Route | None = None
    """Route that empties its prefix cache."""
    cache_salt: bool = False
    """Whether requests may set `cache_salt`, which isolates the cached prefixes of tenants."""
    kv_events: bool = False
    """Whether it can publish the events of its prefix cache as SGLang does."""
    thinking_field: str = ""
    """Field of a delta with the model's thinking; empty: thinking is not separated."""
    parameters: EngineParameters
    sources: Mapping[str, str]
    """Source of each fact above, by the name of its field."""


_SGLANG = "sglang 0.5.23 (wheel)"
_SGLANG_ARGUMENTS = f"{_SGLANG}, srt/arg_groups/fields"
_SGLANG_ROUTES = f"{_SGLANG}, srt/entrypoints/http_server.py"
_SGLANG_PROTOCOL = f"{_SGLANG}, srt/entrypoints/openai/protocol.py"
_TGI_LAUNCHER = "text-generation-inference, docs/source/reference/launcher.md at 032fc4c"
_TGI_ROUTES = "text-generation-inference, docs/openapi.json 2.4.1-dev0 at 003eaec"
_LMDEPLOY = "lmdeploy 0.18.0 (wheel)"
_LMDEPLOY_ARGUMENTS = f"{_LMDEPLOY}, cli/serve.py and cli/utils.py"
_LMDEPLOY_ROUTES = f"{_LMDEPLOY}, serve/openai/endpoints/management.py"
_LMDEPLOY_PROTOCOL = f"{_LMDEPLOY}, serve/openai/protocol.py"
_TABBY_ARGUMENTS = "tabbyAPI, common/args.py at 03189bc and common/config_models.py at 004e837"
_TABBY_ROUTES = "tabbyAPI, endpoints/core/router.py at 03189bc"
_TABBY_CHAT = "tabbyAPI, endpoints/OAI/utils/chat_completion.py at 0158fb4"
_MLX_SERVER = "mlx-lm 0.32.2 (wheel), mlx_lm/server.py"
_OLLAMA_OPENAI = "ollama, openai/openai.go at 0098875"
_OLLAMA_ENVIRONMENT = "ollama, envconfig/config.go at 000ce02"
_OLLAMA_API = "ollama, docs/api.md, 'Load a model' and 'Unload a model'"

_TABLE: dict[PresetName, ServerPreset] = {
    "sglang": ServerPreset(
        title="SGLang",
        version="0.5.23",
        install="pip install sglang",
        command=(
            *("python3", "-m", "sglang.launch_server", "--model-path", "{model}", "--served-model-name", "{name}"),
            *("--host", LOOPBACK, "--port", "{port}", "--context-length", "{context}"),
            *("--max-running-requests", "{slots}", "--enable-metrics", "--enable-cache-report"),
        ),
        operations=_GENERATES | {Operation.TOKENIZE},
        other_operations=frozenset({Operation.EMBEDDING, Operation.RERANK}),
        cached_tokens=True,
        cancellation=Cancellation.IMMEDIATELY,
        metrics_path="/metrics",
        metrics=SGLANG,
        sleep=Route(method="POST", path="/release_memory_occupation"),
        wake=Route(method="POST", path="/resume_memory_occupation"),
        sleep_arguments=("--enable-memory-saver",),
        flush=Route(method="POST", path="/flush_cache"),
        cache_salt=True,
        kv_events=True,
        thinking_field="reasoning_content",
        parameters=parameters.SGLANG,
        sources={
            "command": _SGLANG_ARGUMENTS,
            "key_variable": f"{_SGLANG_ARGUMENTS}/serving.py: api_key is an argument or an entry of --config alone",
            "health_path": f"{_SGLANG_ROUTES}: 503 while it starts; it generates a token, which takes a second",
            "lists_model": f"{_SGLANG_ROUTES}: available_models",
            "operations": f"{_SGLANG_ROUTES}: /v1/chat/completions, /v1/completions, /tokenize in vLLM's form",
            "other_operations": f"{_SGLANG_ROUTES}: /v1/embeddings with --is-embedding, /v1/rerank",
            "usage_in_streams": f"{_SGLANG_PROTOCOL}: StreamOptions",
            "cached_tokens": f"{_SGLANG_ARGUMENTS}/serving.py: enable_cache_report",
            "cancellation": f"{_SGLANG}, srt/managers/tokenizer_manager.py: create_abort_task, is_disconnected",
            "metrics_path": f"{_SGLANG_ARGUMENTS}/observability.py: enable_metrics",
            "metrics": f"{_SGLANG}, srt/observability",
            "sleep": f"{_SGLANG_ROUTES}: release_memory_occupation",
            "sleep_arguments": f"{_SGLANG_ARGUMENTS}: enable_memory_saver, without which nothing is released",
            "wake": f"{_SGLANG_ROUTES}: resume_memory_occupation",
            "flush": f"{_SGLANG_ROUTES}: flush_cache; refused with 400 while requests run",
            "cache_salt": f"{_SGLANG_PROTOCOL}: ChatCompletionRequest.cache_salt",
            "kv_events": f"{_SGLANG_ARGUMENTS}/observability.py: kv_events_config; {_SGLANG_PROTOCOL}: session_id",
            "thinking_field": f"{_SGLANG_PROTOCOL}: DeltaMessage.reasoning_content; needs --reasoning-parser",
            "parameters": f"{_SGLANG_PROTOCOL}: ChatCompletionRequest",
        },
    ),
    "tgi": ServerPreset(
        title="Text Generation Inference",
        version="2.4.1",
        install="https://huggingface.co/docs/text-generation-inference/installation",
        command=(
            *("text-generation-launcher", "--model-id", "{model}", "--hostname", LOOPBACK, "--port", "{port}"),
            *("--max-total-tokens", "{context}", "--max-concurrent-requests", "{slots}"),
        ),
        key_variable="API_KEY",
        cancellation=Cancellation.AT_NEXT_TOKEN,
        metrics_path="/metrics",
        metrics=TEXT_GENERATION_INFERENCE,
        parameters=parameters.TGI,
        sources={
            "command": _TGI_LAUNCHER,
            "key_variable": f"{_TGI_LAUNCHER}: --api-key [env: API_KEY=]",
            "health_path": f"{_TGI_ROUTES}: /health",
            "lists_model": "text-generation-inference answers for one model under any name, see policy/model_names.py",
            "operations": f"{_TGI_ROUTES}: /v1/chat/completions, /v1/completions; /tokenize has its own form",
            "usage_in_streams": f"{_TGI_ROUTES}: ChatRequest.stream_options",
            "cancellation": "text-generation-inference issue #495: a closed connection leaves the batch",
            "metrics_path": f"{_TGI_ROUTES}: /metrics",
            "metrics": "https://huggingface.co/docs/text-generation-inference/reference/metrics",
            "parameters": f"{_TGI_ROUTES}: ChatRequest, where model, n and logit_bias are marked unused",
        },
    ),
    "lmdeploy": ServerPreset(
        title="LMDeploy",
        version="0.18.0",
        install="pip install lmdeploy",
        command=(
            *("lmdeploy", "serve", "api_server", "{model}", "--model-name", "{name}", "--server-name", LOOPBACK),
            *("--server-port", "{port}", "--session-len", "{context}", "--max-concurrent-requests", "{slots}"),
            *("--enable-prefix-caching",),
        ),
        cached_tokens=True,
        cancellation=Cancellation.IMMEDIATELY,
        metrics_path="/metrics",
        metrics=LMDEPLOY,
        sleep=Route(method="POST", path="/sleep?level=1"),
        wake=Route(method="POST", path="/wakeup"),
        thinking_field="reasoning_content",
        parameters=parameters.LMDEPLOY,
        sources={
            "command": _LMDEPLOY_ARGUMENTS,
            "key_variable": f"{_LMDEPLOY_ARGUMENTS}: --api-keys is an argument alone",
            "health_path": f"{_LMDEPLOY_ROUTES}: health",
            "lists_model": f"{_LMDEPLOY}, serve/openai/endpoints/models.py",
            "operations": f"{_LMDEPLOY}, serve/openai/endpoints; /v1/embeddings is refused",
            "usage_in_streams": f"{_LMDEPLOY}, serve/openai/chat_completions/serving.py: include_usage",
            "cached_tokens": f"{_LMDEPLOY_PROTOCOL}: PromptTokensDetails.cached_tokens; needs --enable-prefix-caching",
            "cancellation": f"{_LMDEPLOY}, serve/core/async_engine.py: safe_run cancels the session",
            "metrics_path": f"{_LMDEPLOY}, serve/openai/api_server.py: mount_metrics, on by default",
            "metrics": f"{_LMDEPLOY}, metrics",
            "sleep": f"{_LMDEPLOY_ROUTES}: sleep, level 1 or 2",
            "wake": f"{_LMDEPLOY_ROUTES}: wakeup",
            "thinking_field": f"{_LMDEPLOY_PROTOCOL}: DeltaMessage.reasoning_content; needs --reasoning-parser",
            "parameters": f"{_LMDEPLOY_PROTOCOL}: ChatCompletionRequest",
        },
    ),
    "tabbyapi": ServerPreset(
        title="TabbyAPI",
        version="main, 2026",
        install="https://github.com/theroyallab/tabbyAPI",
        command=(
            *("python3", "main.py", "--host", LOOPBACK, "--port", "{port}", "--disable-auth", "true"),
            *("--model-name", "{model}", "--max-seq-len", "{context}", "--max-batch-size", "{slots}"),
        ),
        cancellation=Cancellation.IMMEDIATELY,
        sleep=Route(method="POST", path="/v1/model/unload"),
        thinking_field="reasoning_content",
        parameters=parameters.TABBYAPI,
        sources={
            "command": f"{_TABBY_ARGUMENTS}; started in the program's folder",
            "key_variable": "tabbyAPI, common/auth.py at 1089091: keys are in api_tokens.yml of the working folder",
            "health_path": f"{_TABBY_ROUTES}: healthcheck",
            "lists_model": f"{_TABBY_ROUTES}: list_models; the loaded model answers under any name",
            "operations": f"{_TABBY_ROUTES}: /v1/token/encode has its own form",
            "usage_in_streams": f"{_TABBY_CHAT}: _compose_serialize_stream_usage_chunk",
            "cancellation": f"{_TABBY_CHAT}: DisconnectHandler",
            "sleep": f"{_TABBY_ROUTES}: unload_model; /v1/model/load loads it again",
            "thinking_field": f"{_TABBY_CHAT}: delta_reasoning_content; needs `reasoning: true`",
            "parameters": "tabbyAPI, common/sampling.py at 035269c, endpoints/OAI/types/chat_completion.py at 0158fb4",
        },
    ),
    "mlx_lm": ServerPreset(
        title="mlx-lm",
        version="0.32.2",
        install="pip install mlx-lm",
        command=(
            *("mlx_lm.server", "--model", "{model}", "--host", LOOPBACK, "--port", "{port}"),
            *("--max-tokens", "{context}", "--decode-concurrency", "{slots}"),
        ),
        upstream_model="default_model",
        lists_model=False,
        cached_tokens=True,
        cancellation=Cancellation.AT_NEXT_TOKEN,
        thinking_field="reasoning",
        parameters=parameters.MLX_LM,
        sources={
            "command": f"{_MLX_SERVER}: main; an answer ends after 512 tokens without --max-tokens",
            "key_variable": f"{_MLX_SERVER}: there is no key",
            "health_path": f"{_MLX_SERVER}: handle_health_check; 200 while the model still loads",
            "upstream_model": f"{_MLX_SERVER}: ModelProvider; any other name is loaded from the hub",
            "lists_model": f"{_MLX_SERVER}: handle_models_request lists the hub's cache on this machine",
            "operations": f"{_MLX_SERVER}: do_POST",
            "usage_in_streams": f"{_MLX_SERVER}: completion_usage_response",
            "cached_tokens": f"{_MLX_SERVER}: prompt_cache_count",
            "cancellation": f"{_MLX_SERVER}: handle_completion stops when a write fails",
            "thinking_field": f"{_MLX_SERVER}: generate_response",
            "parameters": f"{_MLX_SERVER}: do_POST, validate_model_parameters",
        },
    ),
    "ollama": ServerPreset(
        title="Ollama",
        version="main, 2026",
        install="https://ollama.com/download",
        command=("ollama", "serve"),
        environment={
            "OLLAMA_HOST": f"{LOOPBACK}:{{port}}",
            "OLLAMA_NUM_PARALLEL": "{slots}",
            "OLLAMA_CONTEXT_LENGTH": "{context}",
            "OLLAMA_KEEP_ALIVE": "-1",
            "OLLAMA_NOPRUNE": "1",
        },
        health_path="/v1/models",
        load=Route(method="POST", path="/api/generate", body='{"model": "{name}", "stream": false}'),
        other_operations=frozenset({Operation.EMBEDDING}),
        cancellation=Cancellation.AT_NEXT_TOKEN,
        sleep=Route(method="POST", path="/api/generate", body='{"model": "{name}", "stream": false, "keep_alive": 0}'),
        thinking_field="reasoning",
        parameters=parameters.OLLAMA,
        sources={
            "command": f"{_OLLAMA_ENVIRONMENT}: its address is in OLLAMA_HOST",
            "environment": f"{_OLLAMA_ENVIRONMENT}: AsMap; OLLAMA_CONTEXT_LENGTH is newer: Ollama 0.33's FAQ",
            "key_variable": "https://docs.ollama.com/api/openai-compatibility: the key is required and ignored",
            "health_path": f"{_OLLAMA_OPENAI}: ListCompletion",
            "lists_model": f"{_OLLAMA_OPENAI}: ToListCompletion; all pulled models",
            "load": f"{_OLLAMA_API}: an empty prompt loads the model",
            "operations": "https://docs.ollama.com/api/openai-compatibility",
            "other_operations": f"{_OLLAMA_OPENAI}: EmbedRequest",
            "usage_in_streams": f"{_OLLAMA_OPENAI}: StreamOptions, ToUsage",
            "cached_tokens": f"{_OLLAMA_OPENAI}: Usage has three counts",
            "cancellation": "ollama issue #11889: the runner notices when it sends the first token",
            "sleep": f"{_OLLAMA_API}: keep_alive 0 unloads it, the next request loads it again",
            "thinking_field": f"{_OLLAMA_OPENAI}: Message.Reasoning",
            "parameters": f"{_OLLAMA_OPENAI}: ChatCompletionRequest",
        },
    ),
}
PRESETS: Mapping[PresetName, ServerPreset] = MappingProxyType(_TABLE)

OTHER_PROGRAM = ServerPreset(
    title="another program",
    version="",
    install="",
    command=(),
    operations=_GENERATES,
    other_operations=frozenset(
        {
            *(Operation.EMBEDDING, Operation.RERANK, Operation.TOKENIZE),
            *(Operation.IMAGE, Operation.TRANSCRIPTION, Operation.SPEECH),
        }
    ),
    parameters=parameters.PARAMETERS,
    sources={},
)
"""Assumptions about a program without a preset: the OpenAI API and llama.cpp's routes, without claims."""
