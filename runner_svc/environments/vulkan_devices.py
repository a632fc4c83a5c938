"""Tells whether Vulkan has an integrated or discrete GPU; as a program, it ends with code 0 if so.

llama.cpp uses other devices, such as Mesa's software driver, only on request (GGML_VK_VISIBLE_DEVICES).

Drivers may crash or hang, so they are loaded in another process. It uses only the standard library.
"""

import ctypes
import subprocess
import sys

SECONDS = 5.0
MAX_DEVICES = 16
_LIBRARY = "libvulkan.so.1"
_INSTANCE_CREATE_INFO = 1
_PROPERTIES_BYTES = 1024
"""More than the size of VkPhysicalDeviceProperties."""
_TYPE_INDEX = 4
_GPU_TYPES = (1, 2)
"""VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU and DISCRETE_GPU."""


class _InstanceCreateInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


def has_vulkan_device(seconds: float = SECONDS) -> bool:
    """Whether a driver on this machine reports an integrated or discrete GPU in time."""
    try:
        asked = subprocess.run(  # noqa: S603 - this interpreter
            [sys.executable, "-I", __file__], capture_output=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return asked.returncode == 0


def device_types() -> list[int]:
    """Returns the VkPhysicalDeviceType of each device. Raises OSError without Vulkan's library or a driver."""
    vulkan = ctypes.CDLL(_LIBRARY)
    instance, count = ctypes.c_void_p(), ctypes.c_uint32(MAX_DEVICES)
    if vulkan.vkCreateInstance(ctypes.byref(_InstanceCreateInfo(_INSTANCE_CREATE_INFO)), None, ctypes.byref(instance)):
        raise OSError("there is no driver for Vulkan")
    devices = (ctypes.c_void_p * MAX_DEVICES)()
    if vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), devices) < 0:
        raise OSError("Vulkan lists no devices")
    found, properties = [], (ctypes.c_uint32 * (_PROPERTIES_BYTES // 4))()
    for number in range(count.value):
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(devices[number]), properties)
        found.append(properties[_TYPE_INDEX])
    return found


if __name__ == "__main__":
    sys.exit(not set(_GPU_TYPES).intersection(device_types()))
