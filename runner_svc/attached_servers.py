"""Servers that are attached to a running runner and followed until they are detached."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from google.protobuf.timestamp_pb2 import Timestamp

from runner_svc.followed_servers import FollowedServer, FollowedServers
from runner_svc.policy.followed_models import FollowedModel
from weft.api.runner.v1 import added_model_pb2, load_pb2
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.log import get_logger
from weft.kernel.model_source import ServerSource
from weft.kernel.principal import KEY_VARIABLES
from weft.kernel.reasons import Reason

API_KEY_ENV, REMOTE = "api_key_env", "remote"
"""Parameters of the attach call."""
MAX_VARIABLE_CHARS = 128

log = get_logger("weft.runner")


class ServerAdder(Protocol):
    """Creates followed servers from their records. `weft_app.compose` implements it."""

    def server(self, added: added_model_pb2.AddedModel) -> FollowedServer:
        """Returns the server of a record. Raises INVALID_ARGUMENT naming what is wrong with it."""
        ...


class AttachedServers:
    """The servers attached to one runner."""

    def __init__(self, adder: ServerAdder, followed: FollowedServers) -> None:
        self._adder = adder
        self._followed = followed

    @property
    def on_models(self) -> Callable[[str, tuple[FollowedModel, ...]], Awaitable[None]]:
        """Called with a server's name and models after they have changed."""
        return self._followed.on_models

    @on_models.setter
    def on_models(self, called: Callable[[str, tuple[FollowedModel, ...]], Awaitable[None]]) -> None:
        self._followed.on_models = called

    async def attach(self, added: added_model_pb2.AddedModel) -> None:
        """Follows a server, and writes its models into the record.

        Raises CONNECT_FAILED if it does not list models; it is then not followed. Raises ALREADY_EXISTS for a
        configured server with the same name or address.
        """
        if added.name in self._followed.names:
            raise WeftError(Reason.ALREADY_EXISTS, f"the configuration has a server {added.name}; choose another name")
        server = self._adder.server(added)
        if name := self._followed.named_at(server.place):
            raise WeftError(Reason.ALREADY_EXISTS, f"the configuration has this server already, as {name}")
        said = await self._followed.follow(server)
        if said.models is None:
            await self._followed.forget(added.name)
            raise WeftError(Reason.CONNECT_FAILED, f"the server is not attached: {said.why}")
        record_models(added, self._followed.models(added.name))
        added.server.listed_count = self._followed.listed_count(added.name)

    async def restore(self, added: added_model_pb2.AddedModel) -> None:
        """Follows a server of an earlier run, even if it does not answer now. Never raises."""
        try:
            await self._followed.follow(self._adder.server(added))
        except WeftError as error:
            log.error("an attached server is not followed", server=added.name, why=error.message)  # noqa: TRY400

    async def detach(self, name: str) -> None:
        """Stops following a server; its models are served until their requests have ended."""
        await self._followed.forget(name)


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
                raise invalid_field(where, f"a server has {API_KEY_ENV}, a word, and {REMOTE}, true or false, alone")
    added.add_time.CopyFrom(_now())
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


def _now() -> Timestamp:
    now = Timestamp()
    now.GetCurrentTime()
    now.nanos = 0
    return now
