"""What Vulkan's loader says of the devices, asked through ctypes: Taichi 1.7.4 tells neither a name nor a limit."""

from __future__ import annotations

import ctypes
import dataclasses
import sys

_LIBRARIES = {"linux": ("libvulkan.so.1", "libvulkan.so"), "win32": ("vulkan-1.dll",)}  # macOS: Taichi brings its own
_KINDS = ("other", "integrated", "discrete", "virtual", "cpu")
_WIDE_LINES = 15  # position in VkPhysicalDeviceFeatures, a row of 55 numbers
_API_1_1, _API_1_2, _API_1_3 = ((1 << 22) | (minor << 12) for minor in (1, 2, 3))


@dataclasses.dataclass(frozen=True)
class VulkanDevice:
    """One device.

    Attributes
    ----------
    name, driver : str
        As the driver gives them; `driver` is empty before Vulkan 1.2.
    kind : {"other", "integrated", "discrete", "virtual", "cpu"}
    api : str
        Version of Vulkan, ``1.3.230``.
    max_buffer : int
        Bytes of a storage buffer that a kernel can reach, as promised (``maxStorageBufferRange``).
    max_allocation : int or None
        Bytes of one allocation (``maxMemoryAllocationSize``); None before Vulkan 1.1.
    score : int
        By which Taichi 1.7.4 chooses among devices: the first of the highest.
    """

    name: str
    driver: str
    kind: str
    api: str
    max_buffer: int
    max_allocation: int | None
    score: int


class _ApplicationInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api", ctypes.c_uint32),
    )


class _InstanceInfo(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_ApplicationInfo)),
        ("n_layers", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("n_extensions", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    )


class _Properties(ctypes.Structure):
    """VkPhysicalDeviceProperties as far as it is read; what follows is room for the rest (824 bytes in all)."""

    _fields_ = (
        ("api", ctypes.c_uint32),
        ("driver", ctypes.c_uint32),
        ("vendor", ctypes.c_uint32),
        ("device", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("name", ctypes.c_char * 256),
        ("cache_id", ctypes.c_uint8 * 16),
        ("limits_align", ctypes.c_uint32),
        ("limits", ctypes.c_uint32 * 8),  # the last is maxStorageBufferRange
        ("rest", ctypes.c_uint64 * 128),
    )


class _Properties2(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("next", ctypes.c_void_p), ("properties", _Properties))


class _Maintenance3(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("max_descriptors", ctypes.c_uint32),
        ("max_allocation", ctypes.c_uint64),
    )


class _Driver(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int32),
        ("next", ctypes.c_void_p),
        ("id", ctypes.c_int32),
        ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256),
        ("conformance", ctypes.c_uint8 * 4),
    )


def devices() -> list[VulkanDevice]:
    """Every device that the loader shows; none where there is no loader or no driver."""
    vk = _loader()
    if vk is None:
        return []
    application = _ApplicationInfo(type=0, api=_API_1_3)
    info = _InstanceInfo(type=1, application=ctypes.pointer(application))
    instance = ctypes.c_void_p()
    if vk.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
        return []
    try:
        n = ctypes.c_uint32()
        if vk.vkEnumeratePhysicalDevices(instance, ctypes.byref(n), None) != 0:
            return []
        handles = (ctypes.c_void_p * n.value)()
        vk.vkEnumeratePhysicalDevices(instance, ctypes.byref(n), handles)
        return [_ask(vk, ctypes.c_void_p(handle)) for handle in handles[: n.value]]
    finally:
        vk.vkDestroyInstance(instance, None)


def chosen(found: list[VulkanDevice]) -> VulkanDevice | None:
    """The device that Taichi takes: the first of the highest score; None of none."""
    return max(found, key=lambda device: device.score) if found else None


def _loader() -> ctypes.CDLL | None:
    for name in _LIBRARIES.get(sys.platform, ()):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _ask(vk: ctypes.CDLL, handle: ctypes.c_void_p) -> VulkanDevice:
    p = _Properties()
    vk.vkGetPhysicalDeviceProperties(handle, ctypes.byref(p))
    features = (ctypes.c_uint32 * 64)()
    vk.vkGetPhysicalDeviceFeatures(handle, features)
    kind = _KINDS[p.kind] if p.kind < len(_KINDS) else "other"
    major, minor, patch = (p.api >> 22) & 0x7F, (p.api >> 12) & 0x3FF, p.api & 0xFFF
    max_allocation, driver = None, ""
    if p.api >= _API_1_1:
        about = _Driver(type=1000196000)
        limits = _Maintenance3(type=1000168000)
        if p.api >= _API_1_2:
            limits.next = ctypes.addressof(about)
        both = _Properties2(type=1000059001, next=ctypes.addressof(limits))
        vk.vkGetPhysicalDeviceProperties2(handle, ctypes.byref(both))
        max_allocation = limits.max_allocation
        driver = f"{_text(about.name)} {_text(about.info)}".strip()
    return VulkanDevice(
        name=_text(p.name),
        driver=driver,
        kind=kind,
        api=f"{major}.{minor}.{patch}",
        max_buffer=p.limits[7],
        max_allocation=max_allocation,
        # get_device_score of taichi/rhi/vulkan/vulkan_device_creator.cpp, less the 1000 that each device gets
        score=100 * features[_WIDE_LINES] + {"integrated": 500, "discrete": 1000}.get(kind, 0) + 100 * minor,
    )


def _text(name: bytes) -> str:
    return "".join(c for c in name.decode("utf-8", "replace") if c.isprintable())
