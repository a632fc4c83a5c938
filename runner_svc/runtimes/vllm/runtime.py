"""The runtime vllm: `vllm serve`, one process group per model, started and ended by weft."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

import msgspec
from annotated_types import Ge, Gt, Le, MaxLen
from typing_extensions import override

from runner_svc.environments.environment import FOLDER, EngineEnvironment, EnvironmentVariant, Variant
from runner_svc.policy.engine_choice import WeightFormat
from runner_svc.policy.engine_variables import DEVICE_VARIABLES, PYTORCH_VARIABLES
from runner_svc.policy.memory_estimate import EngineHabits
from runner_svc.policy.model_sizing import EngineLocations
from runner_svc.policy.parameters import (
    MAX_INT,
    MAX_TEMPLATE_ARGUMENT_CHARS,
    TEMPLATE_ARGUMENTS,
    Document,
    EngineParameters,
    Flag,
    Grammar,
    Number,
    StructuredOutputs,
    Texts,
    TokenIds,
)
from runner_svc.policy.repository_files import ModelForm
from runner_svc.runtimes.runtime import Runtime, deferred
from runner_svc.runtimes.runtime_settings import (
    MAX_ADAPTERS,
    NOT_PULLED,
    AdapterSettings,
    Argument,
    SourcedModelSettings,
)
from weft.kernel.models.model_source import shown_url
from weft.kernel.requests.request_values import Skill
from weft.kernel.settings.setting_annotations import PUBLIC, PathText, Pattern
from weft.kernel.text.decoding import DECODE_FAULTS
from weft.kernel.values.reach import PLAIN, SOURCE

ENVIRONMENT = EngineEnvironment(
    folder=FOLDER / "vllm",
    summary="vLLM 0.32.0",
    variants={
        Variant.CPU: EnvironmentVariant(
            locks=("cpu-torch.lock", "cpu.lock"),
            installed_bytes=3_300_000_000,
            download_bytes=900_000_000,
            # The program looks up its version under this name, but the build for processors has another.
            stubs=("vllm==0.32.0+cpu",),
        ),
        Variant.CUDA: EnvironmentVariant(
            locks=("cuda.lock",), installed_bytes=8_500_000_000, download_bytes=3_960_000_000
        ),
    },
    check="from vllm.entrypoints.cli import main",
)


PARAMETERS = EngineParameters(
    engine="vLLM",
    # Names and meanings are from vLLM's chat and completion protocols; missing bounds are weft's.
    allowed={
        "allowed_token_ids": TokenIds(1024),
        "bad_words": Texts(64, 256),
        TEMPLATE_ARGUMENTS: Document(MAX_TEMPLATE_ARGUMENT_CHARS),
        "grammar": Grammar(),
        "ignore_eos": Flag(),
        "include_stop_str_in_output": Flag(),
        "length_penalty": Number(-10, 10),
        "min_tokens": Number(0, MAX_INT, whole=True),
        "repetition_penalty": Number(0.01, 2),
        "skip_special_tokens": Flag(),
        "spaces_between_special_tokens": Flag(),
        "stop_token_ids": TokenIds(64),
        "structured_outputs": StructuredOutputs(),
        "truncate_prompt_tokens": Number(-1, MAX_INT, whole=True),
    },
    renamed={"repeat_penalty": "repetition_penalty"},
    members={"grammar": "structured_outputs"},
    thinks_by_template=True,
)


ModelId = Annotated[str, MaxLen(1024), Pattern(r"^[^-\s\x00][^\x00]*$"), SOURCE]
"""A model folder, or a hub id."""
Word = Annotated[str, Pattern(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"), PLAIN]
"""A word from vLLM's lists, which differ by version."""
Dtype = Literal["auto", "bfloat16", "float", "float16", "float32", "half"]
Modality = Literal["image", "video", "audio"]
ADAPTER_CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 1024 * 1024
ADAPTER_WEIGHTS = "adapter_model.safetensors"


class _AdapterConfig(msgspec.Struct):
    r: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmAdapter(AdapterSettings):
    """An adapter of a vLLM model: a separate model, which shares that model's engine."""

    path: Annotated[ModelId, PUBLIC]
    """A folder with `adapter_config.json` and `adapter_model.safetensors`, as PEFT writes it, or an id of the hub."""

    @property
    def folder(self) -> Path | None:
        """Absolute path of the folder; None: it is not on this machine, or only in the hub's cache."""
        path = Path(self.path).expanduser()
        return path if path.is_dir() else None

    @property
    @override
    def digested_file(self) -> Path | None:
        folder = self.folder
        return None if folder is None else folder / ADAPTER_WEIGHTS

    @property
    def rank(self) -> int:
        """Rank in the adapter's configuration; 0: unknown."""
        if self.folder is None:
            return 0
        try:
            with (self.folder / ADAPTER_CONFIG).open("rb") as file:
                return max(0, msgspec.json.decode(file.read(MAX_CONFIG_BYTES), type=_AdapterConfig).r)
        except (OSError, *DECODE_FAULTS):
            return 0


def local_or_id(path: str) -> str:
    """Returns the absolute path of a folder, or a hub id unchanged."""
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else path


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmModel(SourcedModelSettings):
    """A model with its own `vllm serve`.

    `context_tokens` is vLLM's `max_model_len`, and `slots` its `max_num_seqs`: set few for one user, since vLLM
    reserves memory for CUDA graphs by their number.
    """

    model: Annotated[ModelId, PUBLIC] | None = None
    """Folder with safetensors and `config.json`, or a Hugging Face model id, which vLLM itself downloads into the hub's
    cache. `~` is your home folder. Required without `source`."""
    kind: Annotated[Literal["generation", "embedding", "reranking"], PUBLIC] = "generation"
    """Kind of model; each kind serves only its own operations."""
    memory_mb: Annotated[int, Ge(1), Le(16_777_216), PUBLIC] | None = None
    """Accelerator memory of the model on all devices together, in MiB. Set it if you set `gpu_memory_utilization`.
    Default: estimated from its files (weights, cache, activations) and learned from earlier loads."""
    dtype: Annotated[Dtype, Argument("--dtype")] = "auto"
    """Data type of weights and activations."""
    kv_cache_memory_bytes: Annotated[int, Ge(1), Le(2**44), PUBLIC] | None = None
    """Size of the KV cache on each device, in bytes. Default: room for `slots` requests with full context, if the
    model's files show its size; with `gpu_memory_utilization`, the rest of that share."""
    kv_cache_dtype: Annotated[Word, Argument("--kv-cache-dtype")] | None = None
    """Data type of the KV cache, such as `fp8`. Default: that of the model."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1), PUBLIC] | None = None
    """Share of each device's memory that vLLM may use in total. Default: none; the cache size decides, so that vLLM
    does not reserve all free memory."""
    prefix_caching: Annotated[bool, PUBLIC] | None = None
    """Whether prefix caching is on. Default: vLLM decides; on for most models."""
    kept_prompts_mb: Annotated[int, Ge(0), Le(16_777_216)] = 0
    """Main memory, in MiB for all devices, to which vLLM copies cached prompts, which return to a device when they are
    needed again; 0: none. They are lost when the engine ends. Other backends: `extra_arguments` such as
    `[--kv-offloading-backend, lmcache]`."""
    kv_events: bool | None = None
    """Whether vLLM reports which prefixes it has cached, instead of the router estimating it. Needs
    `pipx inject weft pyzmq` and vLLM 0.32. Default: yes with `weft runtime install vllm`, no with `command`."""
    limit_mm_per_prompt: Annotated[Mapping[Modality, Annotated[int, Ge(0), Le(999)]], MaxLen(3)] = field(
        default_factory=dict
    )
    """Maximum number of images, videos and audio clips per request, such as `{image: 1}`."""
    mm_processor_kwargs: Annotated[Mapping[Word, int | float | bool | str], MaxLen(32), PLAIN] = field(
        default_factory=dict
    )
    """Arguments of the model's image processor, such as `{max_pixels: 4014080}`."""
    tensor_parallel: Annotated[int, Ge(1), Le(64), PUBLIC] | None = None
    """Number of devices over which each layer is split. Default: all devices of the model's lease."""
    pipeline_parallel: Annotated[int, Ge(1), Le(64), Argument("--pipeline-parallel-size"), PUBLIC] | None = None
    """Number of device groups, each with a part of the layers."""
    speculative_config: Annotated[Mapping[Word, int | float | bool | str], MaxLen(32), SOURCE] = field(
        default_factory=dict
    )
    """Speculative decoding (`--speculative-config`), such as `{method: mtp, model: org/assistant,
    num_speculative_tokens: 8}`."""
    chat_template_path: PathText | None = None
    """A chat template (Jinja) to use instead of the model's own."""
    tool_call_parser: Annotated[Word, PUBLIC] | None = None
    """Parser of tool calls in the model's text, such as `hermes`. Default: none, and the model cannot call tools."""
    adapters: Annotated[tuple[VllmAdapter, ...], MaxLen(MAX_ADAPTERS)] = ()
    """LoRA adapters of the model, each a separate model with its own name. They share the process, slots and memory of
    this model, and are loaded and unloaded with it."""
    sleep_level: Annotated[int, Ge(1), Le(2)] | None = None
    """How an idle model on accelerators hibernates while its process stays: with its weights in main memory (1), or
    without them (2). Default: the process is ended, as `weft unload` and hosts without accelerators always do."""
    start_timeout_seconds: Annotated[float, Ge(1), Le(86_400)] | None = None
    """Longest startup. Default: no limit while it makes progress (`load_stall_seconds`)."""

    form: ClassVar[ModelForm] = ModelForm.FOLDER
    files_setting: ClassVar[str] = "model"

    @property
    @override
    def served_adapters(self) -> tuple[AdapterSettings, ...]:
        return self.adapters

    @property
    @override
    def max_kept_prompt_bytes(self) -> int:
        return 0 if self.kind != "generation" or self.prefix_caching is False else self.kept_prompts_mb * 1024 * 1024

    @property
    def folder(self) -> Path | None:
        """Absolute path of the model's folder; None: it is not on this machine, or only in the hub's cache."""
        path = self.file
        return path if path.is_dir() else None

    @property
    @override
    def file(self) -> Path:
        """Path of the folder; the hub id if there is no folder, NOT_PULLED before the source was pulled."""
        return NOT_PULLED if self.model is None else Path(self.model).expanduser()

    @override
    def pulled(self, path: Path, projector: Path | None) -> Self:
        del projector
        return replace(self, model=str(path), source=None)

    @property
    @override
    def chat_template_file(self) -> Path | None:
        """Absolute path of the chat template."""
        return None if self.chat_template_path is None else self.chat_template_path.expanduser()

    @property
    @override
    def location(self) -> str:
        """The folder or hub id, or the source for display."""
        return self.model or shown_url(self.source or "")

    @property
    @override
    def upstream_name(self) -> str:
        """Name of the folder, or the hub id, or the source."""
        return self.location if self.folder is None else self.folder.name


PROGRAM = "vllm"
_SKILLS = {"image": Skill.IMAGE, "audio": Skill.AUDIO}


RUNTIME = Runtime(
    name="vllm",
    other_names=("vllm_serve",),
    summary="vLLM's server, which weft starts",
    docs="docs/engines.md",
    settings=VllmModel,
    build=deferred("runner_svc.runtimes.vllm.model:build"),
    formats=frozenset({WeightFormat.SAFETENSORS}),
    locations=EngineLocations(in_layers=False),
    parameters=PARAMETERS,
    variables=(*DEVICE_VARIABLES, *PYTORCH_VARIABLES, "VLLM_*", "RAY_*", "UCX_*", "LMCACHE_*"),
    habits=EngineHabits(),
    load_values=deferred("runner_svc.runtimes.vllm.arguments:configured_parameters"),
    environment=ENVIRONMENT,
    advice={
        "path": "a folder or an id of the hub is `model`",
        "url": "a running vLLM is a model of a runner with `runtime: openai_http`",
        "operations": "`kind` says what vLLM is started for",
        "embeddings": "`kind: embedding`",
        "cache_salt": "it is always sent",
    },
)
