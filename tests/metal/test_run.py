"""The generated MSL of every kernel, executed on the CPU, gives what NumPy gives."""

import pytest

from . import cases, export, mistakes, msl, run, samples, tools

MODES = [run.EXACT, run.FAST]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", [case.name for case in samples.CASES])
def test_samples(exported_samples, name, mode):
    exported_samples.run(name, mode)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", [case.name for case in cases.CASES])
def test_package(exported_package, name, mode):
    exported_package.run(name, mode)


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, _, words in mistakes.WRONG])
def test_mistakes_are_seen(exported_mistakes, name, words):
    with pytest.raises((tools.ToolError, AssertionError)) as error:
        run.check(exported_mistakes.case(name))
    assert words in str(error.value)


@pytest.fixture(scope="module")
def exported_softmax(tmp_path_factory):
    tools.require_all()
    folder = tmp_path_factory.mktemp("metal_softmax")
    export.export([case for case in samples.CASES if case.name == "softmax_block"], folder)
    return folder / "softmax_block"


@pytest.mark.parametrize(
    ("find", "replace", "words"),
    [
        ("exp(", "sinh(", "sinh"),  # a function of Metal (and of C) that the shim does not model
        ("exp(", "simd_shuffle_down(", "simd_shuffle_down"),
        ("thread_position_in_grid", "threads_per_grid", "not modelled"),
        ("kernel void", "vertex void", "no `kernel void main0"),
    ],
)
def test_unmodelled_metal_is_refused(exported_softmax, monkeypatch, find, replace, words):
    text = msl.from_spirv
    monkeypatch.setattr(msl, "from_spirv", lambda path: text(path).replace(find, replace))
    with pytest.raises(tools.ToolError, match=words):
        run.check(exported_softmax)


def test_scalars_sit_at_their_offsets():
    elements = [{"offset": 0, "type": {"content": {"type": 5}}}, {"offset": 4, "type": {"content": {"type": 1}}}]
    attributes = {"args_bytes_": 16, "args_type_": {"content": {"elements_": elements}}}
    assert run.pack_arguments(attributes, [-2.0, 0.5]) == bytes.fromhex("feffffff0000003f") + bytes(8)
