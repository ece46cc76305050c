"""The generated MSL of every kernel, executed on the CPU, gives what NumPy gives."""

import pytest

from . import cases, export, mistakes, msl, run, samples, tools

MODES = [run.EXACT, run.FAST]
FAST_MODELS = {"model_lite", "model_q_lora", "model_minicpm3"}  # stages run in both modes, of whole models these
PACKAGE = [
    pytest.param(case.name, mode, id=f"{case.name}-{mode.name}")
    for case in cases.CASES
    for mode in MODES
    if mode is run.EXACT or case.name in FAST_MODELS or not case.name.startswith("model_")
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", [case.name for case in samples.CASES])
def test_samples(exported_samples, name, mode):
    exported_samples.run(name, mode)


@pytest.mark.parametrize(("name", "mode"), PACKAGE)
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


def test_the_fast_models_exist():
    assert {case.name for case in cases.CASES} >= FAST_MODELS


def test_scalars_sit_at_their_offsets():
    elements = [{"offset": 0, "type": {"content": {"type": 5}}}, {"offset": 4, "type": {"content": {"type": 1}}}]
    attributes = {"args_bytes_": 16, "args_type_": {"content": {"elements_": elements}}}
    assert run.pack_arguments(attributes, [-2.0, 0.5]) == bytes.fromhex("feffffff0000003f") + bytes(8)
