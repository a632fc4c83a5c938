"""A runner's reports about itself: to the registry with every heartbeat, to people through Describe."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from google.protobuf.timestamp_pb2 import Timestamp

from runner_svc.added_models import shown
from runner_svc.instance.instance import Instance
from runner_svc.instance.instance_settings import HibernationSettings, ServedAdapter, ServedModel
from runner_svc.instance.load_messages import options_message
from runner_svc.memory.port import leased_bytes
from runner_svc.policy.lifecycle import MAX_HOW_CHARS
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.policy.timeouts import TimeoutProfile
from runner_svc.redaction import redact_local_addresses
from runner_svc.request_records import RequestRecord
from runner_svc.runner_config import RunnerConfig
from runner_svc.runtimes.table import ATTACHED_RUNTIME
from runner_svc.session.clock_offset import ClockOffset
from weft import __version__
from weft.api.registry.v1 import agent_pb2, model_pb2, runner_pb2, wake_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.documents.left_out import bounded
from weft.kernel.requests.capabilities import capabilities_message
from weft.kernel.time.timestamps import duration_of, optional_duration, optional_stamp
from weft.kernel.values.names import is_token
from weft.wake.recipes import MAX_WAIT_SECONDS, set_defaults

MAX_QUANTIZATION_CHARS = 64
"""Maximum length of a reported quantization."""
RESIDENT_STEP_BYTES = 8 * MEBIBYTE
MAX_REPORTED_TOOLS = 1_024
"""Maximum number of reported tools, by name; requests for others are not deliberately routed here."""


class RunnerReport:
    """Builds report messages from the live instances."""

    def __init__(
        self,
        config: RunnerConfig,
        incarnation: str,
        instances: Sequence[Instance],
        cache_figures: Callable[[str], runner_service_pb2.CacheFigures | None] = lambda _: None,
        tool_names: Callable[[], Sequence[str]] = lambda: (),
        clock_offset: ClockOffset | None = None,
        servers: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        """`cache_figures`: figures of a model's prefix cache by model; None: unknown.

        `tool_names`: the tools that can currently be called. `servers`: attached servers.
        """
        self._tool_names = tool_names
        self._servers = servers
        self._config = config
        self._cache_figures = cache_figures
        self.state_kind: Callable[[str], str] = lambda _: ""
        """Kind of the states that a model's engine can restore; see ModelCache.kind."""
        self.followed_servers: Callable[[], Sequence[runner_pb2.FollowedServer]] = list
        """Servers whose listed models it serves."""
        self.left_out: Callable[[], Sequence[runner_pb2.LeftOut]] = list
        """What the runner has and does not serve."""
        self.host_use: Callable[[], runner_pb2.HostUse | None] = lambda: None
        """Use of its host; None: unknown."""
        self._incarnation = incarnation
        self._instances = instances
        self.models = list(config.models)
        self.published_agents: Sequence[agent_pb2.AgentManifest] = config.agents
        self.clock_offset = clock_offset
        """Clock offset, kept current by the session; None: not reported."""
        self.draining = False

    def capability(self) -> runner_pb2.Capability:
        """The runner's current capability: instances, slots, tools, clock offset."""
        offset = self.clock_offset
        return runner_pb2.Capability(
            clock_offset=duration_of(offset.seconds) if offset is not None and offset.is_notable else None,
            clock_refused=offset is not None and offset.is_refused,
            instances=[self._state(instance, name) for instance in self._instances for name in instance.names],
            draining=self.draining,
            max_requests=self._config.max_requests or 0,
            worker_hosts=self._config.worker_hosts,
            adds_models=self._config.adder is not None,
            attaches_servers=self._config.server_adder is not None,
            attached_servers=self._servers(),
            followed_servers=self.followed_servers(),
            tool_names=self._tool_names()[:MAX_REPORTED_TOOLS],
            host_use=self.host_use(),
            labels=self._config.labels,
            left_out=bounded(self.left_out()),
        )

    def runner(self) -> runner_pb2.Runner:
        """The runner's registration."""
        return runner_pb2.Runner(
            name=self._config.name,
            incarnation=self._incarnation,
            address=self._config.address,
            host=self._config.host,
            runtime=self._config.runtime,
            version=__version__,
            capability=self.capability(),
        )

    def manifests(self) -> list[model_pb2.ModelManifest]:
        """The manifests of the published models."""
        memory_wait_seconds = 0.0 if self._config.observer is None else self._config.memory_wait_seconds
        prices = {instance.model: instance.price for instance in self._instances}
        digests = {
            name: instance.digest if name == instance.model else instance.adapter_digests.get(name, "")
            for instance in self._instances
            for name in instance.names
        }
        return [
            _manifest(model, model.adapter(name), memory_wait_seconds, digests, prices.get(model.name))
            for model in self.models
            for name in model.names
        ]

    def agents(self) -> list[agent_pb2.AgentManifest]:
        """The manifests of the published agents."""
        return list(self.published_agents)

    def redact(self, text: str) -> str:
        """Redacts text of or about an engine for leaving the runner."""
        return redact_local_addresses(text) if self._config.conceals_local_addresses else text

    def describe(self, log_line_count: int) -> runner_service_pb2.DescribeResponse:
        """Returns the description with the last `log_line_count` lines of each backend."""
        return runner_service_pb2.DescribeResponse(
            runner=self.runner(),
            instances=[
                instance_description(instance, log_line_count, self.redact, self._cache_figures(name), name)
                for instance in self._instances
                for name in instance.names
            ],
        )

    def _state(self, instance: Instance, name: str) -> runner_pb2.InstanceState:
        """Returns the state of a model or an adapter; an adapter's memory is counted with its model's."""
        is_adapter, reports, cache = name != instance.model, instance.backend.prefix_reports, self._cache_figures(name)
        return runner_pb2.InstanceState(
            model=name,
            base_model=instance.model if is_adapter else "",
            phase=instance.phase.value,  # type: ignore[arg-type]  # same numbers
            slots_total=instance.slots.total,
            slots_used=len(instance.slots.holders),
            load_progress=instance.load_progress,
            context_tokens=instance.loader.context_tokens,
            detail=self.redact(instance.detail),
            memory=None if is_adapter else _memory(instance),
            unload_time=optional_stamp(instance.unload_at),
            pinned=instance.memory.pinned,
            load_eta=optional_duration(instance.load_eta_seconds),
            usual_load=optional_duration(instance.loader.usual_seconds),
            fault_count=instance.restart_log.total,
            last_fault=self._last_fault(instance),
            engine_load=instance.backend.engine_load,
            abilities=capabilities_message(instance.capabilities_of(name)),
            added_source="" if instance.config.added is None else instance.config.added.source,
            model_file=None if is_adapter else _model_file(instance),
            runtime=self._own_runtime(instance.config),
            keep_alive=optional_duration(instance.keep_alive_seconds),
            tokens_per_second=None if is_adapter else instance.records.tokens_per_second,
            reports_prefixes=not is_adapter and reports is not None and reports.is_live,
            stores_prompts=not is_adapter and cache is not None and cache.stored_prompt_count > 0,
            state_kind="" if is_adapter else self.state_kind(name),
            listed=bool(instance.config.server) and not is_adapter,
        )

    def _own_runtime(self, model: ServedModel) -> str:
        """Returns the model's runtime if it differs from the runner's, otherwise an empty text."""
        runtime = model.added.runtime if model.added is not None else ATTACHED_RUNTIME if model.server else ""
        return "" if runtime == self._config.runtime else runtime

    def _last_fault(self, instance: Instance) -> runner_pb2.InstanceFault | None:
        """Returns the last fault; None: there was none."""
        if not instance.restart_log.all:
            return None
        last = instance.restart_log.all[-1]
        detail = self.redact(last.detail[:MAX_HOW_CHARS])
        return runner_pb2.InstanceFault(reason=last.reason, detail=detail)


def _model_file(instance: Instance) -> model_pb2.ModelFile | None:
    """Returns what the files of the current or next load say about themselves; None: unknown."""
    known, quantization = instance.config.model_file, instance.loader.plan.quantization
    if not known.ByteSize():
        return None
    if not quantization:
        return known
    # The file of another quantization is not read for this.
    return model_pb2.ModelFile(
        format=known.format,
        architecture=known.architecture,
        parameter_count=known.parameter_count,
        quantization=quantization if is_token(quantization, MAX_QUANTIZATION_CHARS) else "",
    )


def _memory(instance: Instance) -> runner_pb2.InstanceMemory | None:
    memory, resident = instance.memory, instance.backend.resident_bytes()
    grant, expected = memory.grant, memory.expected
    if grant is None and expected is None and resident is None:
        return None
    return runner_pb2.InstanceMemory(
        leased_bytes=0 if grant is None else leased_bytes(grant),
        measured_bytes=memory.seen_bytes,
        estimated_bytes=0 if expected is None else expected.bytes,
        estimate_source="" if expected is None else expected.source.value,
        device_indexes=[] if grant is None else [share.device_index for share in grant.shares],
        # Rounded, so that the report does not change with each page.
        resident_bytes=None if resident is None else round(resident / RESIDENT_STEP_BYTES) * RESIDENT_STEP_BYTES,
    )


def _manifest(
    model: ServedModel,
    adapter: ServedAdapter | None,
    memory_wait_seconds: float,
    digests: Mapping[str, str],
    price: model_pb2.ModelPrice | None,
) -> model_pb2.ModelManifest:
    operations = model.operations if adapter is None else model.adapter_operations
    skills = model.skills if adapter is None else adapter.skills or model.skills
    manifest = model_pb2.ModelManifest(
        name=model.name if adapter is None else adapter.name,
        pool_name=model.pool if adapter is None else adapter.pool,
        operations=[operation.value for operation in sorted(operations)],  # type: ignore[misc]  # same numbers
        context_tokens=model.context_tokens,
        remote=model.remote,
        skills=[skill.value for skill in sorted(skills)],  # type: ignore[misc]  # same numbers
        tags=model.tags if model.tags.ByteSize() else None,
        upstream=model.upstream_name,
        digest=digests.get(model.name if adapter is None else adapter.name, ""),
        price=price,
        journal=model.journal.value,  # type: ignore[arg-type]  # same numbers
    )
    hibernation = model.hibernation
    if hibernation.can_wake or model.wake_by_mesh is not None:
        # The manifest says whether the runner can wake the model, but not how.
        plan = wake_pb2.Wake(by_runner=hibernation.can_wake, by_mesh=model.wake_by_mesh)
        plan.max_wait.FromNanoseconds(int(_longest_wake_seconds(hibernation, memory_wait_seconds) * 1e9))
        set_defaults(plan)
        manifest.wake.CopyFrom(plan)
    return manifest


def _longest_wake_seconds(hibernation: HibernationSettings, memory_wait_seconds: float) -> float:
    """Returns how many seconds routers wait for a model to wake: the limit of its wake recipe, if it has one.

    Without a recipe, routers wait longer than the runner waits for memory, so that callers get the runner's own error.
    """
    if hibernation.attached or hibernation.recipe is not None:
        return hibernation.max_wait_seconds
    return min(hibernation.max_wait_seconds + memory_wait_seconds, MAX_WAIT_SECONDS)


MIN_CRASH_LINES = 20
"""Number of lines of the last crash that are included even if no log lines were requested."""

Redact = Callable[[str], str]
"""Redacts text of or about an engine for leaving the runner."""


def instance_description(
    instance: Instance, log_line_count: int, redact: Redact, cache: pb.CacheFigures | None = None, name: str = ""
) -> pb.InstanceDescription:
    """Describes an instance, with the last `log_line_count` lines of its log and of its last crash.

    `name`: an adapter, whose description omits the log lines because they are its model's; empty: the model.
    """
    is_adapter = name not in ("", instance.model)
    if is_adapter:
        log_line_count = 0
    crash_lines = instance.restart_log.crash_lines[-max(log_line_count, MIN_CRASH_LINES) :]
    return pb.InstanceDescription(
        model=name or instance.model,
        process_id=instance.backend.process_id or 0,
        restart_count=instance.restart_count,
        last_restart_reason=redact(instance.restart_log.last_detail),
        log_lines=map(redact, instance.backend.log_lines(log_line_count) if log_line_count else ()),
        active_request_ids=instance.slots.holders,
        restarts=[_redacted(restart, redact) for restart in instance.restart_log.all],
        requests=map(request_record_message, instance.records.all),
        last_crash_lines=map(redact, crash_lines),
        last_ready_time=optional_stamp(instance.restart_log.last_ready_at),
        containment=instance.backend.containment,
        timeouts=_timeouts(instance.config.timeouts),
        load_parameters=instance.backend.load_parameters,
        quantizations=sorted(instance.config.quantizations),
        load_options=options_message(instance.plan, instance.idle_timer.load_seconds, pin=instance.memory.pinned),
        cache_isolation=instance.backend.cache_isolation.value,  # type: ignore[arg-type]  # same numbers
        cache=cache,
        vision_input=instance.config.takes_images(instance.capabilities_of(name)),
        model_path="" if instance.model_path is None else str(instance.model_path),
        added=None if instance.config.added is None else shown(instance.config.added),
    )


def request_record_message(record: RequestRecord) -> pb.RequestRecord:
    """Describes a request without its output."""

    def at(seconds: float | None) -> Timestamp | None:
        return (
            None if seconds is None else optional_stamp(record.started_at + timedelta(seconds=seconds - record.started))
        )

    return pb.RequestRecord(
        request_id=record.request_id,
        model=record.model,
        state=record.state.value,  # type: ignore[arg-type]  # same numbers
        reason=record.reason.value,  # type: ignore[arg-type]  # same numbers
        start_time=at(record.started),
        first_content_time=at(record.first_content),
        last_progress_time=at(record.last_progress),
        end_time=at(record.ended),
        output_chars=record.output_chars,
        output_tokens=record.output_tokens,
        tokens_per_second=record.tokens_per_second,
        tool_iterations_left=record.tool_iterations_left,
        signals=record.signals,
    )


def _redacted(restart: pb.Restart, redact: Redact) -> pb.Restart:
    message = pb.Restart()
    message.CopyFrom(restart)
    message.detail = redact(restart.detail)
    return message


def _timeouts(profile: TimeoutProfile) -> pb.TimeoutProfile:
    return pb.TimeoutProfile(
        connect=optional_duration(profile.connect_seconds),
        headers=optional_duration(profile.headers_seconds),
        first_token=optional_duration(profile.first_token_seconds),
        prefill_liveness=optional_duration(profile.prefill_liveness_seconds),
        idle_stream=optional_duration(profile.idle_stream_seconds),
        absolute=optional_duration(profile.absolute_seconds),
        probe_interval=optional_duration(profile.probe_interval_seconds),
    )
