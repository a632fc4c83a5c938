"""What the configuration says about accelerators, and what then looks at them."""

import pytest
from pydantic import ValidationError

from weft.gpu.snapshot import Source
from weft_app.compose.accelerators import host_observer
from weft_app.config.config import AcceleratorSection


async def test_declared_devices_take_the_place_of_the_library() -> None:
    section = AcceleratorSection.model_validate({"declared": [{"name": "Radeon", "memory_mb": 2048}]})
    sight = await host_observer(section, host="box").look()
    assert (sight.host, sight.source) == ("box", Source.DECLARED)
    assert [(device.name, device.total_bytes) for device in sight.devices] == [("Radeon", 2 * 1024**3)]


async def test_a_host_that_is_told_not_to_ask_the_library_has_no_devices() -> None:
    sight = await host_observer(AcceleratorSection(nvidia=False)).look()
    assert (sight.source, sight.devices) == (Source.NVML, ())


async def test_a_host_asks_the_library_by_default() -> None:
    observer = host_observer(AcceleratorSection(poll_interval_seconds=3600))
    assert (await observer.look()).source in (Source.NVML, Source.UNKNOWN)


def test_a_device_without_memory_is_refused() -> None:
    with pytest.raises(ValidationError, match="memory_mb"):
        AcceleratorSection.model_validate({"declared": [{"name": "Radeon", "memory_mb": 0}]})
