"""What the configuration says about accelerators, and what then looks at them."""

import pytest

from weft.gpu.snapshot import Source
from weft.kernel.errors.error_tree import FieldError
from weft_app.compose.accelerators import host_observer
from weft_app.config.config import AcceleratorSettings, DeclaredDevice
from weft_app.config.loader import parse_config


async def test_declared_devices_replace_the_library() -> None:
    section = AcceleratorSettings(declared=(DeclaredDevice(name="Radeon", memory_mb=2048),))
    sight = await host_observer(section, host="box").look()
    assert (sight.host, sight.source) == ("box", Source.DECLARED)
    assert [(device.name, device.total_bytes) for device in sight.devices] == [("Radeon", 2 * 1024**3)]


async def test_host_with_the_library_disabled_has_no_devices() -> None:
    sight = await host_observer(AcceleratorSettings(nvidia=False)).look()
    assert (sight.source, sight.devices) == (Source.NVML, ())


async def test_host_queries_the_library_by_default() -> None:
    observer = host_observer(AcceleratorSettings())
    assert (await observer.look()).source in (Source.NVML, Source.UNKNOWN)


def test_device_without_memory_is_refused() -> None:
    with pytest.raises(FieldError, match="memory_mb"):
        parse_config({"accelerators": {"declared": [{"name": "Radeon", "memory_mb": 0}]}})
