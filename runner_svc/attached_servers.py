"""The records of servers that are attached to a running runner and followed until they are detached."""

from collections.abc import Sequence

from runner_svc.policy.followed_models import FollowedModel
from weft.api.runner.v1 import added_model_pb2, load_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.model_source import ServerSource
from weft.kernel.principal import KEY_VARIABLES

API_KEY_ENV, REMOTE = "api_key_env", "remote"
"""Parameters of the attach call."""
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
                raise invalid_field(where, f"a server has {API_KEY_ENV}, a word, and {REMOTE}, true or false, alone")
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
