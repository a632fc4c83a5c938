"""`weft runner join`: an ordinary runner on a private socket, reached by the mesh over one outbound link."""

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import runner_svc.runner_service
from runner_svc.dial_out import DialOut, DialOutConfig, LinkEvent, LinkState
from runner_svc.model_store.peers import ModelPeers
from runner_svc.runner_settings import RunnerSettings
from runner_svc.runtimes.table import ATTACHED_RUNTIME
from weft.api.registry.v1.runner_pb2 import LeftOut
from weft.documents.left_out import left_out_items
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.file_replacement import lock_file
from weft.kernel.machine.memory_tuning import settle_memory
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.time.clock import SystemClock
from weft_app.compose.added_models import HubAdder
from weft_app.compose.demo import configured_runners
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import WeftHome, is_socket_address
from weft_app.compose.invitation import Invitation
from weft_app.compose.join_address import FindAddresses, JoinDialer
from weft_app.compose.machine_credential import credential_in
from weft_app.compose.process_service import ProcessService
from weft_app.compose.runner import pick_runner, runner_config
from weft_app.compose.shutdown import CriticalTasks, stop_requested, until
from weft_app.config.config import CONFIG_NAME, WeftConfig
from weft_app.config.document import Document
from weft_app.config.loader import load_config

SOCKET_NAME = "runner.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlan:
    """A runner and the mesh to join."""

    runner: RunnerSettings
    published: tuple[str, ...]
    mesh: Invitation
    accepts_models: bool = False
    """Whether the mesh may add models of the hub to the runner."""
    find: FindAddresses | None = None
    """Returns the announced addresses of the relay if none of the known ones works; None: not searched for."""

    @property
    def shown_address(self) -> str:
        """The addresses as text for messages."""
        return " or ".join(address.target for address in self.mesh.addresses)


def config_with_server(
    path: Path | None,
    *,
    runner: str,
    url: str,
    model: str | None = None,
    below: Callable[[Document], Document] | None = None,
    **details: str | bool | None,
) -> WeftConfig:
    """Returns the configuration with an OpenAI-compatible server of the command line as its only runner.

    `model`: None publishes every model that the server lists, under its own name. `details` are further settings.
    Raises INVALID_ARGUMENT naming the field.
    """
    if model is None and details.get("upstream_model") is not None:
        raise invalid_field("--upstream-model", "needs --model: the name of that model in the mesh")
    given = {"url": url, **{name: value for name, value in details.items() if value is not None}}
    section: dict[str, Any] = {"name": runner, "runtime": ATTACHED_RUNTIME}
    section |= given if model is None else {"models": [{"name": model, "publish": True, **given}]}
    return load_config(path, {"runners": [section]}, below)


def pick_published(
    config: WeftConfig, runner: str | None, opted_in: Collection[str]
) -> tuple[RunnerSettings, list[str]]:
    """Returns the runner to join and its published models: those with `publish: true` or in `opted_in`.

    Raises INVALID_ARGUMENT, with the remedy, if none is published.
    """
    section = pick_runner(configured_runners(config), runner)
    names = {model.name for model in section.models}
    if unknown := sorted(set(opted_in) - names):
        raise invalid_field("--publish", f"{section.name} has no model {unknown[0]}; it has {', '.join(sorted(names))}")
    published = [model.name for model in section.models if model.publish is True or model.name in opted_in]
    if not published and not section.follows_server:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"no model of {section.name} is published; set `publish: true` of a model in {CONFIG_NAME}, "
            f"or add --publish {section.models[0].name}",
        )
    return section, published


async def join(plan: JoinPlan, config: WeftConfig, home: WeftHome, report: Callable[[LinkEvent], None]) -> None:
    """Joins until a signal arrives, then drains. Raises errors that a retry cannot fix, such as UNAUTHENTICATED."""
    stop = stop_requested()
    with private_folder(home, plan.runner.name) as folder:
        host = GrpcHost()
        address = host.bind(f"unix:{folder / SOCKET_NAME}")
        settings = runner_config(
            plan.runner,
            home,
            address=address,
            registry_address=address,
            published=plan.published,
            drain_seconds=config.drain_seconds,
            accelerators=config.accelerators,
            model_store=config.model_store,
            disabled=config.extensions.disabled,
            peers=ModelPeers(plan.runner.name, address, ChannelSecurity(), relay=address),
        )
        joined = replace(
            settings,
            # Its socket is private: the relay announces its own address instead.
            address="",
            conceals_local_addresses=True,
            is_joined=True,
            adder=HubAdder(settings.adder) if plan.accepts_models and settings.adder is not None else None,
            server_adder=None,
        )
        runner = runner_svc.runner_service.build(joined)
        dialer = JoinDialer(plan.mesh.addresses, plan.mesh.trust, plan.find)
        link = DialOutConfig(
            target=plan.shown_address,
            open_channel=dialer.open,
            token=plan.mesh.token,
            local_address=address,
            machine=credential_in(home, plan.mesh.addresses, plan.mesh.trust),
            accepts_models=plan.accepts_models,
        )

        def note_left_out(items: Sequence[LeftOut]) -> None:
            # Models that a server lists get other names.
            own = [each for each in items if each.name in plan.published]
            report(LinkEvent(state=LinkState.LEFT_OUT, detail=left_out_items(own)))

        runner.on_left_out = note_left_out

        def note_link() -> None:
            dialer.note_linked()
            runner.reopen_session()

        dial_out = DialOut(
            link,
            report,
            carried=lambda: runner.carried,
            note_fresh_link=note_link,
            note_mesh_time=runner.note_mesh_time,
        )

        async def refused() -> None:
            raise await dial_out.given_up()

        with CriticalTasks(stop):
            try:
                monitor = HealthMonitor(runner.health_checks, SystemClock())
                process = ProcessService(monitor)
                await host.start([dial_out, runner, process], monitor)
                settle_memory()
                await until(stop, refused())
            finally:
                await host.stop(config.drain_seconds)


@contextmanager
def private_folder(home: WeftHome, runner: str) -> Iterator[Path]:
    """Yields a private folder for the runner's socket. Raises ALREADY_EXISTS if the runner has already joined."""
    folder = home.run / f"join-{runner}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    with (folder / "join.lock").open("w") as lock:
        try:
            lock_file(lock)
        except OSError as error:
            raise WeftError(Reason.ALREADY_EXISTS, f"the runner {runner} of {home.root} is joined already") from error
        if is_socket_address(folder / SOCKET_NAME):
            yield folder
            return
        with tempfile.TemporaryDirectory(prefix="weft-join-") as elsewhere:
            yield Path(elsewhere)
