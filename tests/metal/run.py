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
    max_groups: int | None = None  # of a loop whose end only the device knows; None: as many as Metal starts


_SANITIZE = "-fsanitize=shift-exponent,integer-divide-by-zero,float-cast-overflow"
EXACT = Mode(
    "exact",
    ("-O1", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern", _SANITIZE, "-fno-sanitize-recover=all"),
    ("forward", "reversed"),
    max_groups=2,  # so that a threadgroup takes several turns of its loop, as it does in a large chunk of tokens
)
# Taichi lets Metal compile with its default, fast math: infinities and NaN count for nothing, sums are reordered,
# and subnormal floats are flushed.
FAST = Mode(
    "fast",
    ("-O1", "-ffast-math", *(["-DSHIM_FLUSH_SUBNORMALS"] if platform.machine() in ("x86_64", "AMD64") else [])),
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
    exported_kernels(folder)
    case = json.loads((folder / CASE_FILE).read_text())
    arrays = dict(np.load(folder / "arrays.npz"))
    program = build(folder, case, {name: array.nbytes for name, array in arrays.items()}, mode)
    work = folder / mode.name
    for name, array in arrays.items():
        if name.startswith(("root_", "ext_")):
            (work / f"{name}.bin").write_bytes(array.tobytes())
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


def build(folder, case, array_bytes, mode):
    """Compile the driver and all tasks of a case; the path of the program."""
    work = folder / mode.name
    work.mkdir(exist_ok=True)
    kernels = exported_kernels(folder)
    names = [task["name"] for kernel in kernels.values() for task in kernel["tasks_attribs"]]
    source, wrappers = msl.to_program({name: msl.from_spirv(folder / f"{name}.spv") for name in names})
    sizes = {"gtmp": GLOBAL_TMPS_BYTES} | {f"root_{index}": tree["bytes"] for index, tree in case["roots"].items()}
    sizes |= {name: size for name, size in array_bytes.items() if name.startswith("ext_")}
    rows, used, listed = [], set(), {}
    for i, launch in enumerate(case["launches"]):
        if "tree" in launch:
            rows.append(_poke_row(launch, i, used, listed))
            continue
        kernel = kernels[launch["kernel"]]
        packed = pack_arguments(kernel["ctx_attribs"], launch["arguments"])
        sizes[f"args_{i}"] = len(packed)
        (work / f"args_{i}.bin").write_bytes(packed)
        for task in kernel["tasks_attribs"]:
            rows.append(_task_row(task, wrappers[task["name"]], i, used, listed, mode.max_groups))
    tables = [
        *listed.values(),
        _array("Root", "shim_roots", [f'{{"{name}", {sizes[name]}u}}' for name in sorted(used)]),
        _array("Task", "shim_tasks", rows),
    ]
    (work / "kernel.cpp").write_text("\n".join([source, *tables]))
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


def _task_row(task, space, launch, used, listed, max_groups):
    """One dispatch for the driver, sized as GfxRuntime::launch_kernel does, or smaller where the kernel allows any
    size; notes the buffers that it needs."""
    bindings = []
    for bind in task["buffer_binds"]:
        kind, index = BUFFER_TYPES[bind["buffer"]["type"]], bind["buffer"]["root_id"][0]
        names = {
            "Root": f"root_{index}",
            "GlobalTmps": "gtmp",
            "Args": f"args_{launch}",
            "ExtArr": f"ext_{launch}_{index}",
        }
        if kind not in names:
            raise tools.ToolError(f"task {task['name']} binds a buffer of kind {kind}, which the driver does not model")
        used.add(names[kind])
        bindings.append(f'{{{bind["binding"]}, "{names[kind]}"}}')
    name = f"bindings_{space}_{launch}"
    listed[name] = f"static const metal_shim::Binding {name}[] = {{{', '.join(bindings)}}};"
    size = task["advisory_num_threads_per_group"]
    groups = -(-task["advisory_total_num_threads"] // size)
    span = task.get("range_for_attribs")
    if max_groups and span and not (span["const_begin"] and span["const_end"]):
        groups = min(groups, max_groups)
    return f'{{"{task["name"]}", {space}::run, {size}, {groups}, {len(bindings)}, {name}}}'


def _poke_row(poke, i, used, listed):
    """A host's write between dispatches, as a task of one thread."""
    used.add(f"root_{poke['tree']}")
    values = ", ".join(f"{byte}" for byte in bytes.fromhex(poke["value"]))
    call = f"metal_shim::poke(0, {poke['offset']}, poke_{i}_bytes, sizeof(poke_{i}_bytes))"
    listed[f"poke_{i}"] = (
        f"static const unsigned char poke_{i}_bytes[] = {{{values}}};\n"
        f'static const metal_shim::Binding poke_{i}[] = {{{{0, "root_{poke["tree"]}"}}}};\n'
        f"static void poke_{i}_run() {{ {call}; }}"
    )
    return f'{{"host write", poke_{i}_run, 1, 1, 1, poke_{i}}}'


def pack_arguments(attributes, arguments):
    """Bytes of the argument buffer: scalars and the shapes of arrays, each where the export says that it is."""
    elements = attributes["args_type_"]["content"]["elements_"]
    assert len(elements) == len(arguments), "the export and the recorded launch disagree on the number of arguments"
    packed = bytearray(attributes["args_bytes_"])
    for element, value in zip(elements, arguments):
        content, values, offset = element["type"]["content"], [value], element["offset"]
        slots = [(offset, content)]
        if isinstance(value, list):  # an array's struct: its shape, then a pointer that Metal does not use
            slots = [
                (offset + e["offset"], e["type"]["content"])
                for e in content["elements_"][0]["type"]["content"]["elements_"]
            ]
            values = value
        for (at, kind), number in zip(slots, values):
            dtype = np.dtype(ARGUMENT_DTYPES[kind["type"]])
            packed[at : at + dtype.itemsize] = dtype.type(number).tobytes()
    return bytes(packed)
