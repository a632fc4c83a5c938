"""The settings of a model in `weft.yaml`: those of all runtimes, and those of groups of runtimes.

Each runtime declares a frozen dataclass in `runtimes/<name>/runtime.py` that extends one of these. The `runtime` of a
runner selects a member of their union: a setting of another runtime is rejected by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Le, MaxLen, MinLen
from typing_extensions import override

from runner_svc.policy.repository_files import ModelForm
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.machine.machine_limits import usable_processors
from weft.kernel.models.model_source import MAX_SOURCE_CHARS, parse_source, shown_url
from weft.kernel.requests.request_values import JournalWord, Operation, OperationName
from weft.kernel.settings.setting_annotations import (
    PUBLIC,
    SECRET,
    Before,
    Checked,
    ModelName,
    Name,
    PathText,
    Pattern,
    Seconds,
    UrlText,
    off_for_false,
)
from weft.kernel.values.reach import PACKET, PLAIN, PROGRAM, SOURCE, TEMPLATE, TOOL, VARIABLE

if TYPE_CHECKING:
    from weft.kernel.models.load_parameters import LoadValue

NOT_PULLED = Path("/dev/null/not-pulled")
"""A path that cannot exist, for a model with a source that is not pulled yet."""
DEFAULT_CONTEXT_TOKENS = 2048
"""Context of one slot of an engine that weft starts."""


@dataclass(frozen=True, slots=True)
class Argument:
    """Marks a setting as a flag of the program, which is omitted if the setting is unset or false."""

    name: str


MAX_ADAPTERS = 32
"""Maximum number of adapters of a model."""
Skill = Literal["text", "image", "audio", "tools"]
LanguageCode = Annotated[str, Pattern(r"^[A-Za-z0-9_-]{1,64}$"), PLAIN]
ThinkingMode = Literal["default", "enabled", "disabled"]
Repetition = Annotated[Literal["off", "warn", "kill"], Before(off_for_false)]
"""What happens to an answer that repeats itself."""
Url = Annotated[UrlText, SECRET]
Arguments = tuple[Annotated[str, PROGRAM], ...]


def _check_source(text: str) -> str:
    try:
        parse_source(text, "source")
    except FieldError as error:
        raise ValueError(error.message.removeprefix("source: ")) from None
    return text


SourceText = Annotated[str, MaxLen(MAX_SOURCE_CHARS), Checked(_check_source), SOURCE]
"""The source of a model, such as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`."""
Tier = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,31}$"), PLAIN]
LabelKey = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,63}$"), PLAIN]
LabelValue = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9._:@/+=-]{0,127}$"), PLAIN]
Owner = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9._:@/+=-]{0,127}$"), PLAIN]
MAX_LABELS = 16
VariableName = Annotated[str, Pattern(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"), PROGRAM]
VariableValue = Annotated[str, MaxLen(4096), Pattern(r"^[^\x00]*$"), PROGRAM]


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeSettings:
    """How a hibernating model is woken. `type` decides which of the other settings apply."""

    type: Literal["http", "command", "wake_on_lan"]
    """What wakes the model: an HTTP request, a program, or a Wake-on-LAN packet."""
    by: Literal["runner", "mesh"] = "runner"
    """Who runs the recipe. A sleeping host cannot wake itself: with `mesh`, the recipe is sent to the mesh and a router
    runs it."""
    url: Url | None = field(default=None, repr=False)
    """For `http`: URL of the request. Any 2xx status is a success."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """For `http`: request method."""
    headers: Annotated[Mapping[str, str], MaxLen(32), SECRET, TEMPLATE] = field(default_factory=dict, repr=False)
    """For `http`: request headers. `${WEFT_WAKE_...}` is replaced by that environment variable of the runner, except
    with `by: mesh`."""
    argv: Annotated[Arguments, MaxLen(64), SECRET] = field(default=(), repr=False)
    """For `command`: program and arguments, without a shell. Processes that it leaves running must redirect their
    output, because its standard error is closed."""
    mac_address: Annotated[str, PACKET] | None = None
    """For `wake_on_lan`: MAC address of the sleeping host's network card."""
    broadcast_address: Annotated[str, MinLen(1), PACKET] = "255.255.255.255"
    """For `wake_on_lan`: IPv4 address to which the packet is sent."""
    port: Annotated[int, Ge(1), Le(65_535)] = 9
    """For `wake_on_lan`: UDP port."""
    max_wait_seconds: Annotated[float, Ge(1), Le(3600)] = 60.0
    """Longest time from the start of the wake until the model accepts requests."""

    def __post_init__(self) -> None:
        needed = {"http": "url", "command": "argv", "wake_on_lan": "mac_address"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a wake recipe of type {self.type} needs {needed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepSettings:
    """How the runner puts an idle model to sleep."""

    after_seconds: Seconds
    """Idle time after which the model goes to sleep."""
    type: Literal["unload", "http", "command"] = "unload"
    """What puts the model to sleep: `unload` ends the engine that weft started, `http` sends a request, `command` runs
    a program."""
    url: Url | None = field(default=None, repr=False)
    """For `http`: URL of the request. Any 2xx status is a success."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    """For `http`: request method."""
    headers: Annotated[Mapping[str, str], MaxLen(32), SECRET, TEMPLATE] = field(default_factory=dict, repr=False)
    """For `http`: request headers. `${WEFT_WAKE_...}` is replaced by that environment variable of the runner."""
    argv: Annotated[Arguments, MaxLen(64), SECRET] = field(default=(), repr=False)
    """For `command`: program and arguments, without a shell."""
    max_wait_seconds: Annotated[float, Ge(1), Le(3600)] = 60.0
    """Longest duration of the action."""

    def __post_init__(self) -> None:
        needed = {"unload": "after_seconds", "http": "url", "command": "argv"}[self.type]
        if not getattr(self, needed):
            raise ValueError(f"a sleep action of type {self.type} needs {needed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """A LoRA adapter of a model; it is a separate model in the mesh."""

    name: Annotated[ModelName, PUBLIC]
    """Name of the adapter as a model, unique in the mesh."""
    pool: Annotated[ModelName, PUBLIC] | None = None
    """Pool of the adapter; models of one pool answer for each other. Default: none."""
    skills: Annotated[tuple[Skill, ...], MaxLen(8)] = ()
    """Capabilities, as of a model. Default: those of its model."""

    @property
    def digested_file(self) -> Path | None:
        """The file whose digest is in receipts; None: there is none on this machine."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Settings of a model that all runtimes have."""

    name: Annotated[ModelName, PUBLIC]
    """Name of the model, unique in the mesh."""
    enabled: Annotated[bool, PUBLIC] = True
    """Whether the model exists. If false, only the syntax of its settings is checked; `weft.local.yaml` can enable it
    on one machine."""
    pool: Annotated[ModelName, PUBLIC] | None = None
    """Pool of the model; models of one pool answer for each other."""
    tier: Annotated[Tier, PUBLIC] | None = None
    """Tier of the model in the mesh, such as `fast` or `heavy`, for people and selectors."""
    labels: Annotated[Mapping[LabelKey, LabelValue], MaxLen(MAX_LABELS), PUBLIC] = field(default_factory=dict)
    """Labels by which commands select the model, such as `team: a` for `weft get models -l team=a`."""
    owner: Annotated[Owner, PUBLIC] | None = None
    """Person or team responsible for the model."""
    journal: Annotated[JournalWord, PUBLIC] | None = None
    """Whether the model's requests are durable tasks by default. `wait`: while their callers wait; `keep`: also after a
    caller has disconnected; `none`: they are not. It applies to the model's adapters as well. Default: the tenant's
    setting, else the mesh's."""
    skills: Annotated[tuple[Skill, ...], MaxLen(8)] = ()
    """Capabilities, including `text`, such as `[text, image, tools]`. Requests that need anything else go to other
    models. Default: detected from the files and the engine; requests that need an unknown capability are tried."""
    remote: bool | None = None
    """Whether requests for the model are sent to a remote provider. Default: false, unless the runtime says
    otherwise."""
    publish: bool | None = None
    """Whether the model is published to the mesh. Default: true in `weft up` and `weft serve`, false in `weft runner
    join`."""
    keep_alive: Annotated[str, MaxLen(32), PLAIN] | float | None = None
    """How long the model stays loaded after a request: seconds, or a duration such as `5m`; -1: no limit; 0: unload
    after each request. Default: `sleep.after_seconds`; else by `category` if the model uses accelerator memory, else
    without limit."""
    category: Literal["text", "image", "vision", "audio"] | None = None
    """Category that decides how long a model in accelerator memory stays loaded: `text` and `audio` 300 s, `image` 900
    s, `vision` 60 s. Default: derived from its operations: `image` if it generates images, `audio` if it only
    transcribes or speaks, else `text`."""
    pin: bool = False
    """Whether the model stays loaded and is never evicted for another model."""
    target_inflight: Annotated[int, Ge(1), Le(1024)] | None = None
    """Target number of concurrent requests per replica. Default: `slots`."""
    slots: Annotated[int, Ge(1), Le(1024), PUBLIC] = 4
    """Maximum number of concurrent requests."""
    context_tokens: Annotated[int, Ge(16), Le(16_777_216), PUBLIC] | None = None
    """Context length of one slot, in tokens. Default: 2048 for engines that weft starts; unknown for other servers."""
    passthrough: Literal["none", "all"] = "none"
    """Which request parameters that weft does not know are sent to the engine. `none`: only those that are listed for
    its runtime; `all`: all of them."""
    thinking: bool | None = None
    """Whether the model thinks unless a request says otherwise. Default: as its chat template does. For
    `openai_remote`: sends the field `thinking` as enabled or disabled; default: the field is not sent."""
    thinking_modes: Annotated[tuple[ThinkingMode, ...], MaxLen(3)] = ()
    """Thinking modes that requests may choose. Default: detected from the chat template; if they are unknown, all modes
    are sent to the engine."""
    source_languages: Annotated[tuple[LanguageCode, ...], MaxLen(512)] = ()
    """Languages that the model translates from, such as `[nl, pt-BR]`. Default: as the engine reports them, else
    unknown."""
    target_languages: Annotated[tuple[LanguageCode, ...], MaxLen(512)] = ()
    """Languages that the model translates into. Default: as the engine reports them, else unknown."""
    platform_prompt: bool | None = None
    """Whether every chat begins with the platform prompt: the mesh, date and time, tool budget, and how to raise
    signals. It precedes the system prompts of the agent and the caller. Default: the runner's `platform_prompt`."""
    platform_context: Annotated[str, MaxLen(8192), PLAIN] | None = None
    """Text about your mesh in the platform prompt of this model. Default: the runner's `platform_context`."""
    tools: Annotated[tuple[Name, ...], MaxLen(64), TOOL] = ()
    """Tools that the runner runs for every chat with this model, from the runner's `tools`."""
    default_max_tokens: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Maximum tokens of an answer if neither the request nor its agent sets a limit; the answer then ends with
    `length`. Default: up to the context length; 512 for the demo model."""
    default_params: Annotated[Mapping[str, Any], MaxLen(64), PLAIN, PUBLIC] = field(default_factory=dict)
    """Default sampling parameters, such as `temperature: 0.2`, if neither the request nor its agent sets them. For the
    token limit, use `default_max_tokens`. Default: the engine's own."""
    repetition: Repetition = "kill"
    """What happens if an answer repeats a line or a passage over and over. `off`: nothing; `warn`: the answer gets a
    warning; `kill`: it ends with `repeated_line_loop`."""
    tool_call_repair: Annotated[bool, PUBLIC] = True
    """Whether arguments of tool calls that are no JSON object are repaired if they match the tool's schema then, and
    the model otherwise makes the call again. Streams hold back arguments of up to 2,048 characters until they are
    complete."""

    tried_by: ClassVar[str] = ""
    """Example command for a model without chat, without the model's name; empty: the model supports chat."""

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
    """How the model is woken when it hibernates."""
    sleep: SleepSettings | None = None
    """How the model is put to sleep when it is idle. Default: it never hibernates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedModelSettings(SleepingModelSettings):
    """Adds the settings of a model whose engine weft starts and stops."""

    start_asleep: bool = False
    """Whether to load the model at its first request instead of at startup."""
    replicas: Annotated[int, Ge(1), Le(64), PUBLIC] = 1
    """Number of identical engines that are loaded at startup; they share a pool with the name of the model."""
    replica_max: Annotated[int, Ge(1), Le(64)] | None = None
    """Maximum number of replicas; those beyond `replicas` start in hibernation. Default: `replicas`."""
    threads: Annotated[int, Ge(1), Le(1024), PUBLIC] | None = None
    """Processor threads of the engine. Default: number of cores minus one."""
    extra_arguments: Annotated[Arguments, PUBLIC] = ()
    """Additional command-line arguments of the engine."""
    host_memory_mb: Annotated[int, Ge(0), Le(16_777_216), PUBLIC] | None = None
    """Main memory limit per engine process, in MiB; 0: no limit. Default: twice the estimated size of the model plus 4
    GiB, at most the machine's memory less a reserve."""
    environment: Annotated[Mapping[VariableName, VariableValue], MaxLen(64), SECRET] = field(
        default_factory=dict, repr=False
    )
    """Environment variables of the engine, in addition to the runner's. `${NAME}` is replaced by that environment
    variable of the runner, so that secrets need not be in this file."""
    library_path: Annotated[tuple[PathText, ...], MaxLen(16)] = ()
    """Folders that the engine searches first for shared libraries (LD_LIBRARY_PATH)."""

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
    """Adds the source from which the files of a model are pulled."""

    source: Annotated[SourceText, PUBLIC] | None = None
    """Source from which the model is pulled at its first load, such as `hf:Qwen/Qwen3-8B-GGUF:Q4_K_M`, instead of
    `path` or `model`. See docs/models.md."""

    form: ClassVar[ModelForm]
    """The format of its files."""
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
    """Path of the GGUF file, or of the folder of a model in another format; `~` is your home folder. Required without
    `source`."""
    memory_mb: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Accelerator memory of the model, in MiB. Default: estimated from its files and learned from earlier loads."""

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
        """The file or folder, or the source for display."""
        return str(self.path) if self.path is not None else shown_url(self.source or "")

    @property
    @override
    def upstream_name(self) -> str:
        return self.path.name if self.path is not None else self.location


@dataclass(frozen=True, slots=True, kw_only=True)
class FileModelSettings(PathModelSettings):
    """Adds the settings of a model that generates text."""

    quantizations: Annotated[Mapping[Name, PathText], MaxLen(16)] = field(default_factory=dict)
    """Other quantizations of the model that `weft load -q` can select: their files or folders by name, such as `q8_0:
    ~/models/qwen-q8_0.gguf`."""
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
    """Adds the settings of a model in a GGUF file."""

    embeddings: bool = True
    """Whether the model also serves embeddings."""
    kept_prompts_mb: Annotated[int, Ge(0), Le(1_048_576)] = 1024
    """Main memory, in MiB, for prompts that have lost their slot, so that a resumed conversation is not processed
    again; 0: none. At most an eighth of the machine's memory and half of the free space of `/dev/shm`."""

    form: ClassVar[ModelForm] = ModelForm.GGUF

    @property
    @override
    def max_kept_prompt_bytes(self) -> int:
        # llama.cpp cannot save the prompts of a model with a projector.
        return 0 if self.projector_file is not None else self.kept_prompts_mb * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaModelSettings(PathModelSettings):
    """Adds the settings of a model for images or recordings whose engine is a library."""

    slots: Annotated[int, Ge(1), Le(1024), PUBLIC] = 1
    """Maximum number of concurrent requests."""


Device = Literal["cpu", "cuda", "auto"]


# Without slots, because it is mixed into settings that have them.
@dataclass(frozen=True, kw_only=True)
class DeviceSettings(PathModelSettings):
    """Adds the device on which a library computes."""

    device: Annotated[Device, Argument("--device"), PUBLIC] = "auto"
    """Device to run on; `auto` uses an accelerator if there is one."""

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
    """Adds the settings of a model in CTranslate2's format."""

    compute_type: Annotated[ComputeType, Argument("--compute-type"), PUBLIC] = "int8"
    """Data type of the weights. If the device does not support it, the nearest supported type is used."""
    sleeps_in_place: bool = False
    """Whether an idle model hibernates by unloading its weights but keeping its process, which makes the next load
    fast. Default: the process is ended. A model in accelerator memory always ends its process."""

    @override
    def weights_of(self, path: Path) -> Path:
        return path / "model.bin"


# Without slots, because it is mixed into settings that have them.
@dataclass(frozen=True, kw_only=True)
class UpstreamSettings(ModelSettings):
    """Adds the connection to a server that weft does not start. Its address and key are not sent to the mesh."""

    url: Annotated[UrlText, PUBLIC, SECRET] = field(repr=False)
    """Base URL of the server."""
    api_key_env: Annotated[str, MaxLen(128), VARIABLE, PUBLIC] | None = None
    """Environment variable that contains the API key."""
    upstream_model: Annotated[str, MaxLen(512), PLAIN, PUBLIC] | None = None
    """Name of the model on the server. Default: `name`."""
    embeddings: bool | None = None
    """Whether the model also serves embeddings."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """Operations that the server supports, such as `[chat, tokenize]`."""

    @property
    def server_model(self) -> str:
        """The server's name of the model."""
        return self.upstream_model or self.name

    @property
    @override
    def upstream_name(self) -> str:
        return self.server_model


def default_threads() -> int:
    """Returns the usable processors minus one: on all of a shared machine llama.cpp is far slower (measured)."""
    return max(1, usable_processors() - 1)


def settings_fields(settings: type[ModelSettings]) -> frozenset[str]:
    """Returns the names of these settings."""
    return frozenset(settings.__dataclass_fields__)
