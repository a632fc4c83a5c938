"""How large the mesh is on the wire: a snapshot must fit into one message, whatever is published and declared."""

from collections.abc import Iterable

from registry_svc.domain import AgentManifest, Manifest
from registry_svc.policy.limits import agent_bytes, model_bytes

_Key = tuple[bool, str]


class ManifestSizes:
    """The sizes of all models and agents as they are shown, and their sum."""

    def __init__(self) -> None:
        self._sizes: dict[_Key, int] = {}
        self.total_bytes = 0

    def put(self, manifest: Manifest | AgentManifest) -> None:
        """Remember a model or an agent in place of an earlier one of its name."""
        self.drop(manifest.name, is_agent=isinstance(manifest, AgentManifest))
        key, size = _measured(manifest)
        self._sizes[key] = size
        self.total_bytes += size

    def drop(self, name: str, *, is_agent: bool) -> None:
        """Forget a model or an agent; one that is not there is passed over."""
        self.total_bytes -= self._sizes.pop((is_agent, name), 0)

    def growth_bytes(self, manifests: Iterable[Manifest | AgentManifest]) -> int:
        """By how much the sum would grow with these in place of what is there of their names."""
        measured = (_measured(manifest) for manifest in manifests)
        return sum(size - self._sizes.get(key, 0) for key, size in measured)


def _measured(manifest: Manifest | AgentManifest) -> tuple[_Key, int]:
    if isinstance(manifest, AgentManifest):
        return (True, manifest.name), agent_bytes(manifest)
    return (False, manifest.name), model_bytes(manifest)
