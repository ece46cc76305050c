"""The devices behind the backends by name, asked through ctypes: Taichi does not tell them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from tmla import vulkan_device


def describe(arch: str) -> dict[str, Any]:
    """What can be asked about the device that a backend runs on.

    Parameters
    ----------
    arch : {"metal", "cuda", "vulkan", "cpu"}

    Returns
    -------
    dict
        ``name`` and what else the system tells: ``driver``, ``api``, ``kind``, ``max_buffer`` and ``memory`` in bytes.
        Empty where nothing can be asked.
    """
    return {"metal": _metal, "cuda": _cuda, "vulkan": _vulkan, "cpu": dict}[arch]()


def _vulkan() -> dict[str, Any]:
    found = vulkan_device.devices()
    device = vulkan_device.chosen(found)
    if device is None:
        return {}
    out: dict[str, Any] = {"name": device.name, "kind": device.kind, "driver": device.driver, "api": device.api}
    out |= {"max_buffer": device.max_buffer, "max_allocation": device.max_allocation}
    return out | {"others": [other.name for other in found if other is not device]}


def _cuda() -> dict[str, Any]:
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return {}
    device, version, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return {}
    cuda.cuDeviceGetName(name, 256, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    api = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return {"name": name.value.decode("utf-8", "replace"), "api": api, "memory": memory.value}


def _metal() -> dict[str, Any]:
    if sys.platform != "darwin":
        return {}
    frameworks = "/System/Library/Frameworks"
    objc = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
    ctypes.CDLL(f"{frameworks}/CoreGraphics.framework/CoreGraphics")  # else a command-line program gets no device
    metal = ctypes.CDLL(f"{frameworks}/Metal.framework/Metal")
    objc.sel_registerName.restype = ctypes.c_void_p
    objc.sel_registerName.argtypes = [ctypes.c_char_p]
    metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p

    def send(receiver: int, selector: bytes, result: Any) -> Any:
        message = ctypes.CFUNCTYPE(result, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", objc))
        return message(receiver, objc.sel_registerName(selector))

    device = metal.MTLCreateSystemDefaultDevice()
    if not device:
        return {}
    name = send(send(device, b"name", ctypes.c_void_p), b"UTF8String", ctypes.c_char_p)
    return {
        "name": name.decode("utf-8", "replace"),
        "max_buffer": send(device, b"maxBufferLength", ctypes.c_ulong),
        "memory": send(device, b"recommendedMaxWorkingSetSize", ctypes.c_uint64),
    }
