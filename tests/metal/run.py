"""The run: execute the MSL of an exported case on the CPU, and compare its fields with what they must hold."""

import atexit
import dataclasses
import functools
import json
import pathlib
import platform
import shutil
import tempfile

import numpy as np

from . import msl, tools
from .export import CASE_FILE
from .gate import BUFFER_TYPES, COMPILE_FLAGS, exported_kernels

GLOBAL_TMPS_BYTES = 1 << 20  # kGtmpBufferSize of Taichi's runtime
ARGUMENT_DTYPES = {0: "<f2", 1: "<f4", 3: "<i1", 4: "<i2", 5: "<i4", 6: "<i8", 8: "<u1", 9: "<u2", 10: "<u4", 11: "<u8"}


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to compile and schedule: what no hardware promises must not matter."""

    name: str
    flags: tuple[str, ...]
    orders: tuple[str, ...]  # of threads and threadgroups


_SANITIZE = "-fsanitize=shift-exponent,integer-divide-by-zero,float-cast-overflow"
EXACT = Mode(
    "exact",
    ("-O1", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", _SANITIZE, "-fno-sanitize-recover=all"),
    ("forward", "reversed"),
)
# Taichi lets Metal compile with its default, fast math: infinities and NaN count for nothing, sums are reordered,
# and subnormal floats are flushed.
FAST = Mode(
    "fast",
    ("-O2", "-ffast-math", *(["-DSHIM_FLUSH_SUBNORMALS"] if platform.machine() in ("x86_64", "AMD64") else [])),
    ("forward",),
)


@functools.lru_cache
def _driver(mode):
    """The driver's object file, compiled once for each mode in a process."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="metal_driver_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = [*COMPILE_FLAGS, *mode.flags, "-U_FORTIFY_SOURCE"]  # its longjmp check knows one stack only
    tools.call("g++", *flags, "-c", msl.SHIM / "driver.cpp", "-o", folder / "driver.o")
    return folder / "driver.o"


def check(folder, mode=EXACT):
    """Build and run an exported case. Raises ToolError when it cannot run, AssertionError when a value is wrong."""
    case = json.loads((folder / CASE_FILE).read_text())
    arrays = dict(np.load(folder / "arrays.npz"))
    program = build(folder, case, mode)
    work = folder / mode.name
    for name, array in arrays.items():
        kind, root = name.split("_")
        if kind == "in":
            (work / f"root_{root}.bin").write_bytes(array.tobytes())
    for order in mode.orders:
        (work / order).mkdir(exist_ok=True)
        tools.call(program, work, work / order, order)
        for root, tolerance in case["expected"].items():
            expect, where = arrays[f"expect_{root}"], arrays.get(f"where_{root}")
            found = np.frombuffer((work / order / f"root_{root}.bin").read_bytes(), expect.dtype).reshape(expect.shape)
            compare(found, expect, where=where, **tolerance, label=f"{case['name']}: tree {root}, {mode.name}, {order}")


def compare(found, expect, *, rtol, atol, label, where=None):
    """Assert that `found` is close to `expect`, in float64, without a NaN, and that the expectation proves anything."""
    found, expect = found.astype(np.float64), expect.astype(np.float64)
    if where is not None:
        found, expect = found[where], expect[where]
    assert np.abs(expect).max(initial=0) > atol, f"{label}: the expected values are (almost) zero, which proves nothing"
    np.testing.assert_allclose(found, expect, rtol=rtol, atol=atol, equal_nan=False, err_msg=label)


def build(folder, case, mode):
    """Compile the driver and all tasks of a case; the path of the program."""
    work = folder / mode.name
    work.mkdir(exist_ok=True)
    kernels = exported_kernels(folder)
    source = [f'#include "{msl.SHIM}/metal_stdlib"\n#include <metal_atomic>\n#include <simd/simd.h>']
    wrappers, listed = {}, {}
    for kernel in kernels.values():
        for task in kernel["tasks_attribs"]:
            text = msl.from_spirv(folder / f"{task['name']}.spv")
            space = wrappers[task["name"]] = f"task_{len(wrappers)}"
            arguments = msl.call_of(msl.parameters(text))
            source.append(f'namespace {space} {{\n#line 1 "{task["name"]}.metal"\n{msl.to_cpp(text)}')
            source.append(f"static void run() {{ main0({arguments}); }}\n}}")
    rows, roots = [], {"gtmp": GLOBAL_TMPS_BYTES}
    for i, launch in enumerate(case["launches"]):
        kernel = kernels[launch["kernel"]]
        packed = pack_arguments(kernel["ctx_attribs"], launch["scalars"])
        if packed:
            roots[f"args_{i}"] = len(packed)
            (work / f"args_{i}.bin").write_bytes(packed)
        for task in kernel["tasks_attribs"]:
            rows.append(_task_row(task, wrappers[task["name"]], i, case["roots"], roots, listed))
    source += listed.values()
    source.append(_array("Root", "shim_roots", [f'{{"{name}", {size}u}}' for name, size in roots.items()]))
    source.append(_array("Task", "shim_tasks", rows))
    (work / "kernel.cpp").write_text("\n".join(source))
    program = work / "kernel"
    tools.call("g++", *COMPILE_FLAGS, *mode.flags, "-c", work / "kernel.cpp", "-o", work / "kernel.o")
    sanitize = [flag for flag in mode.flags if "sanitize" in flag]  # linking with -ffast-math would flush everywhere
    tools.call("g++", work / "kernel.o", _driver(mode), *sanitize, "-o", program)
    return program


def _array(kind, name, rows):
    text = ",\n    ".join(rows)
    return (
        f"extern const metal_shim::{kind} {name}[] = {{\n    {text}}};\n"
        f"extern const uint {name.replace('shim_', 'shim_n_')} = {len(rows)};"
    )


def _task_row(task, space, launch, tree_sizes, roots, listed):
    """One dispatch for the driver, sized as GfxRuntime::launch_kernel does; notes the buffers that it needs."""
    bindings = []
    for bind in task["buffer_binds"]:
        kind, tree = BUFFER_TYPES[bind["buffer"]["type"]], str(bind["buffer"]["root_id"][0])
        name = {"Root": f"root_{tree}", "GlobalTmps": "gtmp", "Args": f"args_{launch}"}.get(kind)
        if name is None:
            raise tools.ToolError(f"task {task['name']} binds a buffer of kind {kind}, which the driver does not model")
        if kind == "Root":
            roots[name] = tree_sizes[tree]["bytes"]
        bindings.append(f'{{{bind["binding"]}, "{name}"}}')
    name = f"bindings_{space}_{launch}"
    listed[name] = f"static const metal_shim::Binding {name}[] = {{{', '.join(bindings)}}};"
    size = task["advisory_num_threads_per_group"]
    groups = -(-task["advisory_total_num_threads"] // size)
    return f'{{"{task["name"]}", {space}::run, {size}, {groups}, {len(bindings)}, {name}}}'


def pack_arguments(attributes, scalars):
    """Bytes of the argument buffer: each scalar at the offset that the export gives for it."""
    elements = attributes["args_type_"]["content"]["elements_"]
    assert len(elements) == len(scalars), "the export and the recorded launch disagree on the number of scalars"
    packed = bytearray(attributes["args_bytes_"])
    for element, value in zip(elements, scalars):
        dtype = np.dtype(ARGUMENT_DTYPES[element["type"]["content"]["type"]])
        packed[element["offset"] : element["offset"] + dtype.itemsize] = dtype.type(value).tobytes()
    return bytes(packed)
