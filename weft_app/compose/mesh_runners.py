"""The runner processes of `weft up`, and the reload of their models."""

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from runner_svc.runner_settings import RunnerSettings
from weft.api.operations.v1 import configuration_service_pb2 as pb
from weft.api.operations.v1 import configuration_service_pb2_grpc
from weft.kernel.channels.rpc import error_from_call, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.time.clock import Clock
from weft.kernel.values.names import CENTRAL_RUNNER
from weft_app.compose.home import MAX_SOCKET_PATH_BYTES, WeftHome
from weft_app.compose.runner_processes import RunnerChild

RELOAD_SECONDS = 60.0
"""Timeout for a runner to serve changed models; then it is restarted."""


class MeshRunners:
    """The runner processes of a mesh by name, including that of central models."""

    def __init__(
        self,
        home: WeftHome,
        config_file: Path,
        clock: Clock,
        notify: Callable[[str], None],
        *,
        is_discovered: bool = False,
    ) -> None:
        """`config_file` is read by the runners. `notify` gets a message when a process exits unexpectedly.

        `is_discovered`: serve the discovered runners if the file has none.
        """
        self._is_discovered = is_discovered
        self._home = home
        self._config_file = config_file
        self._clock = clock
        self._notify = notify
        self._children: dict[str, RunnerChild] = {}
        self.registry_address = ""
        """gRPC target of the registry once it serves."""

    @property
    def pids(self) -> dict[str, int | None]:
        """Process ids by runner; None: it is being restarted."""
        return {name: child.pid for name, child in self._children.items()}

    async def start(self, runner: RunnerSettings) -> None:
        """Starts the process of a runner and keeps it running."""
        arguments = ["serve", "runner", "--runner", runner.name]
        if self._is_discovered:
            arguments.append("--discovered")
        elif not runner.models:
            arguments.append("--no-demo")
        if runner.http_port is not None:
            arguments += ["--http-port", str(runner.http_port)]
        await self._start(runner.name, arguments)

    async def start_central(self) -> None:
        """Starts the process of the central models."""
        await self._start(CENTRAL_RUNNER, ["serve", "central"])

    async def stop(self, name: str, grace_seconds: float) -> None:
        """Drains and ends the process of a runner. Does nothing if it is unknown."""
        child = self._children.pop(name, None)
        if child is not None:
            await child.stop(grace_seconds)

    async def stop_all(self, grace_seconds: float) -> None:
        """Drains and ends all processes."""
        await asyncio.gather(*(child.stop(grace_seconds) for child in self._children.values()))

    def kill_all(self) -> None:
        """Kills the runners without draining them; their backends die with them."""
        for child in self._children.values():
            child.kill()

    def refusal(self, name: str) -> str:
        """Returns why a runner repeatedly refuses to start; empty if it does not."""
        child = self._children.get(name)
        return "" if child is None else child.refusal

    async def reload(self, address: str) -> pb.ReloadConfigurationResponse:
        """Makes the runner at this address serve the models of its file. Every failure is a WeftError.

        It is UNSUPPORTED_OPERATION if the runner returns changes that it cannot apply.
        """
        async with open_channel(address) as channel:
            stub: Any = configuration_service_pb2_grpc.ConfigurationServiceStub(channel)
            try:
                answer = await stub.ReloadConfiguration(pb.ReloadConfigurationRequest(), timeout=RELOAD_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise error_from_call(error, Reason.SERVICE_UNAVAILABLE) from error
        found: pb.ReloadConfigurationResponse = answer
        for change in found.changes:
            if change.kind == "runner":
                raise WeftError(Reason.UNSUPPORTED_OPERATION, f"runner {change.name} needs a restart of its process")
        return found

    async def _start(self, name: str, arguments: Iterable[str]) -> None:
        whole = [*arguments, "--home", str(self._home.root), "--registry", self.registry_address]
        whole += ["--config", str(self._config_file)]
        metrics = self._home.metrics_socket(name)
        if len(os.fsencode(metrics)) <= MAX_SOCKET_PATH_BYTES:
            whole += ["--metrics", f"unix:{metrics}"]
        else:
            whole += ["--metrics", ""]  # not on the port of the mesh
        output = self._home.logs / f"runner-{name}.out"
        child = RunnerChild(name, whole, output, self._clock, notify=self._notify)
        self._children[name] = child
        await child.start()
