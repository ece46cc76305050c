"""Export kernels as a Mac would compile them: Taichi's SPIR-V with exactly the capabilities of its Metal device.

Taichi initialises once per process, so :func:`export` runs this file as a program in a fresh one, on software Vulkan.
"""

import contextlib
import importlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np

from . import tools

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
        Each must be in the list ``CASES`` of the module that defines its build function.
    folder : pathlib.Path

    Raises
    ------
    tools.ToolError
        The process ended without naming the case that killed it.
    """
    environment = dict(os.environ, ENABLE_TAICHI_HEADER_PRINT="0", TI_LOG_LEVEL="error")
    environment["VK_DRIVER_FILES"] = environment["VK_ICD_FILENAMES"] = tools.llvmpipe_icd()
    here = pathlib.Path(__file__).resolve().parents[len(__package__.split("."))]
    environment["PYTHONPATH"] = os.pathsep.join([str(here), *sys.path])
    left = [f"{case.build.__module__}:{case.name}" for case in cases]
    while left:
        command = [sys.executable, "-m", f"{__package__}.export", str(folder), *left]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode == 0:
            return
        unfinished = [name for name in left if not _ended(folder / name.split(":")[1])]
        if len(unfinished) == len(left) and not (folder / left[0].split(":")[1]).exists():
            raise tools.ToolError(f"export ended with code {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        said = (done.stdout + done.stderr)[-2000:]  # the first unfinished case took the process down
        (folder / unfinished[0].split(":")[1] / ERROR_FILE).write_text(f"Taichi died, code {done.returncode}: {said}")
        left = unfinished[1:]


def _ended(folder):
    return (folder / ERROR_FILE).exists() or (folder / CASE_FILE).exists()


class Recorder:
    """Sees every tree of fields that is made, and, inside :meth:`launches`, every kernel launch."""

    def __init__(self):
        from taichi._snode.fields_builder import FieldsBuilder
        from taichi.lang import kernel_impl, snode

        self.roots = {}  # tree id -> root SNode
        self.fields = []
        self._kernel = kernel_impl.Kernel
        finalize, place = FieldsBuilder._finalize, snode.SNode.place

        def recording_finalize(builder, raise_warning, compile_only):
            made = finalize(builder, raise_warning, compile_only)
            self.roots[made.id] = builder.root
            return made

        def recording_place(node, *fields, **options):
            self.fields.extend(fields)
            return place(node, *fields, **options)

        FieldsBuilder._finalize = recording_finalize
        snode.SNode.place = recording_place

    @contextlib.contextmanager
    def launches(self):
        """Yield a list that fills with (compiled kernel, parameter list, arguments); nothing is executed."""
        recorded, launch = [], self._kernel.launch_kernel

        def record(kernel, compiled, *arguments):
            recorded.append((compiled, kernel.arguments, arguments))

        self._kernel.launch_kernel = record
        try:
            yield recorded
        finally:
            self._kernel.launch_kernel = launch


def _write_case(recorder, case, folder):
    import taichi as ti
    from taichi.lang import impl

    recorder.fields.clear()
    built = case.build()
    with recorder.launches() as launches:
        built.call()
    if not launches:
        raise ValueError(f"case {case.name}: the call launched no kernel")
    caps = [getattr(ti.DeviceCapability, name) for name in METAL_CAPS]
    builder = impl.get_runtime().prog.make_aot_module_builder(ti.vulkan, caps)
    kernels, calls = {}, []
    for compiled, parameters, arguments in launches:
        if compiled not in kernels:
            kernels[compiled] = f"k{len(kernels)}"
            builder.add(kernels[compiled], compiled)
        scalars = [float(a) for p, a in zip(parameters, arguments) if not isinstance(p.annotation, ti.template)]
        calls.append({"kernel": kernels[compiled], "scalars": scalars})
    builder.dump(str(folder), "")
    inputs = {f: f.to_numpy() for f in recorder.fields} if built.inputs is None else built.inputs
    arrays = {f"in_{_root(f)}": _as_stored(f, array, recorder.roots) for f, array in inputs.items()}
    tolerances = {}
    for field, expect in built.expected.items():
        root = _root(field)
        arrays[f"expect_{root}"] = _as_stored(field, expect.array, recorder.roots)
        if expect.where is not None:
            arrays[f"where_{root}"] = np.broadcast_to(expect.where, expect.array.shape)
        tolerances[root] = {"rtol": expect.rtol, "atol": expect.atol}
    np.savez(folder / "arrays.npz", **arrays)
    roots = {str(id): {"bytes": root._cell_size_bytes, "fields": _places(root)} for id, root in recorder.roots.items()}
    text = json.dumps({"name": case.name, "launches": calls, "roots": roots, "expected": tolerances})
    (folder / CASE_FILE).write_text(text)


def _root(field):
    return field.snode._snode_tree_id


def _places(node):
    children = node._get_children()
    return sum(_places(child) for child in children) if children else 1


def _as_stored(field, array, roots):
    from taichi.lang.util import to_numpy_type

    stored = np.ascontiguousarray(array, dtype=to_numpy_type(field.dtype))
    room = roots[_root(field)]._cell_size_bytes
    if stored.nbytes != room:
        raise ValueError(f"array of shape {stored.shape} has {stored.nbytes} bytes, its field's tree {room}")
    return stored


def main(folder, *names):
    import taichi as ti

    ti.init(arch=ti.vulkan, offline_cache=False, log_level=ti.ERROR)
    if ti.lang.impl.current_cfg().arch != ti.vulkan:
        raise SystemExit("no Vulkan device: Taichi fell back to another backend")
    recorder = Recorder()
    for name in names:
        module, name = name.split(":")
        case = {case.name: case for case in importlib.import_module(module).CASES}[name]
        target = pathlib.Path(folder) / name
        target.mkdir(parents=True)
        try:
            _write_case(recorder, case, target)
        except Exception as error:  # whatever Taichi raises is this case's result, and the next case must still run
            (target / ERROR_FILE).write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
