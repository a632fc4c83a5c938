"""Vulkan is proposed for GPUs that a driver reports, and not for a software driver."""

import subprocess
import sys
from pathlib import Path

import pytest

from runner_svc.environments import vulkan_devices

LIBRARY = """
#include <stdint.h>
static uint32_t types[] = {%(types)s 0};
int vkCreateInstance(void *info, void *none, void **instance) { *instance = types; return %(fault)s; }
int vkEnumeratePhysicalDevices(void *instance, uint32_t *count, void **devices) {
    uint32_t number = sizeof(types) / sizeof(*types) - 1;
    *count = number;
    for (uint32_t i = 0; i < number; i++) devices[i] = &types[i];
    return instance == types ? 0 : -1;
}
void vkGetPhysicalDeviceProperties(void *device, uint32_t *properties) { properties[4] = *(uint32_t *)device; }
"""


@pytest.mark.slow("compiles a library")
@pytest.mark.parametrize(
    ("types", "fault", "expected"),
    [("4,", 0, 1), ("4, 2,", 0, 0), ("1,", 0, 0), ("3,", 0, 1), ("", 0, 1), ("2,", -9, 1)],
    ids=["software", "software and card", "integrated", "virtual", "no device", "no driver"],
)
def test_only_integrated_and_discrete_gpus_count(types: str, fault: int, expected: int, tmp_path: Path) -> None:
    source, library = tmp_path / "vulkan.c", tmp_path / "libvulkan.so.1"
    source.write_text(LIBRARY % {"types": types, "fault": fault})
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    asked = subprocess.run(
        [sys.executable, "-I", vulkan_devices.__file__],
        env={"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert asked.returncode == expected, asked.stderr


def test_driver_that_hangs_is_not_used() -> None:
    assert not vulkan_devices.has_vulkan_device(seconds=0.0)
