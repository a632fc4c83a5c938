"""The sections of the configuration file about runners: their models, how these sleep and wake, their agents."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from weft_app.config.config_section import Name, Port, Repetition, Seconds, Section


class WakeSection(Section):
    """What wakes a sleeping model. `type` says which of the other names apply."""

    type: Literal["http", "command", "wake_on_lan"]
    """An HTTP request, a program, or a magic packet."""
    by: Literal["runner", "mesh"] = "runner"
    """Who does it. A sleeping host cannot wake itself: then it is the mesh, and the recipe is told to it."""
    url: Annotated[str, Field(max_length=2048)] | None = Field(default=None, repr=False)
    """For http: where to. Every 2xx answer is success."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """For http."""
    headers: dict[str, str] = Field(default={}, max_length=32, repr=False)
    """For http. `${WEFT_WAKE_...}` stands for that environment variable of the runner; not with `by: mesh`."""
    argv: tuple[str, ...] = Field(default=(), strict=False, max_length=64, repr=False)
    """For command: the program and its arguments; there is no shell. What it leaves running needs an output of its own:
    its standard error is closed."""
    mac_address: str | None = None
    """For wake_on_lan: hardware address of the sleeping network card."""
    broadcast_address: str = "255.255.255.255"
    """For wake_on_lan: IPv4 address to send to."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 9
    """For wake_on_lan: UDP port."""
    max_wait_seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Longest wait from the first step until the model takes requests."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> "WakeSection":
        needed = {"http": "url", "command": "argv", "wake_on_lan": "mac_address"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a wake recipe of type {self.type} needs {needed}")
        return self


class SleepSection(Section):
    """What puts an idle model to sleep. It is always done by the runner."""

    after_seconds: Seconds
    """Idle time after which the model goes to sleep."""
    type: Literal["unload", "http", "command"] = "unload"
    """End the engine that weft started, send an HTTP request, or run a program."""
    url: Annotated[str, Field(max_length=2048)] | None = Field(default=None, repr=False)
    """For http: where to. Every 2xx answer is success."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """For http."""
    headers: dict[str, str] = Field(default={}, max_length=32, repr=False)
    """For http. `${WEFT_WAKE_...}` stands for that environment variable."""
    argv: tuple[str, ...] = Field(default=(), strict=False, max_length=64, repr=False)
    """For command: the program and its arguments; there is no shell."""
    max_wait_seconds: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """Longest time the action may take."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> "SleepSection":
        needed = {"unload": "after_seconds", "http": "url", "command": "argv"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a sleep action of type {self.type} needs {needed}")
        return self


class AgentSection(Section):
    """An agent that the runner publishes with its models."""

    name: Name
    """Unique in the mesh; callers ask for model `agent/<name>`."""
    model: Name | None = None
    """Who answers: this model, or ..."""
    pool: Name | None = None
    """... this pool."""
    description: Annotated[str, Field(max_length=1024)] = ""
    """For people."""
    system_prompt: Annotated[str, Field(max_length=65_536)] = ""
    """Put before the conversation."""
    default_params: dict[str, Any] = Field(default={}, max_length=64)
    """Used where a request leaves a parameter out, such as `temperature: 0.2`."""
    platform_prompt: bool = False
    """Begin the conversation with the platform's own prompt: the mesh, date and time, tool budget, how to signal."""
    tools: tuple[Name, ...] = Field(default=(), max_length=64, strict=False)
    """Tools that the mesh runs for the model; the runner that answers must have them in its `tools`."""
    max_tool_iterations: Annotated[int, Field(ge=0, le=64)] | None = None
    """How often the model may be asked again with results of tools. Default: the runner's."""
    signals: tuple[Annotated[str, Field(max_length=64)], ...] = Field(default=(), max_length=64, strict=False)
    """Control signals that the model may raise, such as `NEEDS_HIGHER_REASONER`."""
    stop_on_decision_request: bool = True
    """Whether a signal that asks for a decision ends the answer."""
    repetition: Repetition | None = None
    """What happens to an answer that repeats itself. Default: the model's."""
    parse_text_tool_calls: bool = True
    """Whether calls that the model writes as text count as calls."""

    @model_validator(mode="after")
    def _has_one_target(self) -> "AgentSection":
        if (self.model is None) == (self.pool is None):
            raise ValueError("an agent needs either model or pool")
        return self


ServedOperation = Literal["chat", "completion", "embedding", "rerank", "tokenize", "image", "transcription", "speech"]


class ModelSection(Section):
    """One model of a runner."""

    name: Name
    """Unique in the mesh."""
    pool: Name | None = None
    """Models of one pool answer for each other."""
    path: Annotated[Path, Field(strict=False)] | None = None
    """For llama_server and llama_cpp_python: the GGUF file; `~` is your home folder."""
    url: Annotated[str, Field(max_length=2048)] | None = Field(default=None, repr=False)
    """For openai_http: base URL of the server, such as `http://127.0.0.1:11434/v1`. For openai_remote: of the provider,
    https and with its version, such as `https://api.example.com/v1`. Never told to the mesh."""
    api_key_env: Annotated[str, Field(max_length=128)] | None = None
    """For openai_http and openai_remote: environment variable that holds the key. Never told to the mesh."""
    upstream_model: Annotated[str, Field(max_length=512)] | None = None
    """For openai_http and openai_remote: the server's own name of the model. Default: `name`."""
    api_kind: Literal["chat_completions"] = "chat_completions"
    """For openai_remote: which of the provider's interfaces is used."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """For openai_remote: longest wait until an answer begins, repetitions and the pauses before them included."""
    max_retries: Annotated[int, Field(ge=0, le=10)] = 0
    """For openai_remote: how often the runner itself repeats a request for which the provider was too busy (429, 503),
    or to whom there was no connection. The router may try elsewhere besides."""
    health_check: Literal["config_only", "models"] = "config_only"
    """For openai_remote: `config_only` calls the provider for requests alone; `models` also asks it for its list of
    models, at the start and every minute."""
    token_limit_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"  # noqa: S105 - a parameter's name
    """For openai_remote: what the provider calls the limit of an answer's length."""
    cache_salt: bool = False
    """For openai_http: whether the server knows `cache_salt`, as vLLM does. It is then sent with every request, so that
    tenants share no cached prefixes; without it weft cannot keep them apart there."""
    skills: tuple[Literal["text", "image", "audio", "tools"], ...] = Field(default=(), max_length=8, strict=False)
    """What it can do beyond text, `text` itself included, such as `[text, image, tools]`; a request for anything else
    goes to other models. Default: `[text, image, tools]` for llama_server with `--mmproj`; else it is not known, and it
    is asked for everything."""
    remote: bool = False
    """Whether serving it sends bytes off the premises. Always so for openai_remote; for openai_http it must be said
    where the address of the server is not one of a network of your own."""
    publish: bool | None = None
    """Whether the mesh hears of it. Default: yes in `weft up` and `weft serve`, no in `weft runner join`."""
    wake: WakeSection | None = None
    """What wakes it when it sleeps."""
    sleep: SleepSection | None = None
    """What puts it to sleep when it is idle. Default: it never sleeps by itself."""
    start_asleep: bool = False
    """For engines that weft starts: load it with the first request rather than at the start."""
    memory_mb: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Accelerator memory that it takes, in MiB. Default: estimated from its file, and learned from what loads took."""
    keep_alive: Annotated[str, Field(max_length=32)] | float | None = None
    """How long it stays loaded after a request: seconds, a text such as `5m`, -1 for ever, 0 for one request. Default:
    `sleep.after_seconds`; without it for ever, or by `category` where it holds accelerator memory."""
    category: Literal["text", "image", "vision"] = "text"
    """What it is for: text models that hold accelerator memory are kept for 300 s, image models 900 s, vision 60 s."""
    pin: bool = False
    """Whether it is never evicted for another model, and stays loaded."""
    quantizations: dict[Name, Annotated[Path, Field(strict=False)]] = Field(default={}, max_length=16)
    """Further files of the same model by quantization, such as `q8_0: ~/models/qwen-q8_0.gguf`, for `weft load`."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """How many of it are loaded at the start: identical engines that share a pool of its name."""
    replica_max: Annotated[int, Field(ge=1, le=64)] | None = None
    """How many of it there can be; those beyond `replicas` start asleep. Default: `replicas`."""
    target_inflight: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Requests that each replica works on at once. Default: `slots`."""
    slots: Annotated[int, Field(ge=1, le=1024)] = 4
    """Requests it works on at once. Always 1 on llama_cpp_python."""
    context_tokens: Annotated[int, Field(ge=16, le=16_777_216)] = 2048
    """Context of one slot. For openai_http and openai_remote: unknown unless it is said here."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Default: cores minus one."""
    embeddings: bool = True
    """Whether it also gives embeddings. For openai_remote only where it is said here."""
    operations: tuple[ServedOperation, ...] = Field(default=(), max_length=8, strict=False)
    """For openai_http and openai_remote: what the server offers, such as `[chat, tokenize]`. Default: `[chat,
    completion, embedding]` for openai_http, `[chat]` for openai_remote. Engines that weft starts say it themselves:
    llama_server offers `rerank` alone, with `--reranking` among its `extra_arguments`."""
    extra_arguments: tuple[str, ...] = Field(default=(), strict=False)
    """Further flags for the server program; on llama_cpp_python for its host program, such as `--gpu-layers 0`."""
    passthrough: Literal["none", "all"] = "none"
    """Which parameters that weft does not know reach the engine: those it allows for this kind of engine, or all."""
    chat_template_path: Annotated[Path, Field(strict=False)] | None = None
    """A chat template (Jinja) to use instead of the model file's own. Not for openai_http and openai_remote."""
    thinking: bool | None = None
    """Whether a model that can think does so where a request says nothing. Default: as its template has it. For
    openai_remote: whether the field `thinking` is sent, as enabled or disabled. Default: it is not."""
    system_messages: Literal["joined", "separate"] = "joined"
    """How several system prompts reach the model: as one message, which every template takes, or one each."""
    tools: tuple[Name, ...] = Field(default=(), max_length=64, strict=False)
    """Tools that the mesh runs for every chat with this model, from the runner's `tools`."""
    default_max_tokens: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Tokens of an answer at most where neither the request nor its agent names a maximum; the answer then ends with
    `length`. Default: until the context ends. The demo model has 512."""
    repetition: Repetition = "kill"
    """What happens to an answer that repeats a line or a piece of text over and over: it goes on unread (off), goes on
    with a warning (warn), or ends with `repeated_line_loop` (kill)."""
    repetition_lines: Annotated[int, Field(ge=2, le=100_000)] = 16
    """So many equal lines of prose in a row are a loop; six times as many short ones, more of code and of figures."""
    repetition_characters: Annotated[int, Field(ge=64, le=100_000)] = 1_200
    """So many characters of prose in which one piece comes again and again are a loop; more of code and of figures."""


class ToolSection(Section):
    """A source of tools that the runner runs for models. `type` says which of the other names apply."""

    type: Literal["python", "mcp_command", "mcp_http"]
    """A Python function, an MCP server that the runner starts, or one that runs already."""
    name: Name
    """For python: the tool's name. For MCP: a prefix, so that `files` and its tool `read` give `files.read`."""
    function: Annotated[str, Field(max_length=512)] | None = None
    """For python: `package.module:function`. Its annotations give the schema, its docstring the description."""
    argv: tuple[str, ...] = Field(default=(), strict=False, max_length=64, repr=False)
    """For mcp_command: the program and its arguments; there is no shell."""
    environment: dict[str, str] = Field(default={}, max_length=64, repr=False)
    """For mcp_command: set for the program, beside PATH, HOME and LANG and nothing else of the runner's own.
    `${WEFT_TOOL_...}` stands for that environment variable of the runner."""
    url: Annotated[str, Field(max_length=2048)] | None = Field(default=None, repr=False)
    """For mcp_http: where the server listens (streamable HTTP)."""
    headers: dict[str, str] = Field(default={}, max_length=32, repr=False)
    """For mcp_http. `${WEFT_TOOL_...}` stands for that environment variable of the runner."""
    allow: tuple[str, ...] = Field(default=(), strict=False, max_length=256)
    """For MCP: the server's tools that may be used. Default: all of them."""
    remote: bool = False
    """Whether calling it sends bytes off the premises; then only requests with `allow_remote` get it."""
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Longest time that one call may take; the model is told when it is over."""
    max_output_bytes: Annotated[int, Field(ge=256, le=16_777_216)] = 65_536
    """How much of a tool's output the model is told; the rest is cut, and said."""

    @model_validator(mode="after")
    def _fits_its_type(self) -> "ToolSection":
        needed = {"python": "function", "mcp_command": "argv", "mcp_http": "url"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a tool of type {self.type} needs {needed}")
        return self


class SignalSection(Section):
    """A control signal of your own, beside the built-in ones."""

    name: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]
    """In capitals, such as `NEEDS_LEGAL_REVIEW`."""
    description: Annotated[str, Field(min_length=1, max_length=1024)]
    """When to raise it, for the model to read."""
    parameters: dict[str, Any] = Field(default={}, max_length=16)
    """JSON schema of its arguments. Default: a `reason`."""
    asks_for_decision: bool = False
    """Whether it ends the answer where the agent says `stop_on_decision_request`."""


class RunnerSection(Section):
    """One runner process."""

    name: Name
    """Unique in the mesh."""
    runtime: Literal["llama_server", "openai_http", "llama_cpp_python", "openai_remote"] = "llama_server"
    """The kind of engine: llama.cpp's server or llama-cpp-python, which weft starts, an OpenAI-compatible server that
    runs already, or the models of a provider off the premises, see docs/remote.md."""
    command: tuple[str, ...] | None = Field(default=None, strict=False)
    """The server program and its first arguments. Default: `llama-server` on PATH, else the xllamacpp launcher. For
    llama_cpp_python: another interpreter that has weft and the library, with `-m
    runner_svc.runtimes.llama_cpp_python.host`."""
    models: tuple[ModelSection, ...] = Field(min_length=1, max_length=64, strict=False)
    """What it serves, one process each."""
    agents: tuple[AgentSection, ...] = Field(default=(), max_length=256, strict=False)
    """Agents it publishes with its models."""
    max_requests: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Requests it works on at once over all its models. Default: as many as its slots."""
    devices: tuple[Annotated[int, Field(ge=0, le=63)], ...] = Field(default=(), max_length=64, strict=False)
    """Accelerators of the host that it may use, by number in the order of the PCI bus. Default: those that
    CUDA_VISIBLE_DEVICES names, or all."""
    port_range: Annotated[str, Field(pattern=r"^\d{1,5}-\d{1,5}$")] | None = None
    """Ports that engines listen on, such as `41000-41099`, where others are closed. Default: any free one."""
    http_port: Port | None = None
    """Loopback port of this runner's own HTTP API, see docs/runner-api.md; 0 takes a free one. Default: it has none."""
    memory_wait_seconds: Seconds = 300.0
    """Longest wait of a load for accelerator memory."""
    probe_interval_seconds: Seconds = 5.0
    """For openai_http: how often the server is asked whether it is there."""
    probe_failures: Annotated[int, Field(ge=1, le=1000)] = 3
    """For openai_http: probes in a row that must fail before the server counts as gone."""
    load_stall_seconds: Seconds = 300.0
    """Loading is given up when neither output nor CPU time moved for this long."""
    connect_timeout_seconds: Seconds = 5.0
    """Longest wait for a connection to the engine."""
    headers_timeout_seconds: Seconds | None = None
    """Longest wait for response headers. Off: llama-server sends them with the first token."""
    first_token_timeout_seconds: Seconds | None = None
    """Longest wait for the first token, however busy the engine is. Off: a long prompt takes its time."""
    prefill_liveness_timeout_seconds: Seconds | None = 120.0
    """Longest time without a sign of life before the first token: prefill progress, CPU or GPU time of the engine."""
    idle_stream_timeout_seconds: Seconds = 120.0
    """Longest time without a token once the answer has begun."""
    absolute_timeout_seconds: Seconds | None = None
    """Longest time for a whole request, tools included. Off."""
    liveness_probe_interval_seconds: Seconds = 1.0
    """How often signs of life are looked for."""
    first_term_seconds: Seconds = 3.0
    """Grace after the first SIGTERM."""
    second_term_seconds: Seconds = 2.0
    """Grace after the second SIGTERM, before SIGKILL."""
    kill_seconds: Seconds = 5.0
    """Longest wait for the kernel after SIGKILL."""
    max_deaths: Annotated[int, Field(ge=1, le=1000)] = 5
    """A crash loop is this many deaths ..."""
    death_window_seconds: Seconds = 30.0
    """... within this time."""
    first_pause_seconds: Seconds = 10.0
    """Pause after a crash loop; doubles with every further one."""
    max_pause_seconds: Seconds = 300.0
    """Longest such pause."""
    tools: tuple[ToolSection, ...] = Field(default=(), max_length=64, strict=False)
    """Tools that the runner can run for models and agents that list them."""
    signals: tuple[SignalSection, ...] = Field(default=(), max_length=32, strict=False)
    """Control signals beside the built-in ones."""
    max_tool_iterations: Annotated[int, Field(ge=0, le=64)] = 8
    """How often a model may be asked again with results of tools, where its agent says nothing."""
    max_tool_calls_per_turn: Annotated[int, Field(ge=1, le=64)] = 16
    """Tool calls that one turn of a model may hold."""
    time_zone: Annotated[str, Field(max_length=64)] | None = None
    """Zone of the date and time in the platform prompt, such as `Europe/Berlin`. Default: the machine's."""
    platform_context: Annotated[str, Field(max_length=8192)] = ""
    """What the platform prompt says about your mesh, for the model to read."""

    @property
    def starts_engines(self) -> bool:
        """Whether weft starts what serves its models."""
        return self.runtime not in ("openai_http", "openai_remote")

    @model_validator(mode="after")
    def _models_fit_the_runtime(self) -> "RunnerSection":
        needed, foreign = ("path", "url") if self.starts_engines else ("url", "path")
        for model in self.models:
            if getattr(model, needed) is None:
                raise ValueError(f"model {model.name} needs {needed}, because the runtime is {self.runtime}")
            if getattr(model, foreign) is not None:
                raise ValueError(f"model {model.name} cannot have {foreign}, because the runtime is {self.runtime}")
            if model.sleep is not None and model.sleep.type == "unload" and not self.starts_engines:
                raise ValueError(f"model {model.name} cannot be unloaded: weft did not start its server")
            misplaced = _NOT_FOR_PROVIDERS if self.runtime == "openai_remote" else _FOR_PROVIDERS
            if found := sorted(misplaced & model.model_fields_set):
                raise ValueError(f"model {model.name} cannot have {found[0]}, because the runtime is {self.runtime}")
        return self


_FOR_PROVIDERS = frozenset({"api_kind", "timeout_seconds", "max_retries", "health_check", "token_limit_name"})
_NOT_FOR_PROVIDERS = frozenset(
    {"cache_salt", "wake", "sleep", "start_asleep", "chat_template_path", "quantizations", "replicas", "replica_max"}
)


def published_models(runner: RunnerSection) -> list[ModelSection]:
    """The models of a runner that the mesh hears of where publishing is the default."""
    return [model for model in runner.models if model.publish is not False]
