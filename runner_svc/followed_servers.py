"""Servers whose listed models a runner serves: their lists are polled and followed."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from runner_svc.instance.settings import ServedModel
from runner_svc.openai_upstream.server_probes import SHARED_AGE
from runner_svc.policy.followed_models import FollowedList, FollowedModel, ListChange
from runner_svc.policy.model_names import ServerList
from weft.api.registry.v1 import runner_pb2
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.service import start_restarting, stop_tasks

MAX_LOGGED_NAMES = 16
"""Maximum number of model names in a log line."""

log = get_logger("weft.runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedServer:
    """A server whose model list is followed."""

    name: str
    place: str
    """Its normalized address (`server_place`)."""
    list_models: Callable[[float], Awaitable[ServerList]]
    """Returns the server's list, at most this many seconds old. Has a timeout; never raises for server errors."""
    serve: Callable[[FollowedModel], ServedModel]
    """Returns one of its models as a served model. Raises INVALID_ARGUMENT naming a setting."""
    most: int
    """Maximum number of its models to serve."""
    interval_seconds: float
    """Polling interval of its list."""
    remembered: tuple[FollowedModel, ...] = ()
    """Models of an earlier run, served until a list contradicts."""


class FollowingHost(Protocol):
    """Serves the models; see `RunnerService`."""

    def is_served(self, name: str) -> bool:
        """Whether a model or an adapter of this name is served."""
        ...

    async def serve(self, model: ServedModel) -> None:
        """Serves another model."""
        ...

    async def remove(self, name: str) -> int:
        """Removes a model after its requests; returns the bytes of accelerator memory that it held."""
        ...


class FollowedServers:
    """The servers followed by one runner."""

    def __init__(self, host: FollowingHost, clock: Clock) -> None:
        self._host = host
        self._clock = clock
        self._lists: dict[str, FollowedList] = {}
        self._places: dict[str, str] = {}
        """Server addresses by name."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._said: dict[str, str] = {}
        """The last logged complaint about each server, to log it only once."""
        self.on_models: Callable[[str, tuple[FollowedModel, ...]], Awaitable[None]] = _nothing
        """Called with a server's name and models after they have changed."""

    async def follow(self, server: FollowedServer) -> ServerList:
        """Serves a server's current models and starts following its list. Returns the list."""
        models = self._lists[server.name] = FollowedList(server=server.name, most=server.most)
        self._places[server.name] = server.place
        models.restore(server.remembered)
        for model in server.remembered:
            await self._serve(server, models, model)
        said = await self._look(server, models, 0.0)
        self._tasks[server.name] = start_restarting(
            partial(self._run, server, models), name=f"follow-{server.name}", clock=self._clock
        )
        return said

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the followed servers."""
        return tuple(self._lists)

    def named_at(self, place: str) -> str:
        """Returns the name of the server followed at an address; empty: none."""
        return next((name for name, each in self._places.items() if each == place), "")

    def models(self, server: str) -> tuple[FollowedModel, ...]:
        """Returns the served models of a server; empty if it is not followed."""
        return self._lists[server].served if server in self._lists else ()

    def listed_count(self, server: str) -> int:
        """Returns the number of models that a server lists; 0 if it is not followed."""
        return self._lists[server].listed_count if server in self._lists else 0

    @property
    def counts(self) -> list[runner_pb2.FollowedServer]:
        """Returns the number of served and of listed models of each server."""
        return [
            runner_pb2.FollowedServer(name=name, served_count=len(each.served), listed_count=each.listed_count)
            for name, each in self._lists.items()
        ]

    async def forget(self, server: str) -> None:
        """Stops following a server; its models are served until their requests have ended."""
        task, models = self._tasks.pop(server, None), self._lists.pop(server, None)
        self._said.pop(server, None)
        self._places.pop(server, None)
        if task is not None:
            await stop_tasks([task])
        if models is not None:
            await asyncio.gather(*(self._host.remove(model.name) for model in models.served))

    def note_taken(self, names: Collection[str]) -> None:
        """Renames models, soon, whose names others in the mesh have."""
        for server, models in self._lists.items():
            for model in models.note_taken(names):
                log.warning("a model's name is taken, it gets another", server=server, model=model.name)

    async def stop(self) -> None:
        """Stops following all servers; their models stay."""
        await stop_tasks(self._tasks.values())
        self._tasks.clear()

    async def _run(self, server: FollowedServer, models: FollowedList) -> None:
        while True:
            await self._clock.sleep(server.interval_seconds)
            await self._look(server, models, server.interval_seconds * SHARED_AGE)

    async def _look(self, server: FollowedServer, models: FollowedList, max_age_seconds: float) -> ServerList:
        said = await server.list_models(max_age_seconds)
        if said.models is None:
            self._complain(server.name, f"its models are not known: {said.why}")
            return said
        change = models.step(said.models.names, self._host.is_served)
        self._complain(server.name, f"{change.left_out} more models than are served" if change.left_out else "")
        await self._apply(server, models, change)
        return said

    async def _apply(self, server: FollowedServer, models: FollowedList, change: ListChange) -> None:
        if not change.added and not change.gone:
            return
        for model in change.added:
            await self._serve(server, models, model)
        await asyncio.gather(*(self._host.remove(model.name) for model in change.gone))
        log.info(
            "the models of a server have changed",
            server=server.name,
            added=[model.name for model in change.added][:MAX_LOGGED_NAMES],
            gone=[model.name for model in change.gone][:MAX_LOGGED_NAMES],
        )
        await self.on_models(server.name, models.served)

    async def _serve(self, server: FollowedServer, models: FollowedList, model: FollowedModel) -> None:
        try:
            await self._host.serve(server.serve(model))
        except WeftError as error:
            models.forget(model.upstream)
            log.error("a model of a server is not served", server=server.name, model=model.name, why=error.message)  # noqa: TRY400

    def _complain(self, server: str, what: str) -> None:
        if what and self._said.get(server) != what:
            log.warning("a server is not followed in full", server=server, why=what)
        self._said[server] = what


async def _nothing(_server: str, _models: tuple[FollowedModel, ...]) -> None:
    pass
