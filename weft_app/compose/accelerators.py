"""The observer of a host's accelerators, from the configuration."""

from weft.gpu.nvml import Health, NvmlReading
from weft.gpu.observer import HostObserver, declared_snapshots
from weft_app.config.config import AcceleratorSettings

MIB = 1024**2


class AbsentNvml:
    """Reports no driver, for hosts on which NVML must not be called."""

    def read(self) -> NvmlReading:
        """Returns no cards."""
        return NvmlReading(health=Health.ABSENT)


def host_observer(section: AcceleratorSettings, host: str | None = None) -> HostObserver:
    """Returns this host's observer, by default under the host name. One per process: it caches observations."""
    declared = [(device.name, device.memory_mb * MIB) for device in section.declared]
    return HostObserver(
        declared=declared_snapshots(declared),
        reader=None if section.nvidia else AbsentNvml(),
        host=host,
    )
