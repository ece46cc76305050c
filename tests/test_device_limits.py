"""How large a field may be: what the device promises, what is refused, and by which words."""

import dataclasses

import numpy as np
import pytest
import taichi as ti

import tmla
from tests.conftest import backend
from tmla import fields as pools
from tmla import runtime, vulkan_device
from tmla.config import open_checked
from tmla.errors import BackendError
from tmla.plan import field_bytes, make_plan
from tmla.vulkan_device import VulkanDevice, chosen

ARCH = backend()


@pytest.fixture
def pool(arch):
    pool = pools.FieldPool()
    yield pool
    pool.destroy()


def test_field_beyond_all_limits_is_refused_by_name(pool):
    with pytest.raises(
        BackendError, match=r"gate_q of layers 0 to 8, u8 .*2,147,483,648 bytes .*at most 2,147,483,647"
    ):
        pool.field(ti.u8, (2, 2**30), "gate_q of layers 0 to 8")
    with pytest.raises(BackendError, match=r"a field, f32 .*takes 8,589,934,592 bytes"):
        pool.field(ti.f32, (2**31,))
    assert pool.n_bytes == 0


def test_failed_allocation_is_one_line_with_name_and_bytes(pool, monkeypatch, capfd):
    pool.field(ti.f32, (10,))

    real = ti.FieldsBuilder.finalize

    def fail(builder):
        real(builder)  # else Taichi waits for it
        raise RuntimeError("\n[runtime.cpp:add_root_buffer@739] Failed to allocate root buffer\n")

    monkeypatch.setattr(ti.FieldsBuilder, "finalize", fail)
    with pytest.raises(BackendError) as e:
        pool.field(ti.u64, (3, 5), "cache of layers 2 to 4")
    message = str(e.value)
    assert message.startswith(
        "cache of layers 2 to 4, u64 [3, 5], takes 120 bytes, which could not be allocated beside 40 "
    )
    assert "(Failed to allocate root buffer); ask for a smaller context or take a smaller model" in message
    assert "\n" not in message
    assert ("arch='cpu'" in message) == (ARCH != "cpu")
    assert pool.n_bytes == 40
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(ARCH != "vulkan", reason="a limit that Vulkan alone tells")
def test_vulkan_tells_what_it_promises(arch):
    found = vulkan_device.devices()
    device = chosen(found)
    assert runtime.caps().max_buffer == device.max_buffer >= 1 << 27  # what Vulkan asks of every device
    assert device.name.isprintable()
    assert device.max_allocation is None or device.max_allocation >= 1 << 30


@pytest.mark.skipif(ARCH == "vulkan", reason="there it is told")
def test_other_backends_do_not_tell(arch):
    assert runtime.caps().max_buffer is None


@pytest.mark.parametrize("dtype", [ti.u8, ti.u64, ti.f16, ti.f32])
def test_a_field_beyond_the_promise_is_tried(pool, monkeypatch, dtype):
    """The end of the field is written and read: here it is reached, and left as it was."""
    tried = []
    real = pools._reaches_end
    monkeypatch.setattr(pools, "_reaches_end", lambda f: tried.append(f) or real(f))
    monkeypatch.setattr(runtime, "_caps", dataclasses.replace(runtime.caps(), max_buffer=100))
    small, large = pool.field(ti.u8, (100,)), pool.field(dtype, (3, 101))
    assert tried == [large]
    assert not np.any(large.to_numpy())
    assert small.shape == (100,)


@pytest.mark.parametrize("dtype", [ti.u8, ti.f16])
def test_a_field_of_odd_size_is_zeroed_to_its_end(arch, dtype):
    """In memory that another field has left full: Vulkan's own clearing stops at the last whole word."""
    for size in (1, 303):
        for value in (77, 0):
            pool = pools.FieldPool()
            fields = [pool.field(dtype, (size,)) for _ in range(4)]
            for f in fields:
                assert not np.any(f.to_numpy())
                f.fill(value)
            pool.destroy()


def test_a_field_that_is_not_reached_is_refused(pool, monkeypatch):
    monkeypatch.setattr(runtime, "_caps", dataclasses.replace(runtime.caps(), max_buffer=100))
    monkeypatch.setattr(pools, "_reaches_end", lambda f: False)
    with pytest.raises(
        BackendError, match=r"up_q, u8 .*takes 101 bytes, .*promises 100 bytes a buffer .*maxStorageBuffer"
    ):
        pool.field(ti.u8, (101,), "up_q")


class Memory:
    """Stands in for a field of which the device wraps, or drops, what is beyond its reach."""

    shape = (4, 8)

    def __init__(self, wraps):
        self.values, self.wraps = {}, wraps

    def _place(self, index):
        if index != (0, 0):
            return (0, 0) if self.wraps else None
        return index

    def __setitem__(self, index, value):
        self.values[self._place(index)] = value

    def __getitem__(self, index):
        return self.values.get(self._place(index), 0) if self._place(index) else 0


@pytest.mark.parametrize("wraps", [True, False])
def test_wrapped_and_dropped_ends_are_noticed(wraps):
    assert not pools._reaches_end(Memory(wraps))


# the plan


@pytest.fixture(scope="module")
def cfg(oracle):
    gf, cfg = open_checked(oracle / "dsv2_mini.gguf")
    gf.close()
    return cfg


def fields(plan):
    return [f for bank in (*plan.attention, *plan.ffn) for f in bank.fields.items()]


def test_layers_are_cut_to_what_the_device_promises(cfg):
    whole = make_plan(cfg, 64, "f16", "words")
    largest = max(field_bytes(*f) for _, f in fields(whole))
    cut = make_plan(cfg, 64, "f16", "words", promised=largest - 1)
    assert len(cut.attention) + len(cut.ffn) > len(whole.attention) + len(whole.ffn)
    assert max(field_bytes(*f) for _, f in fields(cut)) < largest
    assert (cut.weight_bytes, cut.cache_bytes) == (whole.weight_bytes, whole.cache_bytes)
    assert make_plan(cfg, 64, "f16", "words", promised=largest) == whole


def test_a_layer_beyond_the_promise_is_planned_all_the_same(cfg):
    """Cutting would not help it; the pool finds out whether the device reaches its end."""
    assert make_plan(cfg, 64, "f16", "words", promised=1) == make_plan(cfg, 64, "f16", "words")
    with pytest.raises(BackendError, match="one field, at most 100 fit"):
        make_plan(cfg, 64, "f16", "words", max_field=100, promised=1)


@pytest.mark.skipif(ARCH != "cpu", reason="two compilations of a model: a minute on software Vulkan")
def test_a_model_cut_to_the_promise_gives_the_same_logits(oracle, arch, monkeypatch):
    path = oracle / "dsv2_mini.gguf"
    caps = runtime.caps()
    whole = tmla.load(path, arch=arch, n_ctx=16)
    plan = make_plan(whole.config, 16, "f16", caps.layout)
    promised = max(field_bytes(*f) for _, f in fields(plan)) - 1
    monkeypatch.setattr(runtime, "_caps", dataclasses.replace(caps, max_buffer=promised))
    cut = tmla.load(path, arch=arch, n_ctx=16)
    assert len(cut.attention_banks) + len(cut.ffn_banks) > len(whole.attention_banks) + len(whole.ffn_banks)
    np.testing.assert_array_equal(cut.prefill([1, 2, 3]), whole.prefill([1, 2, 3]))


# the choice of a device


def device(name, score):
    return VulkanDevice(name, "", "other", "1.3.0", 1 << 30, None, score)


def test_the_first_of_the_highest_score_is_chosen():
    assert chosen([]) is None
    assert chosen([device("a", 400), device("b", 1400), device("c", 1400)]).name == "b"


def test_no_loader_is_no_device(monkeypatch):
    monkeypatch.setattr(vulkan_device, "_LIBRARIES", {})
    assert vulkan_device.devices() == []
    monkeypatch.setattr(vulkan_device, "_LIBRARIES", dict.fromkeys(("linux", "darwin", "win32"), ("libnowhere.so",)))
    assert vulkan_device.devices() == []
