"""What a mesh may call of a machine that joined it. Everything else is refused."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


class Permission(Enum):
    """When a method may be called over a link."""

    ALWAYS = "always"
    """It concerns published models and the runner itself only."""
    ACCEPTS_MODELS = "accepts models"
    """The machine was joined with `--accept-models`."""
    NEVER = "never"
    """It concerns the mesh's own runners only."""


_RUNNER = "/weft.api.runner.v1.RunnerService/"
_CALLS = "/weft.api.runner.v1.ModelCallService/"

JOINED_CALLS: Mapping[str, Permission] = MappingProxyType(
    {
        "/weft.api.operations.v1.ProcessService/GetHealth": Permission.ALWAYS,
        "/weft.api.runner.v1.GenerationService/Generate": Permission.ALWAYS,
        "/weft.api.runner.v1.EmbeddingService/Embed": Permission.ALWAYS,
        **{
            f"{_CALLS}{name}": Permission.ALWAYS
            for name in ("Rerank", "Tokenize", "StreamImages", "StreamTranscription", "Speak")
        },
        **{
            f"{_RUNNER}{name}": Permission.ALWAYS
            for name in ("Describe", "Wake", "Load", "Unload", "YieldMemory", "FlushCache", "GetRequest", "TailLogs")
        },
        **{f"{_RUNNER}{name}": Permission.ALWAYS for name in ("WatchPrefixes", "FindStoredModel", "ReadModelFile")},
        f"{_RUNNER}FetchPrompt": Permission.NEVER,
        **{f"{_RUNNER}{name}": Permission.ACCEPTS_MODELS for name in ("PullModel", "AddModel", "RemoveModel")},
    }
)
"""Methods by path. The servicers limit them to what is published, see `RunnerConfig.is_joined`."""


def require_callable(method: str, *, accepts_models: bool) -> None:
    """Raises UNSUPPORTED_OPERATION for a method that is never called over a link, PERMISSION_DENIED without consent."""
    permission = JOINED_CALLS.get(method, Permission.NEVER)
    if permission is Permission.NEVER:
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this method cannot be called over a link")
    if permission is Permission.ACCEPTS_MODELS and not accepts_models:
        raise WeftError(
            Reason.PERMISSION_DENIED,
            "this machine serves only what it publishes; its owner permits models of the hub with "
            "`weft runner join --accept-models`",
        )
