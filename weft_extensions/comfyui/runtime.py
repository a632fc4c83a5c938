"""The runtime comfyui: image workflows in an external ComfyUI, or in one that weft starts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Le, MaxLen
from typing_extensions import override

from runner_svc.policy.engine_variables import DEVICE_VARIABLES, PYTORCH_VARIABLES
from runner_svc.policy.parameters import EngineParameters
from runner_svc.runtimes.placeholders import PORT, check_placeholders
from runner_svc.runtimes.runtime import ModelFault, Runtime, deferred
from runner_svc.runtimes.runtime_settings import StartedModelSettings
from weft.kernel.settings.setting_annotations import PUBLIC, SECRET, Checked, PathText, UrlText
from weft.kernel.values.reach import PROGRAM

PARAMETERS = EngineParameters(engine="ComfyUI")


MAX_COMMAND_WORDS = 256
MAX_TEMPLATE_CHARS = 4096
FOLDERS = ("input", "output", "temp")


def check_template(text: str) -> str:
    """Checks a text with placeholders. Raises ValueError naming an unknown placeholder and the known ones."""
    return check_placeholders(text, (PORT, *FOLDERS))


Template = Annotated[str, MaxLen(MAX_TEMPLATE_CHARS), Checked(check_template), PROGRAM]
"""A text with placeholders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComfyUiModel(StartedModelSettings):
    """A ComfyUI that is running at `url`, or that weft starts by `command`.

    In `command` and `extra_arguments`, `{port}` stands for the port on which it must listen, and `{input}`, `{output}`
    and `{temp}` for its private folders; weft removes their files when the request has ended.
    """

    url: Annotated[UrlText, PUBLIC, SECRET] | None = field(default=None, repr=False)
    """Address of a running ComfyUI, such as `http://127.0.0.1:8188`. Other programs may use it too; weft waits for
    their prompts and never interrupts them."""
    command: Annotated[tuple[Template, ...], MaxLen(MAX_COMMAND_WORDS), PUBLIC] = ()
    """Program and arguments with placeholders, without a shell, such as `[python, main.py, --listen, 127.0.0.1, --port,
    "{port}", --output-directory, "{output}", --input-directory, "{input}"]`. Default: `command` of the runner."""
    extra_arguments: Annotated[tuple[Template, ...], MaxLen(MAX_COMMAND_WORDS), PUBLIC] = ()
    """Additional arguments, after those of `command`."""
    working_folder: PathText | None = None
    """Working directory of the program, such as the folder of `main.py`. Default: the runner's."""
    workflow: Annotated[PathText, PUBLIC] | None = None
    """File of a workflow document (docs/media.md) that answers requests for this model. Default: the model answers only
    requests for workflows."""
    slots: Annotated[int, Ge(1), Le(64), PUBLIC] = 1
    """Maximum number of requests queued in ComfyUI, which processes one at a time."""
    memory_mb: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Accelerator memory of the model, in MiB. Default: unknown, and no memory is leased."""

    def __post_init__(self) -> None:
        if self.url is not None and self.command:
            raise ValueError(f"model {self.name} has a url and a command; leave one of them out")

    @property
    @override
    def location(self) -> str:
        """The command, or a label that hides the address."""
        return "a running ComfyUI" if self.url is not None else " ".join(self.command[:2])

    @property
    @override
    def upstream_name(self) -> str:
        return "" if self.workflow is None else self.workflow.stem


def _find_program_fault(
    model: ComfyUiModel, command: tuple[str, ...] | None, environment: Mapping[str, str]
) -> ModelFault | None:
    import shutil  # noqa: PLC0415 - only for doctor

    words = () if model.url is not None else model.command or command or ()
    if not words or shutil.which(words[0], path=environment.get("PATH")) is not None:
        return None
    return ModelFault(message=f"there is no program {words[0]}", remedy="install ComfyUI, or correct `command`")


RUNTIME = Runtime(
    name="comfyui",
    summary="image workflows in ComfyUI, running or started by weft",
    docs="docs/media.md",
    settings=ComfyUiModel,
    build=deferred("weft_extensions.comfyui.comfyui_backend:build"),
    parameters=PARAMETERS,
    variables=(*DEVICE_VARIABLES, *PYTORCH_VARIABLES, "COMFYUI_*"),
    find_program_fault=_find_program_fault,
    advice={
        "path": "the workflow says what ComfyUI loads; set workflow to the file of one",
        "source": "the workflow says what ComfyUI loads; set workflow to the file of one",
        "api_key_env": "ComfyUI has no API key; let it listen on loopback or in your own network",
    },
)
