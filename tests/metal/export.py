"""Export kernels as a Mac would compile them: Taichi's SPIR-V with exactly the capabilities of its Metal device.

Taichi initialises once per process, so :func:`export` runs this file as a program in a fresh one, on software Vulkan.
"""

import contextlib
import dataclasses
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
    left = [f"{case.module}:{case.name}" for case in cases]
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


@dataclasses.dataclass(frozen=True)
class Tree:
    """One tree of fields: its place in the order of making, its size, and how many fields share it."""

    index: int
    n_bytes: int
    n_fields: int


@dataclasses.dataclass(frozen=True)
class Deferred:
    """Stands for the code of a kernel that is compiled ahead of its launches."""

    kernel: object


class Recorder:
    """Sees every tree of fields that is made, and, inside :meth:`launches`, every kernel launch.

    Made before Taichi starts: SPIR-V tasks name trees by the order in which they were made, however many are gone.
    """

    def __init__(self):
        from taichi._lib.core.taichi_python import Program
        from taichi._snode.fields_builder import FieldsBuilder
        from taichi.lang import kernel_impl

        self.trees = {}  # id of the root SNode -> Tree
        self._kernel, self._program = kernel_impl.Kernel, Program
        self._in_call = False  # Taichi's own launch of a kernel that was called
        finalize, launch, compile_kernel = FieldsBuilder._finalize, self._kernel.launch_kernel, Program.compile_kernel

        def recording_finalize(builder, raise_warning, compile_only):
            made = finalize(builder, raise_warning, compile_only)
            root = builder.root
            self.trees[root._id] = Tree(len(self.trees), root._cell_size_bytes, _count_fields(root))
            return made

        def marked_launch(*arguments):
            self._in_call = True
            try:
                return launch(*arguments)
            finally:
                self._in_call = False

        def deferred_compile(program, config, caps, kernel):
            # Code compiled once is kept whatever the capabilities: what is bound for later must not be compiled here.
            return compile_kernel(program, config, caps, kernel) if self._in_call else Deferred(kernel)

        FieldsBuilder._finalize = recording_finalize
        self._kernel.launch_kernel = marked_launch
        Program.compile_kernel = deferred_compile

    def tree_of(self, field):
        """The :class:`Tree` that holds a field."""
        node = field.snode.ptr
        while node.parent is not None:
            node = node.parent
        return self.trees[node.id]

    @contextlib.contextmanager
    def launches(self):
        """Yield a list that fills with (compiled kernel, argument values); nothing is executed.

        Both ways are seen: a call of a kernel, and code compiled ahead and launched at the program itself, which works
        for kernels without arguments alone. Taichi's own kernels, which copy between fields and arrays, are left out:
        arrays read inside are zeros.
        """
        import taichi as ti

        recorded, launch, launch_compiled = [], self._kernel.launch_kernel, self._program.launch_kernel

        def record(kernel, compiled, *arguments):
            if not kernel.func.__module__.startswith("taichi."):
                pairs = zip(kernel.arguments, arguments)
                values = [a for p, a in pairs if not _is_template(p.annotation, ti.template)]
                recorded.append((compiled, values))

        def record_compiled(program, compiled, context):
            recorded.append((compiled.kernel, []))

        self._kernel.launch_kernel, self._program.launch_kernel = record, record_compiled
        try:
            yield recorded
        finally:
            self._kernel.launch_kernel, self._program.launch_kernel = launch, launch_compiled


def _is_template(annotation, template):
    return annotation is template or isinstance(annotation, template)


def _count_fields(node):
    children = node._get_children()
    return sum(map(_count_fields, children)) if children else 1


def _write_case(recorder, case, folder):
    import taichi as ti
    from taichi.lang import impl

    built = case.build()
    with recorder.launches() as launches:
        built.call()
    if not launches:
        raise ValueError(f"case {case.name}: the call launched no kernel")
    caps = [getattr(ti.DeviceCapability, name) for name in METAL_CAPS]
    builder = impl.get_runtime().prog.make_aot_module_builder(ti.vulkan, caps)
    kernels, calls, arrays = {}, [], {}
    for compiled, values in launches:
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
        arrays[f"expect_{tree.index}"] = _as_stored(field, expect.array, tree)
        if expect.where is not None:
            arrays[f"where_{tree.index}"] = np.broadcast_to(expect.where, expect.array.shape)
        tolerances[tree.index] = {"rtol": expect.rtol, "atol": expect.atol}
    np.savez(folder / "arrays.npz", **arrays)
    trees = {tree.index: {"bytes": tree.n_bytes, "fields": tree.n_fields} for tree in recorder.trees.values()}
    text = json.dumps({"name": case.name, "launches": calls, "roots": trees, "expected": tolerances})
    (folder / CASE_FILE).write_text(text)


def _as_stored(field, array, tree):
    from taichi.lang.util import to_numpy_type

    stored = np.ascontiguousarray(array, dtype=to_numpy_type(field.dtype))
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
