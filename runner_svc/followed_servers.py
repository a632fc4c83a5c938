"""Servers whose listed models a runner serves: their lists are polled and followed. Attached ones have records."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.openai_upstream.server_probes import SHARED_AGE
from runner_svc.policy.followed_models import MAX_UPSTREAM_CHARS, FollowedList, FollowedModel, ListChange
from runner_svc.policy.model_names import ServerList
from runner_svc.waiting import event_within
from weft.api.registry.v1 import runner_pb2
from weft.api.runner.v1 import added_model_pb2, load_pb2
from weft.documents.left_out import left_out
from weft.kernel.access.principal import KEY_VARIABLES
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.models.load_parameters import API_KEY_ENV, REMOTE
from weft.kernel.models.model_source import ServerSource
from weft.kernel.services.service_lifecycle import start_restarting, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

SETTLE_SECONDS = 10.0
"""Maximum wait for the registry's word on an attached server."""
SETTLE_CHECK_SECONDS = 0.05
_UNUSABLE = f"its name at the server is no line of 1 to {MAX_UPSTREAM_CHARS} characters"
MAX_LOGGED_NAMES = 16
"""Maximum number of model names in a log line."""

log = get_logger("weft.runner")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedServer:
    """A server whose model list is followed."""

    name: str
    location: str
    """Its normalized address (`server_location`)."""
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


ServerOf = Callable[[added_model_pb2.AddedModel], FollowedServer]
"""Returns the server of a record. Raises INVALID_ARGUMENT naming what is wrong with it."""


class FollowingHost(Protocol):
    """Serves the models; see `RunnerService`."""

    def is_served(self, name: str) -> bool:
        """Whether a model or an adapter of this name is served."""
        ...

    async def serve(self, model: ServedModel) -> None:
        """Serves another model."""
        ...

    def withdraw(self, name: str) -> None:
        """Stops serving a model; its running requests finish."""
        ...

    async def remove(self, name: str) -> int:
        """Removes a model after its requests; returns the bytes of accelerator memory that it held."""
        ...


@dataclass(slots=True)
class _Following:
    server: FollowedServer
    models: FollowedList
    task: asyncio.Task[None] | None = None
    said: str = ""
    """The last logged complaint, to log it only once."""
    failures: dict[str, str] = field(default_factory=dict)
    """Why models of the last list cannot be served here, by their name at the server."""
    is_due: asyncio.Event = field(default_factory=asyncio.Event)
    """Set if the list must be read again soon, because names are taken."""
    taken_count: int = 0
    """Number of models that have lost their names so far."""


class FollowedServers:
    """The servers followed by one runner."""

    def __init__(self, host: FollowingHost, clock: Clock) -> None:
        self._host = host
        self._clock = clock
        self._servers: dict[str, _Following] = {}
        self.on_models: Callable[[str, tuple[FollowedModel, ...]], Awaitable[None]] = _nothing
        """Called with a server's name and models after they have changed."""
        self.is_reserved: Callable[[str], bool] = lambda _: False
        """Whether another resource than a served model has a name, or will have it."""
        self.until_published: Callable[[float], Awaitable[bool]] = _is_published
        """Waits until the registry has the current models, at most this many seconds; returns whether it has."""
        self._refused: Mapping[str, str] = {}
        """Why the registry does not publish a model, by its name in the mesh."""

    async def follow(self, server: FollowedServer) -> ServerList:
        """Serves a server's current models and starts following its list. Returns the list."""
        following = _Following(server, FollowedList(server=server.name, most=server.most))
        self._servers[server.name] = following
        following.models.restore(server.remembered)
        for model in server.remembered:
            await self._serve(following, model)
        said = await self._look(following, 0.0)
        following.task = start_restarting(
            partial(self._run, following), name=f"follow-{server.name}", clock=self._clock
        )
        return said

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the followed servers."""
        return tuple(self._servers)

    def named_at(self, location: str) -> str:
        """Returns the name of the server followed at an address; empty: none."""
        return next((name for name, each in self._servers.items() if each.server.location == location), "")

    def models(self, server: str) -> FollowedList:
        """Returns the models of a followed server."""
        return self._servers[server].models

    @property
    def counts(self) -> list[runner_pb2.FollowedServer]:
        """Returns the number of served and of listed models of each server."""
        return [
            runner_pb2.FollowedServer(
                name=name,
                served_count=len(self.published(name)),
                listed_count=each.models.listed_count,
                left_out_count=len(self.left_out_of(name)),
            )
            for name, each in self._servers.items()
        ]

    def published(self, server: str) -> tuple[FollowedModel, ...]:
        """Returns the models of a server that the mesh serves."""
        return tuple(each for each in self._servers[server].models.served if each.name not in self._refused)

    def left_out_of(self, server: str) -> list[runner_pb2.LeftOut]:
        """Returns the listed models of a server that the mesh does not serve, but for its maximum number."""
        each = self._servers[server]
        names = {model.name for model in each.models.served}
        refused = {name: why for name, why in self._refused.items() if name in names}
        return [left_out("model", name, why, server=server) for name, why in (*each.failures.items(), *refused.items())]

    @property
    def left_out(self) -> list[runner_pb2.LeftOut]:
        """The listed models of all servers that are not served, except those that the registry leaves out itself."""
        return [item for name in self._servers for item in self.left_out_of(name) if item.name not in self._refused]

    def note_left_out(self, items: Sequence[runner_pb2.LeftOut]) -> None:
        """Records the models that the registry does not publish. Those whose names are taken get others soon."""
        models = [each for each in items if each.kind == "model"]
        self.note_taken({each.name for each in models if each.is_name_taken})
        self._refused = {each.name: each.message for each in models}

    async def settle(self, server: str) -> None:
        """Waits until the registry has said which models of a server it publishes, at most SETTLE_SECONDS."""
        deadline = self._clock.monotonic() + SETTLE_SECONDS
        while (left := deadline - self._clock.monotonic()) > 0 and server in self._servers:
            if await self.until_published(left) and not self._servers[server].is_due.is_set():
                return
            await self._clock.sleep(SETTLE_CHECK_SECONDS)

    async def forget(self, server: str) -> None:
        """Stops following a server; its models are served until their requests have ended."""
        following = self._servers.pop(server, None)
        if following is None:
            return
        if following.task is not None:
            await stop_tasks([following.task])
        await asyncio.gather(*(self._host.remove(model.name) for model in following.models.served))

    def note_taken(self, names: Collection[str]) -> None:
        """Withdraws models whose names others in the mesh have, and serves them soon under other names."""
        for server, each in self._servers.items():
            for model in each.models.note_taken(names):
                log.warning("model name is taken; another one is used", server=server, model=model.name)
                self._host.withdraw(model.name)
                each.taken_count += 1
                each.is_due.set()

    async def stop(self) -> None:
        """Stops following all servers; their models stay."""
        await stop_tasks([each.task for each in self._servers.values() if each.task is not None])

    async def _run(self, following: _Following) -> None:
        interval = following.server.interval_seconds
        while True:
            await event_within(self._clock, interval, following.is_due)
            taken_before = following.taken_count
            await self._look(following, interval * SHARED_AGE)
            if following.taken_count == taken_before:
                following.is_due.clear()

    async def _look(self, following: _Following, max_age_seconds: float) -> ServerList:
        said = await following.server.list_models(max_age_seconds)
        if said.models is None:
            self._complain(following, f"its models are unknown: {said.why}")
            return said
        following.failures.clear()
        change = following.models.step(
            said.models.names, lambda name: self._host.is_served(name) or self.is_reserved(name)
        )
        following.failures |= dict.fromkeys(following.models.unusable, _UNUSABLE)
        self._complain(following, f"{change.left_out} more models than are served" if change.left_out else "")
        await self._apply(following, change)
        return said

    async def _apply(self, following: _Following, change: ListChange) -> None:
        if not change.added and not change.gone:
            return
        for model in change.added:
            await self._serve(following, model)
        await asyncio.gather(*(self._host.remove(model.name) for model in change.gone))
        name = following.server.name
        log.info(
            "models of a server have changed",
            server=name,
            added=[model.name for model in change.added][:MAX_LOGGED_NAMES],
            gone=[model.name for model in change.gone][:MAX_LOGGED_NAMES],
        )
        await self.on_models(name, following.models.served)

    async def _serve(self, following: _Following, model: FollowedModel) -> None:
        server = following.server
        try:
            await self._host.serve(server.serve(model))
        except WeftError as error:
            following.models.forget(model.upstream)
            following.failures[model.upstream] = error.log_message
            log.error("model of a server is not served", server=server.name, model=model.name, why=error.log_message)  # noqa: TRY400

    def _complain(self, following: _Following, what: str) -> None:
        if what and following.said != what:
            log.warning("server is not followed completely", server=following.server.name, why=what)
        following.said = what


async def _is_published(_seconds: float) -> bool:
    return True


async def _nothing(_server: str, _models: tuple[FollowedModel, ...]) -> None:
    pass


MAX_VARIABLE_CHARS = 128


def server_record(server: ServerSource, name: str, options: load_pb2.LoadOptions) -> added_model_pb2.AddedModel:
    """Returns the record of a server to attach. Raises INVALID_ARGUMENT naming the parameter."""
    added = added_model_pb2.AddedModel(name=name, source=server.url, stored_source=server.url)
    added.server.SetInParent()
    for parameter, value in options.parameters.items():
        where = f"options.parameters.{parameter}"
        match parameter, value.WhichOneof("kind"):
            case (word, "word") if word == API_KEY_ENV:
                variable = value.word
                if not variable.isidentifier() or len(variable) > MAX_VARIABLE_CHARS or variable in KEY_VARIABLES:
                    raise invalid_field(where, "must be the name of an environment variable with the server's own key")
                added.server.api_key_env = variable
            case (word, "flag") if word == REMOTE:
                added.server.remote = value.flag
            case _:
                raise invalid_field(
                    where, f"a server only has the parameters {API_KEY_ENV} (text) and {REMOTE} (true or false)"
                )
    added.add_time.GetCurrentTime()
    added.add_time.nanos = 0
    return added


def record_models(added: added_model_pb2.AddedModel, models: Sequence[FollowedModel]) -> None:
    """Writes the models of a server into its record."""
    del added.server.models[:]
    added.server.models.extend(
        added_model_pb2.ListedModel(name=model.name, upstream_name=model.upstream) for model in models
    )


def remembered_of(added: added_model_pb2.AddedModel) -> tuple[FollowedModel, ...]:
    """Returns the models in a server's record."""
    return tuple(FollowedModel(name=each.name, upstream=each.upstream_name) for each in added.server.models)
