"""What is planned against the memory: counted without a backend, and refused where it does not fit."""

import pytest

import tmla
from tmla import chunk_state, limits, memory, runtime
from tmla.config import open_checked
from tmla.loading import demo_path
from tmla.runtime import Caps

CAPS = [
    Caps("cpu", "none", 1, "bytes", False, 3),
    Caps("cuda", "warp", 32, "words", False),
    Caps("vulkan", "subgroup", 8, "words", False),
]


@pytest.fixture(scope="module")
def cfg():
    gf, cfg = open_checked(demo_path())
    gf.close()
    return cfg


@pytest.fixture(params=CAPS, ids=lambda c: c.arch)
def caps(request):
    """Of backends that need not run; CUDA's memory is its own, so that nothing is refused there."""
    return request.param


def planned(cfg, n_ctx, caps):
    plan = limits.make_plan(cfg, n_ctx, "f16", caps.layout)
    return plan.weight_bytes + plan.cache_bytes + limits.scratch_bytes(cfg, n_ctx, caps)


def test_what_is_counted_is_what_is_allocated(arch, cfg):
    for n_ctx in (1, 700):
        model = tmla.load(arch=arch, n_ctx=n_ctx)
        assert limits.scratch_bytes(cfg, n_ctx, runtime.caps()) == model.memory["scratch"]
        assert planned(cfg, n_ctx, runtime.caps()) == model.memory["total"]


@pytest.mark.parametrize("n_ctx", [1, 63, 64, 1000])
def test_refused_to_the_byte(cfg, caps, n_ctx, monkeypatch):
    need = planned(cfg, n_ctx, caps) + memory.RESERVE_BYTES
    for missing in (0, 1):
        monkeypatch.setattr(memory, "available_bytes", lambda missing=missing: need - missing)
        if not missing or caps.arch == "cuda":
            assert limits.fit_n_ctx("x.gguf", cfg, n_ctx, "f16", caps) == n_ctx
            continue
        remedy = f"a context of {n_ctx - 1} (--ctx {n_ctx - 1}) would" if n_ctx > 1 else "weights and scratch alone do"
        with pytest.raises(tmla.BackendError) as e:
            limits.fit_n_ctx("x.gguf", cfg, n_ctx, "f16", caps)
        assert f"x.gguf: weights, cache of {n_ctx} positions and scratch need" in str(e.value)
        if caps.arch == "cpu":  # a GPU's scratch of attention is cut in steps: a little less may not fit
            assert remedy in str(e.value)


def test_max_takes_what_there_is(cfg, caps, monkeypatch):
    room = planned(cfg, 700, caps) + memory.RESERVE_BYTES
    monkeypatch.setattr(memory, "available_bytes", lambda: room)
    n_ctx = limits.fit_n_ctx("x.gguf", cfg, "max", "f16", caps)
    if caps.arch == "cuda":
        assert n_ctx == cfg.context_length
        return
    assert (
        planned(cfg, n_ctx, caps) + memory.RESERVE_BYTES
        <= room
        < planned(cfg, n_ctx + 1, caps) + (memory.RESERVE_BYTES)
    )


def test_chunks_are_part_of_it(cfg, monkeypatch):
    """The count knows the buffers of a chunk, and a GPU's chunk is larger."""
    cpu, gpu = (limits.scratch_bytes(cfg, 4096, c) for c in CAPS[:2])
    assert gpu > 2 * cpu
    monkeypatch.setitem(chunk_state.MAX_TOKENS, "cpu", 64)
    assert limits.scratch_bytes(cfg, 4096, CAPS[0]) < cpu / 3


def test_a_backend_that_does_not_run_is_foreseen(arch):
    other = "vulkan" if arch == "cpu" else "cpu"
    assert limits.foreseen_caps(arch) == runtime.caps()
    assert limits.foreseen_caps(other).gpu == (other != "cpu")
    assert limits.foreseen_caps() in (runtime.caps(), limits.foreseen_caps(runtime.default_arch()))
