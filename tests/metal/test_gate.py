"""Every kernel passes the gate, and each mistake that Metal would not forgive makes it refuse."""

import ast
import pathlib
import re

import numpy as np
import pytest

import tmla

from . import cases, export, gate, mistakes, samples, spirv, tools


def _refusals(reports):
    return [problem for report in reports for problem in report.problems]


@pytest.mark.parametrize("name", [case.name for case in samples.CASES])
def test_samples_pass(exported_samples, name):
    assert not _refusals(exported_samples.check(name))


@pytest.mark.parametrize("name", [case.name for case in cases.CASES])
def test_package_passes(exported_package, name):
    assert not _refusals(exported_package.check(name))


# Kernels of stages that run on CPUs alone and are not called `..._loop`.
CPU_KERNELS = {"_attend_segment", "_attention", "_join_and_combine", "_rope_query", "_spread_segment", "_turn_values"}


def gpu_kernels(folder):
    """Names of the ``@ti.kernel`` functions in a folder's files that GPUs run."""
    return {
        function.name
        for path in folder.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and any(ast.unparse(d) == "ti.kernel" for d in function.decorator_list)
        if not function.name.endswith("_loop") and function.name not in CPU_KERNELS
    }


def test_every_kernel_has_a_case(exported_package):
    """Every stage that is written for a GPU is proven."""
    if lacks := {case.name for case in cases.CASES} - exported_package.names:
        pytest.skip(f"only with all cases: {len(lacks)} are not selected")
    tasks = [r.task for name in exported_package.names for r in exported_package.check(name)]
    exported = {re.sub(r"_c\d+_\d+_\d+_t\d+$", "", task) for task in tasks}
    assert gpu_kernels(pathlib.Path(tmla.__file__).parent / "stages") - exported == set()


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, _, words in mistakes.REFUSED])
def test_mistakes_are_refused(exported_mistakes, name, words):
    problems = _refusals(exported_mistakes.check(name))
    assert any(words in problem for problem in problems), problems


@pytest.mark.parametrize("name", [name for name, *_ in mistakes.WRONG])
def test_gate_alone_cannot_see(exported_mistakes, name):
    """What the run is for: these are valid MSL."""
    assert not _refusals(exported_mistakes.check(name))


@pytest.fixture(scope="module")
def exported_few(tmp_path_factory):
    tools.require_all()
    folder = tmp_path_factory.mktemp("metal_few")
    names = ("several_tasks", "softmax_block", "lanes")
    export.export([case for case in samples.CASES if case.name in names], folder)
    return folder


def test_table_has_a_line_a_task(exported_few):
    reports = gate.check(exported_few / "several_tasks")
    lines = gate.table(reports).splitlines()
    assert len(reports) == 3
    assert len(lines) == 4
    assert all("several_tasks" in line for line in lines[1:])
    assert [report.n_threads for report in reports] == [128, 1, 128]


def test_spirv_facts(exported_few):
    folder = exported_few / "softmax_block"
    (path,) = (p for p in folder.glob("*.spv") if "declared" not in p.name)
    module = spirv.read(path.read_bytes())
    assert (module.threadgroup_bytes, module.group_size, module.refused_atomics) == (512, 128, [])
    listing = tools.call("spirv-dis", path)
    body = listing[listing.index("OpFunction ") :].splitlines()
    assert module.n_instructions == len(body)


def test_declaring_changes_nothing_else(exported_few):
    """The patched copy for spirv-val differs by capabilities and entry point inputs alone."""
    (path,) = (p for p in (exported_few / "lanes").glob("*.spv") if "declared" not in p.name)
    before = path.read_bytes()
    after = spirv.declare_subgroups(spirv.read(before))
    listing = tools.call("spirv-dis", path).splitlines()
    (path.parent / "after.spv.tmp").write_bytes(after)
    patched = tools.call("spirv-dis", path.parent / "after.spv.tmp").splitlines()
    added = [line for line in patched if line not in listing]
    assert all("OpCapability GroupNonUniform" in line or "OpEntryPoint" in line for line in added)
    assert len(patched) - len(listing) == sum("OpCapability" in line for line in added) == 3


def test_not_spirv():
    with pytest.raises(ValueError, match="magic"):
        spirv.read(np.arange(8, dtype="<u4").tobytes())


def test_missing_tool_skips_and_fails_in_ci(monkeypatch):
    monkeypatch.setattr(tools.shutil, "which", lambda program: None)
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="spirv-cross"):
        tools.require_all()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="nothing may be skipped"):
        tools.require_all()


def test_tool_errors_carry_the_words():
    with pytest.raises(tools.ToolError, match="ls failed"):
        tools.call("ls", "/nonexistent")
    with pytest.raises(tools.ToolError, match="did not end"):
        tools.call("sleep", "5", timeout=0.1)
