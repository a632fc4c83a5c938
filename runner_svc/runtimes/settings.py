"""The settings of a model in `weft.yaml`: those of all runtimes, and those of groups of runtimes.

Each runtime declares a frozen dataclass in `runtimes/<name>/runtime.py` that extends one of these. The `runtime` of a
runner selects a member of their union: a setting of another runtime is rejected by name.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Le, MaxLen, MinLen
from typing_extensions import override

from runner_svc.policy.repository_files import ModelForm
from weft.kernel.errors import FieldError
from weft.kernel.model_source import MAX_SOURCE_CHARS, parse_source
from weft.kernel.request import JournalWord, Operation, OperationName
from weft.kernel.settings import (
    PUBLIC,
    SECRET,
    Before,
    Checked,
    ModelName,
    Name,
    PathText,
    Pattern,
    Seconds,
    off_for_false,
)

if TYPE_CHECKING:
    from weft.kernel.load_parameters import LoadValue

NOT_PULLED = Path("/dev/null/not-pulled")
"""A path that cannot exist, for a model with a source that is not pulled yet."""
DEFAULT_CONTEXT_TOKENS = 2048
"""Context of one slot of an engine that weft starts."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Marks a setting as a flag of the program, which is omitted if the setting is unset or false."""

    name: str


MAX_ADAPTERS = 32
"""Per model."""
Skill = Literal["text", "image", "audio", "tools"]
LanguageCode = Annotated[str, Pattern(r"^[A-Za-z0-9_-]{1,64}$")]
ThinkingMode = Literal["default", "enabled", "disabled"]
Repetition = Annotated[Literal["off", "warn", "kill"], Before(off_for_false)]
"""What happens to an answer that repeats itself over and over."""
Url = Annotated[str, MaxLen(2048), SECRET]
Arguments = tuple[str, ...]


def _check_source(text: str) -> str:
    try:
        parse_source(text, "source")
    except FieldError as error:
        raise ValueError(error.message.removeprefix("source: ")) from None
    return text


SourceText = Annotated[str, MaxLen(MAX_SOURCE_CHARS), Checked(_check_source)]
"""The source of a model, such as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`."""
Tier = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,31}$")]
LabelKey = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$")]
LabelValue = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9._:@/+=-]{0,127}$")]
Owner = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9._:@/+=-]{0,127}$")]
MAX_LABELS = 16
VariableName = Annotated[str, Pattern(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
VariableValue = Annotated[str, MaxLen(4096), Pattern(r"^[^\x00]*$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeSettings:
    """What wakes a hibernating model. `type` says which of the other names apply."""

    type: Literal["http", "command", "wake_on_lan"]
    """An HTTP request, a program, or a magic packet."""
    by: Literal["runner", "mesh"] = "runner"
    """Who does it. A sleeping host cannot wake itself: then it is the mesh, and the recipe is sent to it."""
    url: Url | None = field(default=None, repr=False)
    """For http: where to. Every 2xx answer is success."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """For http."""
    headers: Annotated[Mapping[str, str], MaxLen(32), SECRET] = field(default_factory=dict, repr=False)
    """For http. `${WEFT_WAKE_...}` stands for that environment variable of the runner; not with `by: mesh`."""
    argv: Annotated[Arguments, MaxLen(64), SECRET] = field(default=(), repr=False)
    """For command: the program and its arguments; there is no shell. What it leaves running needs its own output:
    its standard error is closed."""
    mac_address: str | None = None
    """For wake_on_lan: hardware address of the sleeping network card."""
    broadcast_address: Annotated[str, MinLen(1)] = "255.255.255.255"
    """For wake_on_lan: IPv4 address to send to."""
    port: Annotated[int, Ge(1), Le(65_535)] = 9
    """For wake_on_lan: UDP port."""
    max_wait_seconds: Annotated[float, Ge(1), Le(3600)] = 60.0
    """Longest wait from the first step until the model takes requests."""

    def __post_init__(self) -> None:
        needed = {"http": "url", "command": "argv", "wake_on_lan": "mac_address"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a wake recipe of type {self.type} needs {needed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepSettings:
    """What puts an idle model to sleep. It is always done by the runner."""

    after_seconds: Seconds
    """Idle time after which the model goes to sleep."""
    type: Literal["unload", "http", "command"] = "unload"
    """End the engine that weft started, send an HTTP request, or run a program."""
    url: Url | None = field(default=None, repr=False)
    """For http: where to. Every 2xx answer is success."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """For http."""
    headers: Annotated[Mapping[str, str], MaxLen(32), SECRET] = field(default_factory=dict, repr=False)
    """For http. `${WEFT_WAKE_...}` stands for that environment variable."""
    argv: Annotated[Arguments, MaxLen(64), SECRET] = field(default=(), repr=False)
    """For command: the program and its arguments; there is no shell."""
    max_wait_seconds: Annotated[float, Ge(1), Le(3600)] = 60.0
    """Longest time the action may take."""

    def __post_init__(self) -> None:
        needed = {"unload": "after_seconds", "http": "url", "command": "argv"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a sleep action of type {self.type} needs {needed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """An adapter (LoRA) of a model, which is a separate model in the mesh."""

    name: Annotated[ModelName, PUBLIC]
    """Its name as a model, unique in the mesh."""
    pool: Annotated[ModelName, PUBLIC] | None = None
    """Models of one pool answer for each other. Default: it is alone."""
    skills: Annotated[tuple[Skill, ...], MaxLen(8)] = ()
    """What it can do, as of a model. Default: what its model can do."""

    @property
    def digested_file(self) -> Path | None:
        """The file whose digest is in receipts; None: there is none on this machine."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What every runtime lets an operator say about a model."""

    name: Annotated[ModelName, PUBLIC]
    """Unique in the mesh."""
    enabled: Annotated[bool, PUBLIC] = True
    """Whether it is there at all. Of one that is not, only the form of its settings is checked; `weft.local.yaml` may
    enable it on one machine."""
    pool: Annotated[ModelName, PUBLIC] | None = None
    """Models of one pool answer for each other."""
    tier: Annotated[Tier, PUBLIC] | None = None
    """How it ranks among the models of the mesh, such as `fast` or `heavy`, for people and selectors."""
    labels: Annotated[Mapping[LabelKey, LabelValue], MaxLen(MAX_LABELS), PUBLIC] = field(default_factory=dict)
    """Labels by which commands select it, such as `team: a` for `weft get models -l team=a`."""
    owner: Annotated[Owner, PUBLIC] | None = None
    """Who answers for it."""
    journal: Annotated[JournalWord, PUBLIC] | None = None
    """Whether its requests are durable tasks without their callers asking for it: `wait`, while their callers wait;
    `keep`, and also when a caller has disconnected; `none`. Its adapters have the same. Default: as the tenant's
    setting, else the mesh's."""
    skills: Annotated[tuple[Skill, ...], MaxLen(8)] = ()
    """What it can do beyond text, `text` itself included, such as `[text, image, tools]`; a request for anything else
    goes to other models. Default: as its files and its engine show; what they do not show is tried."""
    remote: bool | None = None
    """Whether serving it sends bytes to a remote provider. Default: no, unless the runtime says otherwise."""
    publish: bool | None = None
    """Whether the mesh learns of it. Default: yes in `weft up` and `weft serve`, no in `weft runner join`."""
    keep_alive: Annotated[str, MaxLen(32)] | float | None = None
    """How long it stays loaded after a request: seconds, a text such as `5m`, -1 never to unload it, 0 for one request.
    Default: `sleep.after_seconds`; without it never, or by `category` where it holds accelerator memory."""
    category: Literal["text", "image", "vision", "audio"] | None = None
    """What it is for: models that hold accelerator memory are kept for 300 s if they are for text or audio, for 900 s
    if they are for images, and for 60 s if they are for vision. Default: as its operations show: `image` where it makes
    images, `audio` where it does nothing but transcription and speech, else `text`."""
    pin: bool = False
    """Whether it is never evicted for another model, and stays loaded."""
    target_inflight: Annotated[int, Ge(1), Le(1024)] | None = None
    """Requests that each replica works on concurrently. Default: `slots`."""
    slots: Annotated[int, Ge(1), Le(1024), PUBLIC] = 4
    """Requests it works on concurrently."""
    context_tokens: Annotated[int, Ge(16), Le(16_777_216), PUBLIC] | None = None
    """Context of one slot. Default: 2048 for engines that weft starts; of servers that it does not start it is unknown
    unless it is set here."""
    passthrough: Literal["none", "all"] = "none"
    """Which parameters that weft does not know reach the engine: those it allows for this kind of engine, or all."""
    thinking: bool | None = None
    """Whether a model that can think does so where a request says nothing. Default: as its template has it. For
    openai_remote: whether the field `thinking` is sent, as enabled or disabled. Default: it is not."""
    thinking_modes: Annotated[tuple[ThinkingMode, ...], MaxLen(3)] = ()
    """How requests may set its thinking. Default: as its chat template shows; else it is not known, and every mode is
    sent."""
    source_languages: Annotated[tuple[LanguageCode, ...], MaxLen(512)] = ()
    """Languages that it translates from, such as `[nl, pt-BR]`. Default: as its engine reports them; else not known."""
    target_languages: Annotated[tuple[LanguageCode, ...], MaxLen(512)] = ()
    """Languages that it translates into; as above."""
    platform_prompt: bool | None = None
    """Begin every chat with the platform's own prompt: the mesh, date and time, tool budget, how to signal. It stands
    before the agent's system prompt and the caller's. Default: the runner's `platform_prompt`."""
    platform_context: Annotated[str, MaxLen(8192)] | None = None
    """What the platform prompt of this model says about your mesh. Default: the runner's `platform_context`."""
    tools: Annotated[tuple[Name, ...], MaxLen(64)] = ()
    """Tools that the mesh runs for every chat with this model, from the runner's `tools`."""
    default_max_tokens: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Maximum tokens of an answer where neither the request nor its agent names one; the answer then ends with
    `length`. Default: until the context ends. The demo model has 512."""
    default_params: Annotated[Mapping[str, Any], MaxLen(64), PUBLIC] = field(default_factory=dict)
    """Sampling parameters of requests that leave them out, also in their agent, such as `temperature: 0.2`; for the
    maximum of tokens there is `default_max_tokens`. Default: the engine's own."""
    repetition: Repetition = "kill"
    """What happens to an answer that repeats a line or a piece of text. off: not checked; warn: a warning; kill: it
    ends with `repeated_line_loop`."""

    tried_by: ClassVar[str] = ""
    """Command that tries a model without chat, without the model's name; empty: the model chats."""

    @property
    def location(self) -> str:
        """Where the model is, for `weft doctor`: a file, or what serves it."""
        return ""

    @property
    def upstream_name(self) -> str:
        """Name of its file or folder, or its name on the server, as shown in the mesh; empty: unknown."""
        return ""

    @property
    def served_adapters(self) -> tuple[AdapterSettings, ...]:
        """The adapters of the model, which are separate models."""
        return ()

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that its engine serves: the model's and those of its adapters."""
        return self.name, *(adapter.name for adapter in self.served_adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepingModelSettings(ModelSettings):
    """Adds how a model hibernates and wakes."""

    wake: WakeSettings | None = None
    """What wakes it when it hibernates."""
    sleep: SleepSettings | None = None
    """What puts it to sleep when it is idle. Default: it never hibernates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedModelSettings(SleepingModelSettings):
    """Adds what can be said about a model whose engine weft starts and ends."""

    start_asleep: bool = False
    """Load it with the first request rather than at the start."""
    replicas: Annotated[int, Ge(1), Le(64), PUBLIC] = 1
    """How many of it are loaded at the start: identical engines that share a pool of its name."""
    replica_max: Annotated[int, Ge(1), Le(64)] | None = None
    """How many of it there can be; those beyond `replicas` start hibernating. Default: `replicas`."""
    threads: Annotated[int, Ge(1), Le(1024), PUBLIC] | None = None
    """Processor threads. Default: cores minus one."""
    extra_arguments: Annotated[Arguments, PUBLIC] = ()
    """Further flags for the engine's program."""
    host_memory_mb: Annotated[int, Ge(0), Le(16_777_216), PUBLIC] | None = None
    """Limit of the host's memory for each process of its engine, in MiB; 0: no limit. Default: twice the estimate of
    the model and 4 GiB, and at most the memory of the machine less a reserve."""
    environment: Annotated[Mapping[VariableName, VariableValue], MaxLen(64), SECRET] = field(
        default_factory=dict, repr=False
    )
    """Environment variables of the engine's program, besides those of the runner. `${NAME}` stands for the variable of
    that name of the runner, so that a secret need not be in this file."""
    library_path: Annotated[tuple[PathText, ...], MaxLen(16)] = ()
    """Folders that the engine's program searches for shared libraries first (LD_LIBRARY_PATH)."""

    @property
    def slot_context_tokens(self) -> int:
        """Context of one slot when the engine is started."""
        return self.context_tokens or DEFAULT_CONTEXT_TOKENS

    @property
    def engine_threads(self) -> int:
        """Processor threads when the engine is started."""
        return self.threads or default_threads()

    @property
    def max_kept_prompt_bytes(self) -> int:
        """Maximum main memory for prompts that lose their slot."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedModelSettings(StartedModelSettings):
    """Adds where a server program and the reader of chat templates find a model."""

    @property
    def file(self) -> Path:
        """Absolute path of the model file or folder."""
        raise NotImplementedError

    @property
    def chat_template_file(self) -> Path | None:
        """Absolute path of the chat template; None: the model's own."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedModelSettings(HostedModelSettings):
    """Adds that the files of a model may be pulled by its name."""

    source: Annotated[SourceText, PUBLIC] | None = None
    """What it is pulled from at its first load, such as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`, in place of `path` or `model`
    (docs/models.md)."""

    form: ClassVar[ModelForm]
    """The form of its files."""
    files_setting: ClassVar[str]
    """The setting that names its files if there is no source."""
    other_files_settings: ClassVar[tuple[str, ...]] = ()
    """Other settings that name files; each is sufficient alone."""

    def __post_init__(self) -> None:
        if self.source is not None and getattr(self, self.files_setting) is not None:
            raise ValueError(f"model {self.name} has a {self.files_setting} and a source; leave one of them out")

    def pulled(self, path: Path, projector: Path | None) -> Self:
        """Returns the settings with the files that were pulled from its source."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class PathModelSettings(SourcedModelSettings):
    """Adds the path of a model, whose memory is estimated from its files."""

    path: Annotated[PathText, PUBLIC] | None = None
    """The GGUF file, or the folder of a model in another format; `~` is your home folder. Required without `source`."""
    memory_mb: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Accelerator memory that it takes, in MiB. Default: estimated from its files, and learned from what loads took."""

    form: ClassVar[ModelForm] = ModelForm.FOLDER
    files_setting: ClassVar[str] = "path"

    @property
    @override
    def file(self) -> Path:
        """Absolute path of the model file or folder; NOT_PULLED if the source is not pulled yet."""
        return NOT_PULLED if self.path is None else self.path.expanduser()

    @override
    def pulled(self, path: Path, projector: Path | None) -> Self:
        del projector
        return replace(self, path=path, source=None)

    def weights_of(self, path: Path) -> Path:
        """Returns the weights file of a model configured with this path."""
        return path

    @property
    @override
    def location(self) -> str:
        """The file or folder, or the source."""
        return str(self.path) if self.path is not None else self.source or ""

    @property
    @override
    def upstream_name(self) -> str:
        return self.path.name if self.path is not None else self.source or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileModelSettings(PathModelSettings):
    """Adds what can be said about a model that generates text."""

    quantizations: Annotated[Mapping[Name, PathText], MaxLen(16)] = field(default_factory=dict)
    """Further files or folders of the same model by quantization, such as `q8_0: ~/models/qwen-q8_0.gguf`, for
    `weft load`."""
    chat_template_path: PathText | None = None
    """A chat template (Jinja) to use instead of the model's own."""

    @property
    @override
    def chat_template_file(self) -> Path | None:
        """Absolute path of the chat template; None: the model's own."""
        return None if self.chat_template_path is None else self.chat_template_path.expanduser()

    @property
    def projector_file(self) -> Path | None:
        """Absolute path of the encoder for images and audio; None: it has none."""
        return None

    @property
    def draft_file(self) -> Path | None:
        """Absolute path of the draft model; None: it has none."""
        return None

    @property
    def adapter_files(self) -> tuple[Path, ...]:
        """Absolute paths of its adapters."""
        return tuple(file for adapter in self.served_adapters if (file := adapter.digested_file) is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufModelSettings(FileModelSettings):
    """Adds what can be said about a model in a GGUF file."""

    embeddings: bool = True
    """Whether it also gives embeddings."""

    form: ClassVar[ModelForm] = ModelForm.GGUF


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaModelSettings(PathModelSettings):
    """Adds what can be said about a model of images or recordings whose engine is a library."""

    slots: Annotated[int, Ge(1), Le(1024), PUBLIC] = 1
    """Requests it works on concurrently."""


Device = Literal["cpu", "cuda", "auto"]


# Without slots, because it is mixed into settings that have them.
@dataclass(frozen=True, kw_only=True)
class DeviceSettings(PathModelSettings):
    """Adds where a library computes."""

    device: Annotated[Device, Argument("--device"), PUBLIC] = "auto"
    """Where it computes; `auto` takes an accelerator if there is one."""

    @property
    def device_values(self) -> "Mapping[str, LoadValue]":
        """Load parameters implied by the device: on a processor, no layers are on accelerators."""
        return {"gpu_layers": 0} if self.device == "cpu" else {}


ComputeType = Literal[
    "default",
    "auto",
    "int8",
    "int8_float32",
    "int8_float16",
    "int8_bfloat16",
    "int16",
    "float16",
    "bfloat16",
    "float32",
]


# Without slots, because it is mixed into settings that have them.
@dataclass(frozen=True, kw_only=True)
class CTranslate2Settings(DeviceSettings):
    """Adds what can be said about a model in the form of CTranslate2."""

    compute_type: Annotated[ComputeType, Argument("--compute-type"), PUBLIC] = "int8"
    """Type of the weights. One that the device does not have becomes the nearest that it has."""
    sleeps_in_place: bool = False
    """Whether it hibernates, when idle, by unloading the weights in its process, which wakes in a moment. Default: its
    process is ended, as it always is where it holds memory of accelerators."""

    @override
    def weights_of(self, path: Path) -> Path:
        return path / "model.bin"


# Without slots, because it is mixed into settings that have them.
@dataclass(frozen=True, kw_only=True)
class UpstreamSettings(ModelSettings):
    """Adds how a server that weft does not start is reached. The mesh learns neither its address nor its key."""

    url: Annotated[str, MaxLen(2048), PUBLIC, SECRET] = field(repr=False)
    """Base URL of the server."""
    api_key_env: Annotated[str, MaxLen(128), PUBLIC] | None = None
    """Environment variable that holds the key."""
    upstream_model: Annotated[str, MaxLen(512), PUBLIC] | None = None
    """The server's own name of the model. Default: `name`."""
    embeddings: bool | None = None
    """Whether it also gives embeddings."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """What the server offers, such as `[chat, tokenize]`."""

    @property
    def server_model(self) -> str:
        """The server's name of the model."""
        return self.upstream_model or self.name

    @property
    @override
    def upstream_name(self) -> str:
        return self.server_model


def default_threads() -> int:
    """Returns the number of cores minus one: on all cores of a shared machine llama.cpp is far slower (measured)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(1, cores - 1)


def settings_fields(settings: type[ModelSettings]) -> frozenset[str]:
    """Returns the names of these settings."""
    return frozenset(settings.__dataclass_fields__)
