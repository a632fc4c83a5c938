"""The runtime server: any OpenAI-compatible server program, one process per model, started and ended by weft."""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, MaxLen, MinLen
from typing_extensions import override

from runner_svc.policy.engine_variables import DEVICE_VARIABLES, PYTORCH_VARIABLES
from runner_svc.runtimes.placeholders import PORT, check_placeholders, placeholders_of
from runner_svc.runtimes.runtime import ModelFault, Runtime, deferred
from runner_svc.runtimes.runtime_settings import StartedModelSettings, VariableName
from runner_svc.runtimes.server.parameters import PARAMETERS
from runner_svc.runtimes.server.presets import OTHER_PROGRAM, PRESETS, PresetName, ServerPreset
from weft.kernel.requests.request_values import Operation, OperationName
from weft.kernel.settings.setting_annotations import PUBLIC, Checked, PathText, Pattern, Seconds
from weft.kernel.values.reach import PLAIN, PROGRAM

MAX_TEMPLATE_CHARS = 4096
MAX_COMMAND_WORDS = 256
PLACEHOLDERS = (PORT, "model", "name", "context", "slots")
KEY = "key"


def check_template(text: str) -> str:
    """Checks a text with placeholders. Raises ValueError naming an unknown placeholder and the known ones."""
    if KEY in placeholders_of((text,)):
        raise ValueError(
            "must not contain {key}: every user of the machine can read the arguments of a program; name the "
            "environment variable of the key in key_variable"
        )
    return check_placeholders(text, PLACEHOLDERS)


Template = Annotated[str, MaxLen(MAX_TEMPLATE_CHARS), Checked(check_template), PROGRAM]
"""A text with placeholders."""


def _require_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is not a valid regular expression: {error}") from None
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySettings:
    """How weft detects that a server is ready: by the response of a route, or by a line of its output."""

    path: Annotated[str, MaxLen(512), Pattern("^/"), PLAIN] | None = None
    """Route that is requested with GET, such as `/health`."""
    status: Annotated[int, Ge(100), Le(599)] = 200
    """HTTP status of the route when the server is ready."""
    line: Annotated[str, MinLen(1), MaxLen(512), Checked(_require_expression), PLAIN] | None = None
    """Regular expression that matches a line of the server's output, such as `Application startup complete`."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.line is None):
            raise ValueError("needs either path or line")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerModel(StartedModelSettings):
    """A model of an OpenAI-compatible server program that weft starts.

    In `command`, `extra_arguments` and the values of `environment`, `{port}` stands for the port on which it must
    listen, `{model}` for `model`, `{name}` for its name in requests, `{context}` for `context_tokens` and `{slots}` for
    `slots`.
    """

    preset: Annotated[PresetName, PUBLIC] | None = None
    """Preset for a known program: sglang, tgi, lmdeploy, tabbyapi, mlx_lm or ollama. It sets the defaults of the
    settings below and the program's capabilities; see docs/engines.md. Default: none, and `command` is required."""
    command: Annotated[tuple[Template, ...], MaxLen(MAX_COMMAND_WORDS), PUBLIC] = ()
    """Program and arguments with placeholders, without a shell. Default: `command` of the runner, else that of the
    preset."""
    extra_arguments: Annotated[tuple[Template, ...], MaxLen(MAX_COMMAND_WORDS), PUBLIC] = ()
    """Additional arguments, after those of `command`."""
    model: Annotated[str, MaxLen(2048), PROGRAM, PUBLIC] = ""
    """Model that the program loads: a folder, a file or a hub name, as the program accepts it; `~` is your home
    folder."""
    upstream_model: Annotated[str, MaxLen(512), PLAIN, PUBLIC] | None = None
    """Name of the model in requests to the program. Default: that of the preset, else `name`."""
    ready: ReadySettings | None = None
    """How weft detects that the program is ready. Default: that of the preset, else `GET /health` returns 200."""
    start_timeout_seconds: Seconds = 1800.0
    """Longest startup, even if the program makes progress. `load_stall_seconds` limits the time without progress."""
    key_variable: Annotated[VariableName, PLAIN] | None = None
    """Environment variable from which the program reads the API key that it requires; weft creates a new key for each
    start. Without a key, any user of the machine can send it requests. Default: that of the preset."""
    external_listener: bool = False
    """Whether the listening process is not a descendant of the command, as with `docker run`. weft then checks that the
    port is free before the start, but not which process listens on it."""
    working_folder: PathText | None = None
    """Working directory of the program. Default: the runner's."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """Operations that the program supports with this model, such as `[embedding]`. Default: those of the preset, else
    `[chat, completion]`."""
    cache_salt: bool | None = None
    """Whether the program supports `cache_salt`, as vLLM does, so that tenants share no cached prefixes. Default: that
    of the preset, else false."""
    kv_events: bool | None = None
    """Whether the program reports which prefixes it has cached, instead of the router estimating it: weft adds SGLang's
    `--kv-events-config` to its arguments. Needs `pipx inject weft pyzmq`. Default: that of the preset; no with
    a `command`."""
    sleeps_in_place: bool = False
    """Whether an idle model hibernates by calling the preset's route that frees accelerator memory, but keeps its
    process; waking is faster than a start. A custom `command` needs the program's arguments for it, such as
    `--enable-memory-saver` for SGLang. Default: the process is ended, as `weft unload` always does."""
    memory_mb: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Accelerator memory of the model, in MiB. Default: unknown, and no memory is leased."""

    @property
    def weights(self) -> str:
        """What the program loads; `~` is expanded."""
        return str(Path(self.model).expanduser()) if self.model.startswith("~") else self.model

    @property
    def location(self) -> str:
        """What the program loads."""
        return self.model

    @property
    @override
    def upstream_name(self) -> str:
        """Name of the folder or file, or the program's name of the model."""
        path = Path(self.weights)
        return path.name if path.is_absolute() else self.model or self.upstream_model or ""


MODULE_SECONDS = 10.0
"""Timeout for checking whether an interpreter has a module."""
_HAS_MODULE = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


def preset_of(model: ServerModel) -> ServerPreset:
    """Returns the preset of a model, or the assumptions about an unknown program."""
    return OTHER_PROGRAM if model.preset is None else PRESETS[model.preset]


def command_of(model: ServerModel, runner_command: tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the command line of a model's program with its placeholders; empty: none is configured."""
    preset, own = preset_of(model), model.command or runner_command
    for_sleep = preset.sleep_arguments if model.sleeps_in_place and not own else ()
    command = own or preset.command
    return (*command, *for_sleep, *model.extra_arguments) if command else ()


def find_program(command: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Returns the path of the program that a command line starts; None: it does not exist."""
    return shutil.which(command[0], path=environment.get("PATH"))


def lacks_module(path: str, command: Sequence[str]) -> str:
    """Returns the module of a `python3 -m NAME` command line that its interpreter lacks; empty: not missing.

    An interpreter that does not respond in time counts as having it.
    """
    if list(command[1:2]) != ["-m"] or len(command) < 3:
        return ""
    module = command[2].partition(".")[0]
    try:
        found = subprocess.run(  # noqa: S603 - the program that the configuration starts
            [path, "-c", _HAS_MODULE, module], capture_output=True, timeout=MODULE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return module if found.returncode == 1 else ""


def _find_program_fault(
    model: ServerModel, command: tuple[str, ...] | None, environment: Mapping[str, str]
) -> ModelFault | None:

    words, preset = command_of(model, command), preset_of(model)
    if not words:
        return ModelFault(message="it has no command and no preset", remedy="set command or preset")
    remedy = preset.install or "install it, or correct `command`"
    path = find_program(words, environment)
    if path is None:
        return ModelFault(message=f"there is no program {words[0]}", remedy=remedy)
    if module := lacks_module(path, words):
        return ModelFault(message=f"{path} has no module {module}", remedy=remedy)
    return None


RUNTIME = Runtime(
    name="server",
    summary="any OpenAI-compatible server program, which weft starts: SGLang, TGI, LMDeploy, TabbyAPI, mlx-lm, Ollama",
    docs="docs/engines.md",
    settings=ServerModel,
    build=deferred("runner_svc.runtimes.server.server_backend:build"),
    parameters=PARAMETERS,
    variables=(
        *DEVICE_VARIABLES,
        *PYTORCH_VARIABLES,
        *("SGL*", "LMDEPLOY_*", "TABBY_*", "EXLLAMA*", "MLX_*", "OLLAMA_*", "GGML_*"),
        *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "CONTAINER_HOST"),
    ),
    find_program_fault=_find_program_fault,
    advice={
        "path": "this runtime starts a program, not a file: set model, and command or preset",
        "url": "is for programs that weft starts; for a running server, use a runner with `runtime: openai_http`",
        "api_key_env": "weft makes a key for each start: set key_variable to the variable that the program reads",
    },
)
