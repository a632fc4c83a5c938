"""A registry without a server: everything that writes and reads, on one core."""

from registry_svc.keys.join_tokens import JoinTokens
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.declarations import Declarations, SettingsManager
from registry_svc.mesh.expiry import Expiry
from registry_svc.mesh.servicers import Catalogue
from registry_svc.mesh.sessions import SessionManager
from registry_svc.mesh.store import SqlStore
from registry_svc.registry_config import RegistryConfig
from weft_testing.fake_clock import FakeClock


class NothingLoaded:
    """An unloader that no test here needs."""

    async def unload(self, model: str, requested_by: str) -> None:
        raise AssertionError(f"{requested_by} unloads {model}, and no runner is there")

    async def remove(self, model: str, requested_by: str) -> None:
        raise AssertionError(f"{requested_by} removes {model}, and no runner is there")


class BareRegistry:
    """The parts of a registry, started together."""

    def __init__(self, store: SqlStore, clock: FakeClock, config: RegistryConfig) -> None:
        self.core = RegistryCore(store, clock, config)
        self.roster = SessionManager(self.core)
        self.expiry = Expiry(self.core)
        self.declarations = Declarations(self.core, NothingLoaded())
        self.catalogue = Catalogue(self.core)
        self.tokens = JoinTokens(self.core)
        self.settings = SettingsManager(self.core)

    async def start(self) -> None:
        await self.core.start()
        self.expiry.start()

    async def stop(self, grace_seconds: float = 1.0) -> None:
        await self.core.stop(grace_seconds)
