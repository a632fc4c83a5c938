"""The context in which a runtime builds a model's engine, the result, and helpers for models in files."""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from runner_svc.backend.engine_process import EnginePorts
from runner_svc.backend.port import Backend
from runner_svc.environments.folder import EnvironmentFolder
from runner_svc.memory.estimate import (
    FileForecast,
    ForecastModel,
    MemoryEstimator,
    ModelFacts,
    ModelFiles,
    manifest_bytes_of,
    read_model_facts,
)
from runner_svc.memory.port import MemoryForecast
from runner_svc.model_files.gguf import MAX_TEXT_BYTES
from runner_svc.model_files.tokenizer_folder import read_tokenizer_folder
from runner_svc.openai_upstream.server_probes import ServerProbes
from runner_svc.policy.engine_variables import passed_variables
from runner_svc.policy.memory_estimate import EngineHabits, ModelShape
from runner_svc.policy.parameters import EngineParameters, ParameterProfile
from runner_svc.policy.template_capabilities import capabilities_of_templates
from runner_svc.policy.timeouts import StopGraces, TimeoutProfile
from runner_svc.runtimes.runtime_settings import (
    FileModelSettings,
    HostedModelSettings,
    ModelSettings,
    PathModelSettings,
    StartedModelSettings,
    UpstreamSettings,
)
from runner_svc.supervise.leftovers import Leftovers
from weft.api.registry.v1 import model_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import LoadValue
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import TEXT_OPERATIONS, Operation, Skill
from weft.kernel.values.names import is_token

Files = TypeVar("Files", bound=PathModelSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """The context of one model: what all models of the runner share, and its place in the configuration."""

    where: str
    """Path in the configuration, such as "runners.box.models.qwen"; errors start with it."""
    command: tuple[str, ...] | None = None
    """The engine's program and first arguments; None: the runtime's default."""
    ports: EnginePorts | None = None
    """Ports for engines, shared with the runner's other engines; None: any free port."""
    load_stall_seconds: float = 300.0
    """Time without output, load progress and CPU time after which a load is aborted."""
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    graces: StopGraces = field(default_factory=StopGraces)
    leftovers: Leftovers | None = None
    """Record of engine processes for the runner's next start; None: not recorded."""
    probe_interval_seconds: float = 5.0
    """Probe interval for external servers."""
    probe_failures: int = 3
    """Number of consecutive failed probes after which an external server counts as gone."""
    probes: ServerProbes = field(default_factory=ServerProbes, repr=False)
    """Probes of external servers, shared by their models."""
    estimator: MemoryEstimator = field(default_factory=MemoryEstimator)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    """Environment variables with API keys, and for starting engines."""
    environments: EnvironmentFolder = field(default_factory=EnvironmentFolder)
    disabled: Collection[str] = ()
    """Extensions that are disabled."""
    trained_context_tokens: int = 0
    """Trained context from the model's file, the maximum for a load; 0: unknown."""
    shape: ModelShape | None = None
    """Dimensions from the model's file; None: unknown."""
    templates: tuple[str, ...] = ()
    """Chat templates of the model from its file or settings; empty: unknown."""
    model_file: model_pb2.ModelFile = field(default_factory=model_pb2.ModelFile)
    """Metadata of the model's files; empty: unknown."""

    lacks: list[WeftError] = field(default_factory=list)
    """What the model needs but this machine lacks, such as a file: its loads fail with the first one, while the
    runner's other models are served."""

    def refuse(self, setting: str, message: str) -> FieldError:
        """Returns an INVALID_ARGUMENT error for a setting of this model."""
        return invalid_field(f"{self.where}.{setting}", message)

    def lack(self, setting: str, message: str) -> None:
        """Records something named by a setting that this machine lacks."""
        self.lacks.append(WeftError(Reason.CONNECT_FAILED, f"{self.where}.{setting}: {message}"))

    def require_file(self, setting: str, file: Path | None) -> None:
        """Records a missing file named by a setting."""
        if file is not None and not file.is_file():
            self.lack(setting, f"there is no file {file}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEngine:
    """The engine of a configured model, and what is known about it before it loads."""

    make_backend: Callable[[], Backend]
    operations: frozenset[Operation] = TEXT_OPERATIONS
    slots: int
    """Number of concurrent requests."""
    context_tokens: int = 0
    """Context of one slot; 0: unknown."""
    model_path: Path | None = None
    """The file whose digest is in receipts."""
    quantizations: Mapping[str, Path] = field(default_factory=dict)
    """Alternative files of the model by quantization."""
    forecast: MemoryForecast = field(default_factory=MemoryForecast)
    remote: bool = False
    """Whether serving it sends data to a remote provider."""
    list_price: Callable[[], model_pb2.ModelPrice | None] | None = field(default=None, repr=False)
    """Returns what its provider charges, None if unknown; called in another thread. None: it has no provider."""
    timeouts: TimeoutProfile = field(default_factory=TimeoutProfile)
    capabilities: Capabilities = UNKNOWN
    """The model's capabilities according to its files."""
    model_file: model_pb2.ModelFile = field(default_factory=model_pb2.ModelFile)
    """Metadata of its files; empty: unknown. Read-only."""
    unload_keeps_process: bool = False
    """Whether an unload keeps the process of an engine that can sleep, like an idle timeout."""
    requests_fail_alone: bool = False
    """Whether a request that cannot reach the server does not imply that the server is gone."""


def model_file_of(facts: ModelFacts) -> model_pb2.ModelFile:
    """Returns the metadata of a model's files without values that cannot be published."""
    if facts.file_kind is None:
        return model_pb2.ModelFile()
    architecture = facts.architecture if is_token(facts.architecture, MAX_ARCHITECTURE_CHARS) else ""
    return model_pb2.ModelFile(
        format=facts.file_kind.value,
        architecture=architecture,
        parameter_count=facts.parameter_count,
        quantization=facts.quantization,
        size_bytes=facts.file_bytes,
    )


def known_templates(model: HostedModelSettings, facts: ModelFacts) -> tuple[str, ...]:
    """Returns the chat templates of a model before it is loaded: the configured one, or those in its files."""
    template = model.chat_template_file
    return _templates_of(model.file, facts) if template is None else _template_in(template)


def _templates_of(path: Path, facts: ModelFacts) -> tuple[str, ...]:
    """Returns the templates in a model's file or folder; empty if unreadable, which the load reports."""
    if not path.is_dir():
        return facts.templates
    try:
        found = read_tokenizer_folder(path)
    except (OSError, WeftError):
        return ()
    usual = () if found.chat_template is None else (found.chat_template,)
    return (*usual, *found.named_templates.values())


def _template_in(file: Path) -> tuple[str, ...]:
    """Returns the template in a file; empty if unreadable, which the load reports."""
    try:
        with file.open("rb") as opened:
            return (opened.read(MAX_TEXT_BYTES).decode(),)
    except (OSError, UnicodeDecodeError):
        return ()


MAX_ARCHITECTURE_CHARS = 64
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
LIBRARY_PATH = "LD_LIBRARY_PATH"


def engine_environment(model: StartedModelSettings, context: ModelContext, listed: Sequence[str]) -> Mapping[str, str]:
    """Returns the environment of a model's engine: the runner's `listed` variables and the model's own.

    Records a missing variable of the runner by its setting, never a value. Raises INVALID_ARGUMENT for a library folder
    that does not exist.
    """

    def value_of(found: re.Match[str]) -> str:
        if found[1] not in context.environment:
            context.lack("environment", f"the variable {found[1]} is not set where the runner runs")
        return context.environment.get(found[1], "")

    own = {name: _VARIABLE.sub(value_of, value) for name, value in model.environment.items()}
    environment = {**passed_variables(context.environment, listed), **own}
    folders = [folder.expanduser() for folder in model.library_path]
    for index, folder in enumerate(folders):
        if not folder.is_dir() or os.pathsep in str(folder):
            message = f"must be a folder that exists, without {os.pathsep!r} in its name: {folder}"
            raise context.refuse(f"library_path[{index}]", message)
    if folders:
        usual = [environment[LIBRARY_PATH]] if environment.get(LIBRARY_PATH) else []
        environment[LIBRARY_PATH] = os.pathsep.join([*map(str, folders), *usual])
    return environment


def text_capabilities(templates: Sequence[str]) -> Capabilities:
    """Returns the capabilities of a model with these templates in a text-only engine."""
    only_text = Capabilities(skills=frozenset({Skill.TEXT}), lacking=frozenset({Skill.IMAGE, Skill.AUDIO}))
    return only_text.completed_by(capabilities_of_templates(templates))


def forecast_model(
    model: PathModelSettings, habits: EngineHabits, load_values: Mapping[str, LoadValue] = MappingProxyType({})
) -> ForecastModel:
    """Returns what determines the memory of a model in files. `load_values`: configured load parameters."""
    files, quantizations = ModelFiles(path=model.weights_of(model.file)), {}
    if isinstance(model, FileModelSettings):
        files = replace(files, projector=model.projector_file, draft=model.draft_file, adapters=model.adapter_files)
        quantizations = {name: model.weights_of(path.expanduser()) for name, path in model.quantizations.items()}
    return ForecastModel(
        name=model.name,
        files=files,
        quantizations=quantizations,
        context_tokens=model.slot_context_tokens,
        slots=model.slots,
        parameters=load_values,
        habits=habits,
        manifest_bytes=manifest_bytes_of(model.memory_mb),
    )


def file_engine(
    model: Files,
    context: ModelContext,
    make_backend: Callable[[Files, ModelContext], Backend],
    forecast: FileForecast,
    *,
    operations: frozenset[Operation],
    capabilities: Callable[[Sequence[str]], Capabilities] = text_capabilities,
) -> ModelEngine:
    """Returns the engine of a model in files. `capabilities`: derives capabilities from chat templates."""
    context.require_file("chat_template_path", model.chat_template_file)
    facts = read_model_facts(model.file)
    found = replace(
        context,
        trained_context_tokens=facts.context_tokens,
        shape=facts.shape,
        templates=known_templates(model, facts),
        model_file=model_file_of(facts),
    )
    quantizations: dict[str, Path] = {}
    if isinstance(model, FileModelSettings):
        quantizations = {name: path.expanduser() for name, path in model.quantizations.items()}
    for name, path in quantizations.items():
        context.require_file(f"quantizations.{name}", model.weights_of(path))
    weights = model.weights_of(model.file)
    return ModelEngine(
        make_backend=lambda: make_backend(model, found),
        slots=model.slots,
        context_tokens=model.slot_context_tokens if isinstance(model, FileModelSettings) else 0,
        model_path=None if weights.is_dir() else weights,
        quantizations=quantizations,
        forecast=forecast,
        remote=bool(model.remote),
        timeouts=context.timeouts,
        operations=operations,
        capabilities=capabilities(found.templates),
        model_file=found.model_file,
    )


def parameter_profile(model: ModelSettings, engine: EngineParameters) -> ParameterProfile:
    """Returns how request parameters are passed to a model's engine."""
    return ParameterProfile(engine=engine, passthrough=model.passthrough == "all", thinking=model.thinking)


def served_operations(
    server: UpstreamSettings, default: frozenset[Operation], context: ModelContext
) -> frozenset[Operation]:
    """Returns the configured operations of an external server.

    Raises INVALID_ARGUMENT if `operations` and `embeddings` contradict each other.
    """
    if not server.operations:
        return default
    if server.embeddings not in (None, "embedding" in server.operations):
        raise context.refuse("embeddings", "must say the same as operations; leave it out")
    return frozenset(Operation[word.upper()] for word in server.operations)
