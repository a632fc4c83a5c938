"""How large the mesh is on the wire: a snapshot must fit into one message, whatever is published and declared."""

from collections.abc import Iterable

from registry_svc.mesh.domain import AgentManifest, Kind, Manifest, RouteManifest
from registry_svc.mesh.policy.limits import agent_bytes, model_bytes, route_bytes

AnyManifest = Manifest | AgentManifest | RouteManifest
_Key = tuple[Kind, str]


class ManifestSizes:
    """The sizes of all models, agents and routes as they are shown, and their sum."""

    def __init__(self) -> None:
        self._sizes: dict[_Key, int] = {}
        self.total_bytes = 0

    def put(self, manifest: AnyManifest) -> None:
        """Remember a resource in place of an earlier one of its kind and name."""
        key, size = _measured(manifest)
        self.drop(*key)
        self._sizes[key] = size
        self.total_bytes += size

    def drop(self, kind: Kind, name: str) -> None:
        """Forget a resource; one that is not there is passed over."""
        self.total_bytes -= self._sizes.pop((kind, name), 0)

    def growth_bytes(self, manifests: Iterable[AnyManifest]) -> int:
        """By how much the sum would grow with these in place of what is there of their names."""
        measured = (_measured(manifest) for manifest in manifests)
        return sum(size - self._sizes.get(key, 0) for key, size in measured)


def _measured(manifest: AnyManifest) -> tuple[_Key, int]:
    match manifest:
        case AgentManifest():
            return (Kind.AGENT, manifest.name), agent_bytes(manifest)
        case RouteManifest():
            return (Kind.ROUTE, manifest.name), route_bytes(manifest)
        case Manifest():
            return (Kind.MODEL, manifest.name), model_bytes(manifest)
