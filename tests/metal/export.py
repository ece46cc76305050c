"""Export kernels as a Mac would compile them: Taichi's SPIR-V with exactly the capabilities of its Metal device.

Taichi initialises once per process, so :func:`export` runs this file as a program in a fresh one, on software Vulkan.
"""

import concurrent.futures
import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from . import tools
from .record import Poke, Recorder

# What MetalDevice of Taichi 1.7.4 sets on Apple silicon (rhi/metal/metal_device.mm, collect_metal_device_caps).
# Float atomics are commented out there; there is no 64-bit float and no physical storage buffer.
METAL_CAPS = (
    "spirv_version_1_3",
    "spirv_has_int8",
    "spirv_has_int16",
    "spirv_has_int64",
    "spirv_has_float16",
    "spirv_has_subgroup_basic",
    "spirv_has_subgroup_vote",
    "spirv_has_subgroup_ballot",
    "spirv_has_subgroup_arithmetic",
)
ERROR_FILE = "error.txt"  # in a case's folder: why Taichi could not export it
CASE_FILE = "case.json"


def export(cases, folder):
    """Export `cases` into ``folder/<name>``; a case that fails leaves its reason there and the others go on.

    Parameters
    ----------
    cases : list of MetalCase
    folder : pathlib.Path

    Raises
    ------
    tools.ToolError
        The process ended without naming the case that killed it.
    """
    environment = dict(os.environ, ENABLE_TAICHI_HEADER_PRINT="0", TI_LOG_LEVEL="error", TI_OFFLINE_CACHE="0")
    environment["VK_DRIVER_FILES"] = environment["VK_ICD_FILENAMES"] = tools.llvmpipe_icd()
    here = pathlib.Path(__file__).resolve().parents[len(__package__.split("."))]
    environment["PYTHONPATH"] = os.pathsep.join([str(here), *sys.path])
    names = [f"{case.module}:{case.name}" for case in cases]
    n = min(os.cpu_count() or 1, len(names))
    with concurrent.futures.ThreadPoolExecutor(n) as pool:
        list(pool.map(lambda i: _export_in_process(names[i::n], folder, environment), range(n)))


def _export_in_process(left, folder, environment):
    while left:
        command = [sys.executable, "-m", f"{__package__}.export", str(folder), *left]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode == 0:
            return
        said = (done.stdout + done.stderr)[-3000:]
        unfinished = [name for name in left if not _ended(folder / name.split(":")[1])]
        begun = folder / unfinished[0].split(":")[1] if unfinished else None
        if begun is None or not begun.exists():
            raise tools.ToolError(f"export ended with code {done.returncode}: {said}")
        (begun / ERROR_FILE).write_text(f"Taichi died, code {done.returncode}: {said}")  # and took the process down
        left = unfinished[1:]


def _ended(folder):
    return (folder / ERROR_FILE).exists() or (folder / CASE_FILE).exists()


def _write_case(recorder, case, folder):
    import taichi as ti
    from taichi.lang import impl

    built = case.build()
    with recorder.launches() as launches:
        built.call()
    if all(isinstance(launch, Poke) for launch in launches):
        raise ValueError(f"case {case.name}: the call launched no kernel")
    caps = [getattr(ti.DeviceCapability, name) for name in METAL_CAPS]
    builder = impl.get_runtime().prog.make_aot_module_builder(ti.vulkan, caps)
    kernels, calls, arrays = {}, [], {}
    for launch in launches:
        if isinstance(launch, Poke):
            calls.append(dataclasses.asdict(launch))
            continue
        compiled, values = launch
        if compiled not in kernels:
            kernels[compiled] = f"k{len(kernels)}"
            builder.add(kernels[compiled], compiled)
        arguments = []
        for value in values:
            if isinstance(value, np.ndarray):
                arrays[f"ext_{len(calls)}_{len(arguments)}"] = value.copy()
                arguments.append(list(value.shape))
            else:
                arguments.append(float(value))
        calls.append({"kernel": kernels[compiled], "arguments": arguments})
    builder.dump(str(folder), "")
    for field, array in built.inputs.items():
        tree = recorder.tree_of(field)
        arrays[f"root_{tree.index}"] = _as_stored(field, array, tree)
    tolerances = {}
    for field, expect in built.expected.items():
        tree = recorder.tree_of(field)
        arrays[f"expect_{tree.index}"] = _as_stored(field, expect.array, tree, expect.dtype)
        if expect.where is not None:
            arrays[f"where_{tree.index}"] = np.broadcast_to(expect.where, expect.array.shape)
        tolerances[tree.index] = {"rtol": expect.rtol, "atol": expect.atol}
    np.savez(folder / "arrays.npz", **arrays)
    trees = {tree.index: {"bytes": tree.n_bytes, "fields": tree.n_fields} for tree in recorder.trees.values()}
    text = json.dumps({"name": case.name, "launches": calls, "roots": trees, "expected": tolerances})
    (folder / CASE_FILE).write_text(text)


def _as_stored(field, array, tree, dtype=None):
    from taichi.lang.util import to_numpy_type

    stored = np.ascontiguousarray(array, dtype=dtype or to_numpy_type(field.dtype))
    if stored.nbytes != tree.n_bytes:
        raise ValueError(f"array of shape {stored.shape} has {stored.nbytes} bytes, its field's tree {tree.n_bytes}")
    return stored


def start_taichi():
    """Start software Vulkan, unless the module of a case brings a ``start_taichi`` of its own."""
    import taichi as ti

    ti.init(arch=ti.vulkan, enable_fallback=False, log_level=ti.ERROR)


def main(folder, *names):
    recorder = Recorder()
    modules = {name.split(":")[0]: importlib.import_module(name.split(":")[0]) for name in names}
    starts = {getattr(module, "start_taichi", start_taichi) for module in modules.values()}
    if len(starts) != 1:
        raise ValueError("the cases of one export must agree on how Taichi starts")
    starts.pop()()
    for name in names:
        module, name = name.split(":")
        case = {case.name: case for case in modules[module].CASES}[name]
        target = pathlib.Path(folder) / name
        target.mkdir(parents=True)
        try:
            _write_case(recorder, case, target)
        except Exception as error:  # whatever Taichi raises is this case's result, and the next case must still run
            (target / ERROR_FILE).write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
