"""Single stages with arrays of your own: absorb, attention and v-combine, each kernel against its NumPy reference.

No model and no file. At the end, the absorbed result is compared with expanded attention, whose algebra is another.
"""

import gguf
import numpy as np
import taichi as ti

from tmla import runtime
from tmla.fields import FieldPool
from tmla.gguf_file import q8_0_split
from tmla.stages import absorb, attention, v_combine
from tmla.state import AttentionScratch

H, N, R, V, C, T = 4, 64, 32, 48, 96, 100  # heads; widths: no position, rope, value, latent; cached rows
SCALE = (N + R) ** -0.5

rng = np.random.default_rng(1)
runtime.init("cpu")
pool = FieldPool()


def field(array, dtype):
    """A field with the values of an array."""
    out = pool.field(dtype, array.shape)
    out.from_numpy(array)
    return out


@ti.data_oriented
class Bank:
    """What the stages read of a layer: its fields and its widths."""


# a kv_b matrix in Q8_0: per head N key rows, then V value rows, C wide; and T cached rows of C + R values
matrix = rng.standard_normal((H * (N + V), C), np.float32) / 8
blocks = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0).reshape(H * (N + V), C // 32, 34)
quants, scales = (np.ascontiguousarray(part) for part in q8_0_split(blocks))
quants = quants.reshape(1, H * (N + V), C)
rows = rng.standard_normal((T, C + R)).astype(np.float16)
q = rng.standard_normal((H, N + R), np.float32)

w = Bank()
w.first, w.split, w.row_width = 0, False, C + R
w.n_nope, w.n_rope, w.n_v, w.n_latent, w.v_stride, w.v_offset = N, R, V, C, N + V, N
w.k_q = w.v_q = field(quants, ti.u8)
w.k_d = w.v_d = field(scales[None], ti.f16)
w.cache = field(rows[None], ti.f16)

layer, pos = pool.field(ti.i32, (1,)), field(np.array([T - 1], np.int32), ti.i32)
scratch = AttentionScratch(pool, 8, H, C, gpu=False)
qa, mix, o = (pool.field(ti.f32, shape) for shape in ((1, H, C + R), (H, C), (1, H * V)))

absorb.absorb(w, layer, field(q.reshape(1, -1), ti.f32), field(np.full(T, SCALE, np.float32), ti.f32), pos, qa)
fused = qa.to_numpy()[0]
fused[:, C:] = SCALE * q[:, N:]  # the pe window; rope would have turned it
qa.from_numpy(fused[None])
attention.attention(w, layer, pos, qa, scratch)
v_combine.v_combine(w, layer, pos, scratch, mix, o)


def report(stage, got, want):
    """Largest error relative to the largest value."""
    print(f"{stage:22} {np.abs(got - want).max() / np.abs(want).max():.1e}")


report("absorb", fused, absorb.absorb_ref(quants[0], scales, q, N, V, SCALE, split=False))
report("attention", mix.to_numpy(), attention.attention_ref(rows, fused, C))
report("v-combine", o.to_numpy()[0], v_combine.v_combine_ref(quants[0], scales, N + V, N, V, mix.to_numpy()).ravel())

kv_b = quants[0].view(np.int8) * np.repeat(scales.astype(np.float64), 32, axis=1)
w_uk, w_uv = np.split(kv_b.reshape(H, N + V, C), [N], axis=1)  # [H, N, C], [H, V, C]
latent, k_pe = rows.astype(np.float64)[:, :C], rows.astype(np.float64)[:, C:]
score = SCALE * (np.einsum("hn,hnc,tc->ht", q[:, :N], w_uk, latent) + q[:, N:] @ k_pe.T)
p = np.exp(score - score.max(axis=1, keepdims=True))
p /= p.sum(axis=1, keepdims=True)
report("all, against expanded", o.to_numpy()[0], np.einsum("ht,hvc,tc->hv", p, w_uv, latent).ravel())
