"""The machine in a few words, for a report: nothing of who uses it, no host name, no paths."""

from __future__ import annotations

import ctypes
import os
import pathlib
import platform
import sys

import numpy as np
import taichi as ti

from tmla import memory

# of which the report says that they are set, and not to what: values can be paths
_VARIABLES = (
    "TMLA_DEBUG",
    "TI_ARCH",
    "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES",
    "VK_INSTANCE_LAYERS",
    "CUDA_VISIBLE_DEVICES",
)


def describe(version: str) -> dict[str, str]:
    """Versions, system, processor, memory: label -> text.

    Parameters
    ----------
    version : str
        The package's.
    """
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "darwin":
        system = f"macOS {platform.mac_ver()[0]} {platform.machine()}"
    available = memory.available_bytes()
    taichi = ".".join(map(str, ti.__version__))
    out = {
        "tmla": f"{version}, Taichi {taichi}, NumPy {np.__version__}, "
        f"{platform.python_implementation()} {platform.python_version()}",
        "system": system,
        "machine": f"{machine_name()}, {os.cpu_count()} threads",
        "memory": "unknown" if available is None else f"{memory.gib(available)} free",
    }
    if names := [name for name in _VARIABLES if os.environ.get(name)]:
        out["set"] = ", ".join(names)
    return out


def machine_name() -> str:
    """Model of the processor, on a Mac behind the machine's own."""
    if sys.platform == "darwin":
        return ", ".join(filter(None, map(_sysctl, (b"hw.model", b"machdep.cpu.brand_string"))))
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _sysctl(name: bytes) -> str:
    value, length = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    if ctypes.CDLL(None).sysctlbyname(name, value, ctypes.byref(length), None, 0) != 0:
        return ""
    return value.value.decode("utf-8", "replace")
