"""The settings of a model of a server program that weft starts in `weft.yaml`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le, MaxLen, MinLen
from typing_extensions import override

from runner_svc.runtimes.server.placeholders import check_placeholders
from runner_svc.runtimes.server.presets import PresetName
from runner_svc.runtimes.settings import StartedModelSettings, VariableName
from weft.kernel.request import Operation, OperationName
from weft.kernel.settings import PUBLIC, Checked, PathText, Pattern, Seconds

MAX_TEMPLATE_CHARS = 4096
MAX_COMMAND_WORDS = 256
Template = Annotated[str, MaxLen(MAX_TEMPLATE_CHARS), Checked(check_placeholders)]
"""A text with placeholders."""


def _require_expression(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadySettings:
    """What shows that a server takes requests: the answer of a route, or a line of its output."""

    path: Annotated[str, MaxLen(512), Pattern("^/")] | None = None
    """Route that is asked with GET, such as `/health`."""
    status: Annotated[int, Ge(100), Le(599)] = 200
    """Status of its answer once the server takes requests."""
    line: Annotated[str, MinLen(1), MaxLen(512), Checked(_require_expression)] | None = None
    """Regular expression that is found in a line of its output, such as `Application startup complete`."""

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
    """The program, where weft knows it: sglang, tgi, lmdeploy, tabbyapi, mlx_lm or ollama. It gives the defaults of the
    settings below, and what the program can do, see docs/engines.md. Default: another program, of which `command` must
    be set."""
    command: Annotated[tuple[Template, ...], MaxLen(MAX_COMMAND_WORDS), PUBLIC] = ()
    """The program and its arguments, with placeholders; there is no shell. Default: `command` of the runner, else that
    of the preset."""
    extra_arguments: Annotated[tuple[Template, ...], MaxLen(MAX_COMMAND_WORDS), PUBLIC] = ()
    """Further arguments, after those of `command`."""
    model: Annotated[str, MaxLen(2048), PUBLIC] = ""
    """What the program is to load: a folder, a file or a name at a hub, as it takes them; `~` is your home folder."""
    upstream_model: Annotated[str, MaxLen(512), PUBLIC] | None = None
    """The program's own name of the model in requests. Default: that of the preset, else `name`."""
    ready: ReadySettings | None = None
    """What shows that it takes requests. Default: that of the preset, else `GET /health` is answered with 200."""
    start_timeout_seconds: Seconds = 1800.0
    """Longest start, however busy the program is; `load_stall_seconds` bounds the time without a sign of work."""
    key_variable: VariableName | None = None
    """Environment variable from which the program takes the key that it demands; weft makes a new key for each start.
    Default: that of the preset. Without one any user of the machine can send it requests."""
    external_listener: bool = False
    """Whether a process that the command did not start listens on the port, as with `docker run`. weft then checks that
    the port is free before the start, but not which process listens on it."""
    working_folder: PathText | None = None
    """Folder in which the program is started. Default: the runner's."""
    operations: Annotated[tuple[OperationName, ...], MaxLen(len(Operation)), PUBLIC] = ()
    """What it offers with this model, such as `[embedding]`. Default: that of the preset, else `[chat, completion]`."""
    cache_salt: bool | None = None
    """Whether the program knows `cache_salt`, as vLLM does, with which tenants share no cached prefixes. Default: as
    the preset says, else no."""
    sleeps_in_place: bool = False
    """Whether it hibernates, when idle, by the route of its preset that frees the memory of accelerators, in its
    process, which wakes faster than it starts. Default: its process is ended. A `command` of your own needs the
    arguments that the program demands for it, such as `--enable-memory-saver` of SGLang."""
    unload_keeps_process: bool = False
    """Whether an explicit unload, such as `weft unload`, lets it sleep in its process too. Default: it ends the
    process. Needs `sleeps_in_place`."""
    memory_mb: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Accelerator memory that it takes, in MiB. Default: unknown, and no memory is leased for it."""

    @property
    def weights(self) -> str:
        """What the program is to load; a path of the home folder is whole."""
        return str(Path(self.model).expanduser()) if self.model.startswith("~") else self.model

    @property
    def location(self) -> str:
        """What the program is to load."""
        return self.model

    @property
    @override
    def upstream_name(self) -> str:
        """The name of the folder or file, or the program's own name of the model."""
        path = Path(self.weights)
        return path.name if path.is_absolute() else self.model or self.upstream_model or ""
