"""From SPIR-V to Metal's language, and from that to C++ that a CPU can run."""

import dataclasses
import pathlib
import re

from . import tools

SHIM = pathlib.Path(__file__).parent / "shim"
# As MetalPipeline::create_compute_pipeline of Taichi 1.7.4 sets SPIRV-Cross up on a device with 64-bit integers.
CROSS_OPTIONS = ("--msl", "--msl-version", "20300", "--msl-decoration-binding")

# Values that Metal passes to a kernel by attribute, and how the driver names them.
BUILTINS = {
    "thread_position_in_grid": "uint3(metal_shim::position_in_grid())",
    "thread_position_in_threadgroup": "uint3(metal_shim::position_in_threadgroup())",
    "threadgroup_position_in_grid": "uint3(metal_shim::position_of_threadgroup())",
    "threadgroups_per_grid": "uint3(metal_shim::threadgroups_in_grid())",
    "thread_index_in_simdgroup": "metal_shim::lane_in_simdgroup()",
    "thread_execution_width": "metal_shim::simd_width",
    "threads_per_simdgroup": "metal_shim::simd_width",
}

_KERNEL = re.compile(r"^kernel void main0\((?P<parameters>.*)\)$", re.M)
_PARAMETER = re.compile(r"\[\[(?P<attribute>\w+)(?:\((?P<index>\d+)\))?\]\]")
_BUFFER_STRUCT = re.compile(r"^(struct \w+_ptr\n\{\n) +(\w+) _m0\[1\];$", re.M)
_THREADGROUP_ARRAY = re.compile(r"^( +)threadgroup (\w+) (\w+)\[(\d+)\];$", re.M)
_UNSAFE_ARRAY = re.compile(r"^template<typename T, size_t Num>\nstruct spvUnsafeArray\n\{.*?^\};$", re.M | re.S)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of ``main0``: a buffer index, or the name of a built-in value."""

    attribute: str
    index: int | None


def from_spirv(path):
    """MSL text of a SPIR-V file. Raises ToolError with SPIRV-Cross's words when it cannot."""
    return tools.call("spirv-cross", *CROSS_OPTIONS, path)


def parameters(text):
    """Parameters of the kernel in order. Raises ToolError for an attribute that the driver does not model."""
    found = _KERNEL.search(text)
    if found is None:
        raise tools.ToolError("the MSL has no `kernel void main0(...)` on a line of its own")
    listed = []
    for match in _PARAMETER.finditer(found["parameters"]):
        attribute, index = match["attribute"], match["index"]
        if attribute != "buffer" and attribute not in BUILTINS:
            raise tools.ToolError(f"kernel parameter attribute [[{attribute}]] is not modelled by the driver")
        listed.append(Parameter(attribute, None if index is None else int(index)))
    return listed


def to_cpp(text):
    """The same kernel with checked buffers, shared threadgroup arrays and the shim's own local arrays."""
    text = _UNSAFE_ARRAY.sub("", text)
    text = _BUFFER_STRUCT.sub(r"\1    metal_shim::Buffer<\2> _m0;", text)
    return _THREADGROUP_ARRAY.sub(r"\1static metal_shim::ThreadgroupArray<\2, \4> \3;", text)


def to_program(texts):
    """One C++ source of several tasks' MSL, by name, and the namespace of each: it holds ``main0`` and ``run()``."""
    parts = ["#include <metal_stdlib>", "#include <metal_atomic>", "#include <simd/simd.h>"]
    spaces = {}
    for name, text in texts.items():
        spaces[name] = f"task_{len(spaces)}"
        arguments = ", ".join(
            f"metal_shim::bound({p.index})" if p.attribute == "buffer" else BUILTINS[p.attribute]
            for p in parameters(text)
        )
        parts.append(f'namespace {spaces[name]} {{\n#line 1 "{name}.metal"\n{to_cpp(text)}')
        parts.append(f"static void run() {{ main0({arguments}); }}\n}}")
    return "\n".join(parts), spaces
