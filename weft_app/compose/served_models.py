"""The models of a configuration section as a runner serves them: engine, sleep and wake."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

import runner_svc.runtimes.llama_cpp_python.parameters
import runner_svc.runtimes.llama_server.parameters
import runner_svc.runtimes.openai_http.parameters
from runner_svc.backend.port_range import EnginePorts
from runner_svc.config import ServedModel
from runner_svc.instance.settings import HibernationSettings, SleepSettings
from runner_svc.memory.estimate import (
    LLAMA_CPP_PYTHON_HABITS,
    LLAMA_SERVER_HABITS,
    EngineHabits,
    FileForecast,
    ForecastModel,
    MemoryEstimator,
    manifest_bytes_of,
    read_model_facts,
)
from runner_svc.policy.load_parameters import LoadValue
from runner_svc.policy.parameters import EngineParameters, ParameterProfile
from runner_svc.runtimes.llama_cpp_python import arguments as llama_cpp_python_arguments
from runner_svc.runtimes.llama_cpp_python.backend import HOST_COMMAND, LlamaCppPythonBackend, LlamaCppPythonConfig
from runner_svc.runtimes.llama_server import arguments as llama_server_arguments
from runner_svc.runtimes.llama_server.backend import LlamaServerBackend, LlamaServerConfig
from runner_svc.runtimes.openai_http.backend import AttachedServer, AttachedServerConfig
from runner_svc.supervise.leftovers import Leftovers
from runner_svc.supervise.process import StopGraces
from weft.kernel.errors import invalid_field
from weft.kernel.units import keep_alive_seconds
from weft.wake.recipes import (
    DEFAULT_MAX_WAIT_SECONDS,
    MAX_WAIT_SECONDS,
    CommandRecipe,
    HttpRecipe,
    Recipe,
    WakeOnLanRecipe,
    is_mac_address,
)
from weft_app.compose.chat_settings import chat_settings
from weft_app.compose.demo import default_threads, llama_command
from weft_app.compose.model_skills import skills_of
from weft_app.compose.remote_models import remote_model
from weft_app.compose.served_operations import attached_operations, require_operations_fit
from weft_app.compose.server_settings import base_url, engine_timeouts, is_http_url, is_remote_server, said_context
from weft_app.config.runner_sections import ModelSection, RunnerSection, SleepSection, WakeSection

MAX_ARGUMENT_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What the models of one runner have in common."""

    leftovers: Leftovers | None = None
    """Remembers their processes; None: nobody does."""
    ports: EnginePorts | None = None
    """Those that their engines may listen on; None: any free one."""
    estimator: MemoryEstimator = field(default_factory=MemoryEstimator)
    """Knows what loads take."""
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)
    """Where keys are."""


def served_model(
    section: RunnerSection, model: ModelSection, drain_seconds: float, parts: SharedParts | None = None
) -> ServedModel:
    """One model, which is no more than one engine: see `weft_app.config.replicas`.

    Raises INVALID_ARGUMENT naming the field for what can only be seen with its neighbours.
    """
    where = f"runners.{section.name}.models.{model.name}"
    require_operations_fit(section, model, where)
    hibernation = _hibernation(section, model, drain_seconds, where)
    by_mesh = model.wake is not None and model.wake.by == "mesh"
    recipe = None if model.wake is None else _recipe(model.wake, f"{where}.wake")
    shared = parts or SharedParts()
    if section.runtime == "openai_remote":
        served = remote_model(section, model, where, hibernation, shared.environment)
    else:
        supervised = _in_process if section.runtime == "llama_cpp_python" else _supervised
        serve = partial(supervised, parts=shared) if section.starts_engines else _attached
        served = serve(section, model, where, hibernation, recipe if by_mesh else None)
    return replace(
        served,
        chat=chat_settings(section, model),
        target_inflight=model.target_inflight,
        vision_input=_sees(model),
        skills=skills_of(section, model),
    )


def _supervised(
    section: RunnerSection,
    model: ModelSection,
    where: str,
    hibernation: HibernationSettings,
    by_mesh: Recipe | None,
    parts: SharedParts,
) -> ServedModel:
    path = _model_path(model, where)
    server = LlamaServerConfig(
        command=llama_command(section.command),
        model_path=path,
        trained_context_tokens=read_model_facts(path).context_tokens,
        ports=parts.ports,
        alias=model.name,
        slots=model.slots,
        context_tokens=model.context_tokens,
        threads=model.threads or default_threads(),
        embeddings=model.embeddings,
        chat_template_path=_template_path(model, where),
        extra_arguments=model.extra_arguments,
        load_stall_seconds=section.load_stall_seconds,
        timeouts=engine_timeouts(section),
        graces=_graces(section),
        leftovers=parts.leftovers,
        parameters=_parameters(model, runner_svc.runtimes.llama_server.parameters.PARAMETERS),
    )
    return ServedModel(
        name=model.name,
        pool=model.pool or "",
        make_backend=lambda: LlamaServerBackend(server),
        operations=server.operations,
        slots=model.slots,
        quantizations=_quantizations(model, where),
        forecast=_forecast(model, path, model.slots, parts.estimator, LLAMA_SERVER_HABITS),
        context_tokens=model.context_tokens,
        model_path=server.model_path,
        remote=model.remote,
        timeouts=server.timeouts,
        hibernation=hibernation,
        wake_by_mesh=by_mesh,
    )


def _in_process(
    section: RunnerSection,
    model: ModelSection,
    where: str,
    hibernation: HibernationSettings,
    by_mesh: Recipe | None,
    parts: SharedParts,
) -> ServedModel:
    if "slots" in model.model_fields_set and model.slots != 1:
        raise invalid_field(f"{where}.slots", "must be 1: llama-cpp-python works on one request at a time")
    path = _model_path(model, where)
    engine = LlamaCppPythonConfig(
        command=section.command or HOST_COMMAND,
        model_path=path,
        trained_context_tokens=read_model_facts(path).context_tokens,
        chat_template_path=_template_path(model, where),
        context_tokens=model.context_tokens,
        threads=model.threads or default_threads(),
        embeddings=model.embeddings,
        extra_arguments=model.extra_arguments,
        load_stall_seconds=section.load_stall_seconds,
        graces=_graces(section),
        leftovers=parts.leftovers,
        parameters=_parameters(model, runner_svc.runtimes.llama_cpp_python.parameters.PARAMETERS),
    )
    return ServedModel(
        name=model.name,
        pool=model.pool or "",
        make_backend=lambda: LlamaCppPythonBackend(engine),
        operations=engine.operations,
        slots=1,
        quantizations=_quantizations(model, where),
        forecast=_forecast(model, path, 1, parts.estimator, LLAMA_CPP_PYTHON_HABITS),
        context_tokens=model.context_tokens,
        model_path=engine.model_path,
        remote=model.remote,
        timeouts=engine_timeouts(section),
        hibernation=hibernation,
        wake_by_mesh=by_mesh,
    )


def _attached(
    section: RunnerSection, model: ModelSection, where: str, hibernation: HibernationSettings, by_mesh: Recipe | None
) -> ServedModel:
    if model.chat_template_path is not None:
        raise invalid_field(f"{where}.chat_template_path", "this server renders its own; set the template there")
    operations = attached_operations(model)
    server = AttachedServerConfig(
        url=base_url(model.url, f"{where}.url"),
        upstream_model=model.upstream_model or model.name,
        api_key_env=model.api_key_env,
        operations=operations,
        context_tokens=said_context(model),
        cache_salt=model.cache_salt,
        probe_interval_seconds=section.probe_interval_seconds,
        probe_failures=section.probe_failures,
        load_stall_seconds=section.load_stall_seconds,
        timeouts=engine_timeouts(section),
        parameters=_parameters(model, runner_svc.runtimes.openai_http.parameters.PARAMETERS),
    )
    return ServedModel(
        name=model.name,
        pool=model.pool or "",
        make_backend=lambda: AttachedServer(server),
        operations=operations,
        slots=model.slots,
        context_tokens=server.context_tokens,
        remote=is_remote_server(server.url, model, f"{where}.remote"),
        timeouts=server.timeouts,
        hibernation=hibernation,
        wake_by_mesh=by_mesh,
    )


def _hibernation(section: RunnerSection, model: ModelSection, drain_seconds: float, where: str) -> HibernationSettings:
    attached = not section.starts_engines
    if attached and model.start_asleep:
        raise invalid_field(f"{where}.start_asleep", "weft did not start this server; give it a wake recipe instead")
    wake = model.wake
    if attached and model.sleep is not None and wake is None:
        raise invalid_field(f"{where}.sleep", "nobody could wake this server again; give it a wake recipe as well")
    by_runner = wake is not None and wake.by == "runner"
    keep_alive = model.keep_alive
    # A load is given up when it stalls and not by a clock, so a wake without a recipe may take as long as that.
    limit = DEFAULT_MAX_WAIT_SECONDS if attached else min(section.load_stall_seconds, MAX_WAIT_SECONDS)
    return HibernationSettings(
        attached=attached,
        start_asleep=model.start_asleep,
        recipe=_recipe(wake, f"{where}.wake") if wake is not None and by_runner else None,
        woken_by_mesh=wake is not None and not by_runner,
        max_wait_seconds=limit if wake is None else wake.max_wait_seconds,
        sleep=None if model.sleep is None else _sleep(model.sleep, f"{where}.sleep"),
        drain_seconds=drain_seconds,
        attach_retry_seconds=section.probe_interval_seconds,
        keep_alive_seconds=None if keep_alive is None else keep_alive_seconds(keep_alive, f"{where}.keep_alive"),
        category=model.category,
        pinned=model.pin,
    )


def _sleep(section: SleepSection, where: str) -> SleepSettings:
    action: HttpRecipe | CommandRecipe | None = None
    if section.type == "http":
        action = _http_recipe(section, where)
    elif section.type == "command":
        action = _command_recipe(section, where)
    return SleepSettings(after_seconds=section.after_seconds, action=action, max_wait_seconds=section.max_wait_seconds)


def _recipe(section: WakeSection, where: str) -> Recipe:
    if section.type == "http":
        return _http_recipe(section, where)
    if section.type == "command":
        return _command_recipe(section, where)
    mac_address = section.mac_address or ""
    if not is_mac_address(mac_address):
        raise invalid_field(f"{where}.mac_address", "must be six pairs of hex digits joined by ':' or '-'")
    try:
        IPv4Address(section.broadcast_address)
    except ValueError:
        raise invalid_field(f"{where}.broadcast_address", "must be an IPv4 address") from None
    return WakeOnLanRecipe(mac_address=mac_address, broadcast_address=section.broadcast_address, port=section.port)


def _http_recipe(section: WakeSection | SleepSection, where: str) -> HttpRecipe:
    if section.url is None or not is_http_url(section.url):
        raise invalid_field(f"{where}.url", "must be an http or https URL with a host")
    return HttpRecipe(url=section.url, method=section.method, headers=dict(section.headers))


def _command_recipe(section: WakeSection | SleepSection, where: str) -> CommandRecipe:
    if not section.argv or not section.argv[0]:
        raise invalid_field(f"{where}.argv", "must begin with a program")
    if any(len(argument) > MAX_ARGUMENT_CHARS or "\0" in argument for argument in section.argv):
        raise invalid_field(f"{where}.argv", f"each must be at most {MAX_ARGUMENT_CHARS} characters, without NUL")
    return CommandRecipe(argv=section.argv)


def _model_path(model: ModelSection, where: str) -> Path:
    if model.path is None:
        raise invalid_field(f"{where}.path", "must name the model's file")
    return model.path.expanduser()


def _sees(model: ModelSection) -> bool:
    """Whether a model takes images: it says so, or its server is given the part of it that looks at them."""
    return model.category == "vision" or any(word.startswith("--mmproj") for word in model.extra_arguments)


def _quantizations(model: ModelSection, where: str) -> dict[str, Path]:
    paths = {name: path.expanduser() for name, path in model.quantizations.items()}
    for name, path in paths.items():
        if not path.is_file():
            raise invalid_field(f"{where}.quantizations.{name}", f"there is no file {path}")
    return paths


def _forecast(
    model: ModelSection, path: Path, slots: int, estimator: MemoryEstimator, habits: EngineHabits
) -> FileForecast:
    about = ForecastModel(
        name=model.name,
        path=path,
        quantizations={name: variant.expanduser() for name, variant in model.quantizations.items()},
        context_tokens=model.context_tokens,
        slots=slots,
        parameters=_configured(model, habits),
        habits=habits,
        manifest_bytes=manifest_bytes_of(model.memory_mb),
    )
    return FileForecast(about, estimator)


def _configured(model: ModelSection, habits: EngineHabits) -> dict[str, LoadValue]:
    """What the model's further flags say about memory."""
    if habits is LLAMA_CPP_PYTHON_HABITS:
        return llama_cpp_python_arguments.configured_parameters(model.extra_arguments)
    return llama_server_arguments.configured_parameters(model.extra_arguments)


def _template_path(model: ModelSection, where: str) -> Path | None:
    path = None if model.chat_template_path is None else model.chat_template_path.expanduser()
    if path is not None and not path.is_file():
        raise invalid_field(f"{where}.chat_template_path", f"there is no file {path}")
    return path


def _graces(section: RunnerSection) -> StopGraces:
    return StopGraces(
        first_term_seconds=section.first_term_seconds,
        second_term_seconds=section.second_term_seconds,
        kill_seconds=section.kill_seconds,
    )


def _parameters(model: ModelSection, engine: EngineParameters) -> ParameterProfile:
    return ParameterProfile(engine=engine, passthrough=model.passthrough == "all", thinking=model.thinking)
