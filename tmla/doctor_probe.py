"""The probes of ``tmla doctor``: each finds out one thing about the backend that runs in this process."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import taichi as ti

from tmla import doctor_device, memory, runtime
from tmla import doctor_kernels as kernels
from tmla.errors import BackendError
from tmla.fields import MAX_FIELD, FieldPool
from tmla.stages.lanes import lane_ops
from tmla.stages.linear import Q8_BLOCK
from tmla.stages.words import WORD
from tmla.upload import Writer

SMALLEST_NORMAL = 2.0**-14  # of f16
_KINDS = ("normal", "subnormal", "zero", "inf", "nan")
_BATCHES, _BATCH = 30, 64  # launches that are timed: the median of so many batches
_READS = 8  # of which the best counts
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Found:
    """What a probe found.

    Attributes
    ----------
    right : bool
        False: the backend's result is wrong.
    text : str
        One line for people.
    data : dict
        The same for programs; units end the names.
    """

    right: bool
    text: str
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


Probe = Callable[[], Iterator[Found]]


def start() -> Iterator[Found]:
    """Which backend really runs, and the variants of kernels and layouts that tmla chooses on it."""
    caps = runtime.caps()
    data = dataclasses.asdict(caps) | {"gpu": caps.gpu, "fuse": caps.fuse}
    lanes = f"{caps.lanes} lanes by ti.simt.{caps.lane_ops}" if caps.gpu else "no lanes"
    kernel = "GPU kernels with shared arrays" if caps.gpu else "CPU loops"
    fused = "several dispatches a kernel" if caps.fuse else "one dispatch a kernel"
    yield Found(True, f"{kernel}, {lanes}, {fused}, quants and cache in {caps.layout}", data)


def device() -> Iterator[Found]:
    """The device's name and what else the system tells about it."""
    data = doctor_device.describe(runtime.caps().arch)
    if not data:
        yield Found(True, "the system was not asked, or does not tell")
        return
    parts = [data["name"], *(data[key] for key in ("kind", "driver") if data.get(key))]
    parts += [f"API {data['api']}"] if "api" in data else []
    parts += [f"memory {_size(data['memory'])}"] if "memory" in data else []
    parts += [f"promises {data['max_buffer']:,} bytes a buffer"] if "max_buffer" in data else []
    parts += [f"also there: {name}" for name in data.get("others", [])]
    yield Found(True, "; ".join(parts), data)


def u8() -> Iterator[Found]:
    """All 256 values of a u8 field, written, copied and read back."""
    pool = FieldPool()
    source, target = pool.field(ti.u8, (257,)), pool.field(ti.u8, (257,))
    values = (np.arange(257) % 256).astype(np.uint8)
    source.from_numpy(values)
    kernels.copy_row(source, target)
    n_wrong = int((target.to_numpy() != values).sum())
    yield Found(n_wrong == 0, _verdict(n_wrong, 257, "values"), {"wrong": n_wrong})


def quants() -> Iterator[Found]:
    """All 256 quants in every place of a word, uploaded and read as the stages do it, and a word's inner product."""
    rows = 16
    values = (np.arange(rows)[:, None] * 17 + np.arange(256 * 3)[None, :] * 11).astype(
        np.uint8
    )  # 11: odd, so all bytes
    w_q, _ = _upload(values, np.ones((rows, values.shape[1] // Q8_BLOCK), np.float16))
    out = FieldPool().field(ti.f32, values.shape)
    expected = values.view(np.int8).astype(np.float32)
    reads = [kernels.read_quants] + [kernels.read_words] * (runtime.caps().layout == "words")
    n_wrong = 0
    for read in reads:
        out.fill(float("nan"))
        read(w_q, out)
        n_wrong += int((out.to_numpy() != expected).sum())
    yield Found(n_wrong == 0, _verdict(n_wrong, expected.size * len(reads), "quants"), {"wrong": n_wrong})


def f16() -> Iterator[Found]:
    """All 65,536 patterns of f16 as scales of Q8_0: copied, read as f32, and written from f32."""
    bits = np.arange(1 << 16).astype(np.uint16).reshape(2048, 32)
    _, w_d = _upload(np.zeros((2048, 32 * Q8_BLOCK), np.uint8), bits.view(np.float16))
    pool = FieldPool()
    copy, value, written = (pool.field(t, bits.shape) for t in (ti.f16, ti.f32, ti.f16))
    kernels.read_scales(w_d, copy, value, written)
    yield judge_f16(copy.to_numpy().view(np.uint16), value.to_numpy(), written.to_numpy().view(np.uint16))


def judge_f16(copy: np.ndarray, value: np.ndarray, written: np.ndarray) -> Found:
    """Compare what became of every f16 pattern, in their order.

    Parameters
    ----------
    copy, value, written : numpy.ndarray, u16, f32 and u16, 65,536 elements each
        The pattern as stored, read as f32, and that written as f16 again.
    """
    bits = np.arange(1 << 16).astype(np.uint16)
    exact = bits.view(np.float16).astype(np.float32)
    size = np.abs(exact)
    masks = (
        (size >= SMALLEST_NORMAL) & np.isfinite(exact),
        (size > 0) & (size < SMALLEST_NORMAL),
        size == 0,
        np.isinf(exact),
        np.isnan(exact),
    )
    nan = masks[4]

    def wrong(different: np.ndarray) -> dict[str, int]:
        return {kind: int((different & mask).sum()) for kind, mask in zip(_KINDS, masks) if (different & mask).any()}

    def f16_differs(found: np.ndarray) -> np.ndarray:
        found = found.reshape(-1)
        return np.where(nan, ~np.isnan(found.view(np.float16)), found != bits)

    value = value.reshape(-1)
    stored = wrong(f16_differs(copy))
    read = wrong(np.where(nan, ~np.isnan(value), value.view(np.uint32) != exact.view(np.uint32)))
    written_wrong = wrong(f16_differs(written))
    payloads = bool((copy.reshape(-1)[nan] == bits[nan]).all())
    data = {"stored_wrong": stored, "read_wrong": read, "written_wrong": written_wrong, "nan_payloads_kept": payloads}
    lost = written_wrong.pop("subnormal", 0)  # what the cache loses by that is far below its rounding
    data["subnormals_lost_in_writing"] = lost
    right = not (stored or read or written_wrong)
    parts = ["all 65,536 patterns exact, with subnormals, inf and -0"] * right
    for what, counts in (("stored", stored), ("read as f32", read), ("written from f32", written_wrong)):
        parts += [f"{n} {kind} patterns {what} wrong" for kind, n in counts.items()]
    if "subnormal" in read or "subnormal" in stored:
        parts.append(
            f"scales below {SMALLEST_NORMAL:.1e} are lost: Q8_0 blocks whose largest weight is below "
            f"{127 * SMALLEST_NORMAL:.4f} do not come out as they are in the file"
        )
    parts += [f"{lost} f32 below {SMALLEST_NORMAL:.1e} not written as they are (harmless in the cache)"] * bool(lost)
    parts += ["payloads of NaN are changed (harmless)"] * (not payloads)
    return Found(right, "; ".join(parts), data)


def shared() -> Iterator[Found]:
    """Block sums through a shared array of the size that the stages use."""
    n_blocks = 5
    x = np.random.default_rng(1).integers(-50, 50, n_blocks * kernels.SHARED).astype(np.float32)  # sums are exact
    pool = FieldPool()
    values, out = pool.field(ti.f32, x.shape), pool.field(ti.f32, (n_blocks,))
    values.from_numpy(x)
    kernels.block_sums(values, out)
    n_wrong = int((out.to_numpy() != x.reshape(n_blocks, -1).sum(1)).sum())
    size = f", {kernels.SHARED * 4 >> 10} KiB in {kernels.BLOCK} threads"
    yield Found(n_wrong == 0, _verdict(n_wrong, n_blocks, "block sums") + size, {"wrong": n_wrong})


def lanes() -> Iterator[Found]:
    """The width of the lanes, and sums and maxima over them."""
    width = runtime.caps().lanes
    x = np.random.default_rng(2).integers(-1000, 1000, 4 * kernels.BLOCK).astype(np.float32)
    pool = FieldPool()
    values, total, top = (pool.field(ti.f32, x.shape) for _ in range(3))
    values.from_numpy(x)
    if width < 1 or width & (width - 1) or kernels.BLOCK % width:
        yield Found(False, f"{width} lanes, expected a power of two up to {kernels.BLOCK}", {"width": width})
        return
    kernels.lane_results(values, total, top)
    groups = x.reshape(-1, width)
    pairs = ((total, groups.sum(1)), (top, groups.max(1)))
    n_wrong = sum(int((f.to_numpy() != expected.repeat(width)).sum()) for f, expected in pairs)
    text = f"{width} lanes by ti.simt.{lane_ops()}; " + _verdict(n_wrong, 2 * x.size, "sums and maxima")
    yield Found(n_wrong == 0, text, {"width": width, "wrong": n_wrong})


def launch() -> Iterator[Found]:
    """Cost of a kernel launch: without arguments as the model does it, with one, and of a read-back."""
    n = FieldPool().field(ti.i32, (64,))
    bound = runtime.Launch(kernels.count, n)
    direct_us = _median_us(bound)
    argument_us = _median_us(lambda: kernels.count_by(n, 2))
    launches = (_BATCHES + 1) * _BATCH
    n_wrong = int((n.to_numpy() != 3 * launches).sum())
    readback_us = _median_us(n.to_numpy, batch=1)
    text = f"{direct_us:.1f} us, with an argument {argument_us:.1f} us, a read-back {readback_us:.0f} us"
    data = {"direct_us": direct_us, "argument_us": argument_us, "readback_us": readback_us}
    if n_wrong:
        text = f"{launches} launches of each kind did not all count; {text}"
    yield Found(n_wrong == 0, text, data | {"wrong": n_wrong})


def bandwidth() -> Iterator[Found]:
    """Best rate at which a kernel reads and adds up the words of a large field."""
    n_bytes = min(512 * _MIB, _share_of_memory(8), runtime.caps().max_buffer or MAX_FIELD)
    n_bytes = 1 << (n_bytes.bit_length() - 1)
    words = FieldPool().field(ti.u64, (n_bytes // WORD,), "the field that is read")
    best_s = sum_large(words, _READS)
    if best_s is None:
        yield Found(False, f"the sum of {n_bytes >> 20} MiB is wrong", {"bytes": n_bytes})
        return
    read_gb_s = n_bytes / best_s / 1e9
    text = f"{read_gb_s:.1f} GB/s (best of {_READS}, {n_bytes >> 20} MiB)"
    yield Found(True, text, {"read_gb_s": read_gb_s, "bytes": n_bytes})


def largest() -> Iterator[Found]:
    """How large a field can be made and reached all over: ever larger ones, up to what tmla uses.

    A quarter of the free memory at most: what is tried must not push others out.
    """
    limit = min(MAX_FIELD, _share_of_memory(4))
    sizes = [size for size in (128 * _MIB, 512 * _MIB, MAX_FIELD) if size <= limit] or [limit]
    good = 0
    for size in sizes:
        pool = FieldPool()
        try:
            field = pool.field(ti.u64, (size // WORD,), "the field that is tried")
        except BackendError as e:
            yield Found(good > 0, f"at least {_size(good)}; {e}", {"bytes": good})
            return
        if not holds_marks(field):
            yield Found(False, f"a field of {_size(size)} does not hold what is written", {"bytes": good})
            return
        good = size // WORD * WORD
        more = "as large as tmla makes one" if size == MAX_FIELD else "no larger one was tried"
        yield Found(True, f"at least {_size(good)} ({more})", {"bytes": good})
        pool.destroy()


def holds_marks(words: Any) -> bool:
    """Write marks all over a u64 field, its last word included, and read them back."""
    n = min(1 << 16, words.shape[0])
    stride = (words.shape[0] - 1) // (n - 1)
    out = FieldPool().field(ti.u64, (n,))
    kernels.mark(words, stride, n)
    kernels.read_marks(words, stride, out)
    last = words.shape[0] - 1
    words[last] = 7
    return bool((out.to_numpy() == np.arange(1, n + 1, dtype=np.uint64)).all()) and words[last] == 7


def sum_large(words: Any, repeat: int) -> float | None:
    """Fill a large u64 field and sum it up `repeat` times: the best time in s, or None if the sum is wrong."""
    n, gpu = words.shape[0], runtime.caps().gpu
    n_threads = min(1 << 18 if gpu else 256, n)
    kernels.fill_words(words, n_threads)
    out = FieldPool().field(ti.u64, (n_threads,))
    best_s = float("inf")
    for _ in range(repeat + 1):  # the first compiles
        runtime.sync()
        before = time.perf_counter()
        kernels.sum_words(words, out, gpu)
        runtime.sync()
        best_s = min(best_s, time.perf_counter() - before)
    expected = kernels.FACTOR * (n * (n - 1) // 2) % 2**64
    return best_s if int(out.to_numpy().sum(dtype=np.uint64)) == expected else None


def _upload(values: np.ndarray, scales: np.ndarray) -> tuple[Any, Any]:
    """Q8_0 blocks of these quants, u8 [O, I], and scales, f16 [O, I/32], uploaded as a model's are: w_q, w_d."""
    n_rows, n_blocks = scales.shape
    blocks = np.empty((n_rows, n_blocks, 2 + Q8_BLOCK), np.uint8)
    blocks[..., :2] = scales[..., None].view(np.uint8)
    blocks[..., 2:] = values.reshape(n_rows, n_blocks, Q8_BLOCK)
    dtype, per_word = (ti.u8, 1) if runtime.caps().layout == "bytes" else (ti.u64, WORD)
    pool = FieldPool()
    w_q = pool.field(dtype, (1, n_rows, n_blocks * Q8_BLOCK // per_word))
    w_d = pool.field(ti.f16, (1, n_rows, n_blocks))
    Writer([w_q, w_d]).put_q8(blocks, w_q, w_d, 0, 0)
    return w_q, w_d


def _share_of_memory(part: int) -> int:
    available = memory.available_bytes()
    return MAX_FIELD if available is None else max(16 * _MIB, available // part)


def _median_us(call: Callable[[], Any], batch: int = _BATCH) -> float:
    times = []
    for _ in range(_BATCHES + 1):
        runtime.sync()
        before = time.perf_counter()
        for _ in range(batch):
            call()
        runtime.sync()
        times.append((time.perf_counter() - before) / batch * 1e6)
    return statistics.median(times[1:])  # the first compiles


def _size(n_bytes: int) -> str:
    return memory.gib(n_bytes) if n_bytes >= 1 << 30 else f"{n_bytes >> 20} MiB"


def _verdict(n_wrong: int, n: int, what: str) -> str:
    return f"{n_wrong} of {n} {what} wrong" if n_wrong else f"all {n:,} {what} right"


PROBES: dict[str, Probe] = {
    probe.__name__: probe for probe in (start, device, u8, quants, f16, shared, lanes, launch, bandwidth, largest)
}
