"""How a runner is set up and run. The only module that imports it: a runner host needs no web stack and no database."""

import socket

import runner_svc.service
from runner_svc.backends.llama_server import LlamaServerBackend, LlamaServerConfig
from runner_svc.backends.openai_http import HttpTimeouts
from runner_svc.config import RunnerConfig, ServedModel
from runner_svc.policy.restart import RestartLimits
from runner_svc.supervise.process import StopGraces
from weft.host.config import ModelSection, RunnerSection, WeftConfig
from weft.host.demo import configured_runners, default_threads, llama_command
from weft.host.grpc_host import GrpcHost
from weft.host.home import WeftHome
from weft.host.serving import Announce, registry_address, serve_until_stopped
from weft.kernel.errors import invalid_field


def runner_config(section: RunnerSection, home: WeftHome, *, address: str, registry_address: str) -> RunnerConfig:
    """A runner that others find at `address`, a gRPC target."""
    return RunnerConfig(
        name=section.name,
        runtime=section.runtime,
        host=socket.gethostname(),
        address=address,
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


async def serve_runner(
    config: WeftConfig, home: WeftHome, listen: str | None, announce: Announce, *, name: str | None
) -> None:
    """A runner until a signal comes; with its backends gone when this returns."""
    section = _pick_runner(configured_runners(config), name)
    host = GrpcHost()
    address = host.bind(listen or home.address(f"runner-{section.name}"))
    built = runner_config(section, home, address=address, registry_address=registry_address(config, home))
    service = runner_svc.service.build(built)
    await serve_until_stopped(host, service, config, lambda: announce(address))


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
    return ServedModel(
        name=model.name,
        pool=model.pool or "",
        make_backend=lambda: LlamaServerBackend(server),
        operations=server.operations,
        slots=model.slots,
        context_tokens=model.context_tokens,
        model_path=server.model_path,
    )


def _pick_runner(runners: tuple[RunnerSection, ...], name: str | None) -> RunnerSection:
    names = ", ".join(runner.name for runner in runners)
    if name is None and len(runners) == 1:
        return runners[0]
    found = next((runner for runner in runners if runner.name == name), None)
    if found is None:
        raise invalid_field("--runner", f"must be one of: {names}")
    return found
