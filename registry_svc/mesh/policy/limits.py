"""How much there may be."""

from registry_svc.mesh.domain import AgentManifest, Manifest, RouteManifest
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.wake.recipes import CommandRecipe, HttpRecipe

# What a model, an agent or a route takes on the wire besides its texts: numbers, times, the framing of fields.
BASE_BYTES = 96


def require_room(what: str, present: int, arriving: int, limit: int) -> None:
    """Raise TOO_MANY_RESOURCES when `arriving` more of `what` would be more than `limit`."""
    if arriving > 0 and present + arriving > limit:
        raise WeftError(
            Reason.TOO_MANY_RESOURCES,
            f"the mesh may have {limit} {what} and has {present}; delete some that are not needed any more",
            metadata={"resource": what, "limit": str(limit)},
        )


def model_bytes(manifest: Manifest) -> int:
    """About how many bytes a model takes in a snapshot of the mesh."""
    texts = [manifest.name, manifest.pool_name, manifest.digest]
    match manifest.wake.by_mesh if manifest.wake is not None else None:
        case HttpRecipe(url=url, headers=headers):
            texts += [url, *headers.keys(), *headers.values()]
        case CommandRecipe(argv=argv):
            texts += argv
        case _:
            pass
    return BASE_BYTES + _utf8_bytes(texts)


def agent_bytes(manifest: AgentManifest) -> int:
    """About how many bytes an agent takes in a snapshot of the mesh."""
    texts = [manifest.name, manifest.target, manifest.description, manifest.system_prompt, manifest.default_params]
    texts += [*manifest.behaviour.tools, *manifest.behaviour.signals]
    return BASE_BYTES + _utf8_bytes(texts)


def route_bytes(manifest: RouteManifest) -> int:
    """About how many bytes a route takes in a snapshot of the mesh."""
    return BASE_BYTES + _utf8_bytes([manifest.name, manifest.description, *manifest.candidates])


def _utf8_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)
