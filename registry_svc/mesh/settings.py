"""Settings of the whole mesh that operators change at run time."""

from dataclasses import replace

import structlog

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.domain import EventDraft, EventReason, MeshSettings
from registry_svc.mesh.watch import SettingsChanged

log = structlog.get_logger("weft.registry")


class SettingsManager:
    """Reads and changes the settings; writes pass one by one with those of declarations and sessions."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def current(self) -> MeshSettings:
        """Return the present settings; raises SHUTTING_DOWN while the registry does not run."""
        self._core.require_open()
        return self._core.settings

    async def update(self, allow_cloud_fallback: bool | None) -> MeshSettings:
        """Set what is not None; it is on disk and published when this returns. Equal values change nothing."""
        return await self._core.write(lambda: self._update(allow_cloud_fallback))

    async def _update(self, allow_cloud_fallback: bool | None) -> MeshSettings:
        core = self._core
        if allow_cloud_fallback is None or allow_cloud_fallback == core.settings.allow_cloud_fallback:
            return core.settings
        changed = replace(core.settings, allow_cloud_fallback=allow_cloud_fallback, revision=core.settings.revision + 1)
        await core.store.save_settings(changed)
        core.settings = changed
        core.publish([SettingsChanged(changed)], [_happening(changed)])
        log.info("settings changed", allow_cloud_fallback=changed.allow_cloud_fallback, revision=changed.revision)
        return changed


def _happening(settings: MeshSettings) -> EventDraft:
    may = "may" if settings.allow_cloud_fallback else "may not"
    return EventDraft(
        kind=None,
        name="settings",
        reason=EventReason.CONFIGURED,
        message=f"set by an operator: routes {may} fall back to models off the premises",
    )
