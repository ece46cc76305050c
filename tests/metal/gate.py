"""The gate: is every task of a kernel something that Taichi's Metal backend and a Mac would accept?"""

import dataclasses
import json

from . import msl, spirv, tools
from .export import CASE_FILE, ERROR_FILE

METAL_SPIRV = 0x10300
MAX_BUFFERS = 31  # Metal's buffer argument table; Taichi uses the SPIR-V binding as the index in it
MAX_THREADGROUP_BYTES = 32 << 10
MAX_THREADS = 1024
MAX_ROOT_BYTES = 1 << 32  # a tree is addressed with 32-bit byte offsets
BUFFER_TYPES = ("Root", "GlobalTmps", "Args", "Rets", "ListGen", "ExtArr", "ArgPack")  # order of Taichi's enum


@dataclasses.dataclass
class TaskReport:
    """One offloaded task: a row of the table, and what is wrong with it."""

    kernel: str
    task: str
    n_buffers: int = 0
    threadgroup_bytes: int = 0
    n_threads: int = 0
    n_instructions: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def exported_kernels(folder):
    """Kernels of an exported case from its metadata.json. Raises ToolError when the export failed."""
    if (folder / ERROR_FILE).exists():
        raise tools.ToolError("Taichi does not export it: " + (folder / ERROR_FILE).read_text().strip())
    return {kernel["name"]: kernel for kernel in json.loads((folder / "metadata.json").read_text())["kernels"]}


def check(folder):
    """Check an exported case; one :class:`TaskReport` for each task."""
    try:
        kernels = exported_kernels(folder)
    except tools.ToolError as error:
        return [TaskReport(folder.name, "-", problems=[str(error)])]
    trees = json.loads((folder / CASE_FILE).read_text())["roots"]
    reports, texts = [], {}
    for task in [task for kernel in kernels.values() for task in kernel["tasks_attribs"]]:
        report = _check_spirv(folder, task, trees)
        reports.append(report)
        try:
            texts[report.task] = _to_msl(folder / f"{report.task}.spv")
        except tools.ToolError as error:
            report.problems.append(str(error))
    try:
        compile_msl(folder / "gate.cpp", texts)
    except tools.ToolError as error:
        for report in [r for r in reports if f"{r.task}.metal" in str(error)] or reports[:1]:
            report.problems.append(str(error))
    return reports


def _check_spirv(folder, task, trees):
    module = spirv.read((folder / f"{task['name']}.spv").read_bytes())
    patched = folder / f"{task['name']}.declared.spv"
    patched.write_bytes(spirv.declare_subgroups(module))
    problems = list(_broken_rules(module, task, trees))
    try:
        tools.call("spirv-val", "--target-env", "vulkan1.1", patched)
    except tools.ToolError as error:
        problems.append(str(error))
    return TaskReport(
        kernel=folder.name,
        task=task["name"],
        n_buffers=len(module.bindings),
        threadgroup_bytes=module.threadgroup_bytes,
        n_threads=module.group_size,
        n_instructions=module.n_instructions,
        problems=problems,
    )


def _to_msl(path):
    text = msl.from_spirv(path)
    path.with_suffix(".metal").write_text(text)
    msl.parameters(text)
    return text


def compile_msl(path, texts):
    """Compile tasks' MSL against the shim, without running it; `path` is the source to write. Raises ToolError."""
    path.write_text(msl.to_program(texts)[0])
    tools.call("g++", *COMPILE_FLAGS, "-fsyntax-only", path)


COMPILE_FLAGS = (
    "-std=c++20",
    f"-I{msl.SHIM}",
    "-fsigned-char",  # Metal's char
    "-fsingle-precision-constant",  # Metal has no double: 0.5 is a float
    "-fexcess-precision=16",  # half arithmetic rounds after each operation
    "-fwrapv",
    "-fno-strict-aliasing",  # one buffer is bound as several types
    "-Wno-attributes",
)


def _broken_rules(module, task, trees):
    if module.version != METAL_SPIRV:
        yield f"SPIR-V {module.version:#x}, not Metal's {METAL_SPIRV:#x}: compiled for another device before"
    if module.bindings and module.bindings[-1] >= MAX_BUFFERS:
        yield f"buffer index {module.bindings[-1]}: Metal has 0 to {MAX_BUFFERS - 1}; fewer fields in one loop"
    if module.threadgroup_bytes > MAX_THREADGROUP_BYTES:
        yield f"{module.threadgroup_bytes} bytes of threadgroup memory: Metal has {MAX_THREADGROUP_BYTES}"
    if module.group_size > MAX_THREADS:
        yield f"{module.group_size} threads in a threadgroup: Metal has at most {MAX_THREADS}"
    if module.group_size & (module.group_size - 1):
        yield f"block_dim {module.group_size}: on Metal, unlike Vulkan and CUDA, Taichi asserts a power of two"
    for kind in sorted(set(module.refused_atomics)):
        yield f"atomic {kind}: Taichi's float atomic (`+=` on a field or shared array); Metal has none"
    if module.has_float64:
        yield "a 64-bit float: Metal has none"
    if module.n_infinite:
        yield "an infinite constant: Metal compiles with fast math, in which comparisons with it mean nothing"
    if module.truncated:
        yield (
            f"{module.truncated} float subgroup result(s) converted to integer: Taichi takes them for i32 when combined"
            " with each other or negated; wrap each in ti.cast(..., ti.f32)"
        )
    if task["advisory_total_num_threads"] < 1:
        yield "an empty range: Metal refuses a dispatch of no threadgroups"
    for bind in task["buffer_binds"]:
        kind, root = BUFFER_TYPES[bind["buffer"]["type"]], str(bind["buffer"]["root_id"][0])
        if kind not in ("Root", "GlobalTmps", "Args", "ExtArr"):
            yield f"a buffer of kind {kind}: kernels of the package take fields, arrays and scalars and return nothing"
        if kind == "Root" and trees[root]["bytes"] >= MAX_ROOT_BYTES:
            yield f"tree {root} has {trees[root]['bytes']} bytes: offsets in it have 32 bits"
        if kind == "Root" and trees[root]["fields"] != 1:
            yield f"tree {root} holds {trees[root]['fields']} fields, packed unaligned: one FieldsBuilder for each"


def table(reports):
    """The reports as text, one line a task, problems below their line."""
    width = max([len("kernel"), *(len(report.kernel) for report in reports)])
    row = "{:<%d}  {:<32} {:>7} {:>13} {:>7} {:>10}" % width  # noqa: UP031 (the braces are for each line)
    lines = [row.format("kernel", "task", "buffers", "threadgroup B", "threads", "SPIR-V ops")]
    for r in reports:
        lines.append(row.format(r.kernel, r.task, r.n_buffers, r.threadgroup_bytes, r.n_threads, r.n_instructions))
        lines += [f"{'':<{width}}  REFUSED {problem}" for problem in r.problems]
    return "\n".join(lines)
