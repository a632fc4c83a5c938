"""From the configuration file to the services' own configurations: the one place that knows both."""

import socket
from dataclasses import replace

from gateway.config import GatewayConfig
from registry_svc.config import RegistryConfig
from router_svc.config import RouterConfig
from router_svc.policy.scheduler import SchedulerLimits
from runner_svc.backends.llama_server import LlamaServerBackend, LlamaServerConfig
from runner_svc.backends.openai_http import HttpTimeouts
from runner_svc.config import RunnerConfig, ServedModel
from runner_svc.policy.restart import RestartLimits
from runner_svc.supervise.process import StopGraces
from weft.host.config import ModelSection, RunnerSection, WeftConfig
from weft.host.demo import default_threads, demo_runner, llama_command
from weft.host.home import WeftHome
from weft.kernel.errors import invalid_field
from weft.kernel.request import Operation


def configured_runners(config: WeftConfig) -> tuple[RunnerSection, ...]:
    """The runners of the file, or the one with the demo model. Raises INVALID_ARGUMENT for a missing model file."""
    if config.runners is None:
        return (demo_runner(),)
    for runner in config.runners:
        for model in runner.models:
            if not model.path.expanduser().is_file():
                raise invalid_field(f"runners.{runner.name}.models.{model.name}.path", f"there is no file {model.path}")
    return config.runners


def registry_config(config: WeftConfig, home: WeftHome) -> RegistryConfig:
    """The registry on its database under the home."""
    section = config.registry
    return RegistryConfig(
        database_url=section.database_url or f"sqlite+aiosqlite:///{home.state / 'registry.db'}",
        heartbeat_interval_seconds=section.heartbeat_interval_seconds,
        report_interval_seconds=section.report_interval_seconds,
        inactive_after_seconds=section.inactive_after_seconds,
        delete_after_seconds=section.delete_after_seconds,
        restart_grace_seconds=section.restart_grace_seconds,
    )


def router_config(config: WeftConfig, registry_address: str) -> RouterConfig:
    """The router that reads the registry at an address."""
    section = config.router
    return RouterConfig(
        registry_address=registry_address,
        ticket_lifetime_seconds=section.ticket_lifetime_seconds,
        default_timeout_seconds=config.gateway.request_timeout_seconds,
        limits=SchedulerLimits(
            queue_depth_per_runner=section.queue_depth_per_runner,
            queue_timeout_seconds=section.queue_timeout_seconds,
            max_attempts=section.max_attempts,
        ),
    )


def gateway_config(config: WeftConfig) -> GatewayConfig:
    """The HTTP edge."""
    section = config.gateway
    return GatewayConfig(
        host=config.host,
        port=config.port,
        max_body_bytes=section.max_body_bytes,
        request_timeout_seconds=section.request_timeout_seconds,
        sse_keepalive_seconds=section.sse_keepalive_seconds,
        headers_within_seconds=section.headers_within_seconds,
        write_timeout_seconds=section.write_timeout_seconds,
    )


def runner_config(section: RunnerSection, home: WeftHome, *, listen: str, registry_address: str) -> RunnerConfig:
    """A runner that listens at `listen`; see `at_address` for a port the system chose."""
    return RunnerConfig(
        name=section.name,
        runtime=section.runtime,
        host=socket.gethostname(),
        listen_address=listen,
        advertised_address=listen,
        registry_address=registry_address,
        session_file=home.state / "runners" / f"{section.name}.session",
        models=tuple(_served(section, model) for model in section.models),
        restart=RestartLimits(
            max_deaths=section.max_deaths,
            window_seconds=section.death_window_seconds,
            first_pause_seconds=section.first_pause_seconds,
            max_pause_seconds=section.max_pause_seconds,
        ),
    )


def at_address(config: RunnerConfig, advertised_address: str) -> RunnerConfig:
    """The same runner, telling others to find it at this address."""
    return replace(config, advertised_address=advertised_address)


def _served(section: RunnerSection, model: ModelSection) -> ServedModel:
    server = LlamaServerConfig(
        command=llama_command(section.command),
        model_path=model.path.expanduser(),
        alias=model.name,
        slots=model.slots,
        context_tokens=model.context_tokens,
        threads=model.threads or default_threads(),
        embeddings=model.embeddings,
        extra_arguments=model.extra_arguments,
        load_stall_seconds=section.load_stall_seconds,
        timeouts=HttpTimeouts(
            connect_seconds=section.connect_timeout_seconds,
            headers_seconds=section.headers_timeout_seconds,
            idle_stream_seconds=section.idle_stream_timeout_seconds,
        ),
        graces=StopGraces(
            first_term_seconds=section.first_term_seconds,
            second_term_seconds=section.second_term_seconds,
            kill_seconds=section.kill_seconds,
        ),
    )
    operations = {Operation.CHAT, Operation.COMPLETION} | ({Operation.EMBEDDING} if model.embeddings else set())
    return ServedModel(
        name=model.name,
        pool=model.pool or "",
        make_backend=lambda: LlamaServerBackend(server),
        operations=frozenset(operations),
        slots=model.slots,
        context_tokens=model.context_tokens,
        model_path=server.model_path,
    )
