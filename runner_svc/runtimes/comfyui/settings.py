"""The settings of a ComfyUI in `weft.yaml`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le, MaxLen
from typing_extensions import override

from runner_svc.runtimes.comfyui.placeholders import check_placeholders
from runner_svc.runtimes.settings import StartedModelSettings
from weft.kernel.settings import PUBLIC, SECRET, Checked, PathText, Seconds

MAX_COMMAND_WORDS = 256
MAX_TEMPLATE_CHARS = 4096
Template = Annotated[str, MaxLen(MAX_TEMPLATE_CHARS), Checked(check_placeholders)]
"""A text with placeholders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComfyUiModel(StartedModelSettings):
    """A ComfyUI that runs already at `url`, or that weft starts by `command`.

    In `command` and `extra_arguments`, `{port}` stands for the port on which it must listen, and `{input}`, `{output}`
    and `{temp}` for folders of its own, whose files weft removes when their request has ended.
    """

    url: Annotated[str, MaxLen(2048), PUBLIC, SECRET] | None = field(default=None, repr=False)
    """Address of a ComfyUI that runs already, such as `http://127.0.0.1:8188`. Other programs may use it too: their
    prompts are waited for, and never interrupted."""
    command: Annotated[tuple[Template, ...], MaxLen(MAX_COMMAND_WORDS), PUBLIC] = ()
    """The program and its arguments, with placeholders; there is no shell. Such as `[python, main.py, --listen,
    127.0.0.1, --port, "{port}", --output-directory, "{output}", --input-directory, "{input}"]`. Default: `command` of
    the runner."""
    extra_arguments: Annotated[tuple[Template, ...], MaxLen(MAX_COMMAND_WORDS), PUBLIC] = ()
    """Further arguments, after those of `command`."""
    working_folder: PathText | None = None
    """Folder in which the program is started, such as that of `main.py`. Default: the runner's."""
    workflow: Annotated[PathText, PUBLIC] | None = None
    """File of a workflow document (docs/media.md) that answers requests for this model by its own name. Default: the
    model answers only requests for workflows."""
    remote: bool | None = None
    """Whether serving it sends bytes off the premises. It must be set where the address is not one of a network of your
    own."""
    category: Literal["text", "image", "vision"] = "image"
    """What it is for: image models that hold accelerator memory are kept for 900 s after a request."""
    slots: Annotated[int, Ge(1), Le(64), PUBLIC] = 1
    """Requests that are queued in it at once; ComfyUI works on one at a time."""
    memory_mb: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Accelerator memory that it takes, in MiB. Default: unknown, and no memory is leased for it."""
    start_timeout_seconds: Seconds = 600.0
    """Longest start, however busy the program is; `load_stall_seconds` bounds the time without a sign of work."""
    unload_keeps_process: bool = False
    """Whether an explicit unload, such as `weft unload`, frees the memory of a ComfyUI that weft started and keeps its
    process. Default: it ends the process. A ComfyUI at `url` always keeps running."""
    queue_poll_seconds: Annotated[float, Ge(0.02), Le(60)] = 1.0
    """Interval in which its queue is looked at while a request waits or runs."""
    reconnect_seconds: Annotated[float, Ge(0), Le(600)] = 20.0
    """How long a ComfyUI that does not answer is tried again in the middle of a request."""
    silent_node_seconds: Annotated[float, Ge(1), Le(86_400)] = 600.0
    """How long one node may run without a sign of progress, such as one that loads a model, before its request counts
    as stalled (`prefill_liveness_seconds`, `idle_stream_seconds`)."""
    unload_wait_seconds: Annotated[float, Ge(0), Le(600)] = 30.0
    """How long an unload waits until ComfyUI shows its accelerator memory as free."""
    max_image_mb: Annotated[int, Ge(1), Le(1024)] = 48
    """Maximum size of one image that is made, in MiB; a message of the mesh has at most 64 MiB."""
    max_message_mb: Annotated[int, Ge(1), Le(1024)] = 16
    """Maximum size of one message of its websocket, previews included, in MiB."""
    max_images: Annotated[int, Ge(1), Le(256)] = 16
    """Maximum number of images that one run of a workflow may answer with."""

    def __post_init__(self) -> None:
        if self.url is not None and self.command:
            raise ValueError(f"model {self.name} has a url and a command; leave one of them out")

    @property
    @override
    def location(self) -> str:
        """Whose ComfyUI it is: its address is not shown."""
        return "a ComfyUI that runs already" if self.url is not None else " ".join(self.command[:2])

    @property
    @override
    def upstream_name(self) -> str:
        return "" if self.workflow is None else self.workflow.stem
