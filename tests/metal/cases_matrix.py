"""Stages that multiply by Q8_0 matrices, at odd shapes, against their NumPy references."""

import functools

import numpy as np
import taichi as ti

from tests.q8 import q8_fields, random_q8
from tmla import weights
from tmla.stages import absorb, embed, ffn, linear, v_combine

from .case import Built, MetalCase
from .package import Fields, Record, close, only, start_taichi  # noqa: F401 (the export looks for start_taichi here)


def build_matvec(layout):
    rng, field = np.random.default_rng(20), Fields()
    w_q, w_d = random_q8(rng, 2, 37, 96)
    w_d[1, 5, 1] = np.float16(3e-7)  # a subnormal scale is a number
    w, x, y = q8_fields(field, w_q, w_d, layout), rng.standard_normal((1, 96), np.float32), field.poisoned(1, 37)
    call = functools.partial(linear.matvec_q8, *w, 1, field(x), y)
    return Built(call, field.inputs, {y: close(linear.matvec_q8_ref(w_q[1], w_d[1], x[0])[None])})


def build_matvec_heads_and_add():
    rng, field = np.random.default_rng(21), Fields()
    w_q, w_d = random_q8(rng, 3, 15, 64)
    w, x, old = q8_fields(field, w_q, w_d), rng.standard_normal((1, 64), np.float32), rng.standard_normal((1, 15))
    f_x, heads, y = field(x), field.poisoned(1, 3, 5), field(old.astype(np.float32))

    def call():
        linear.matvec_q8_heads(*w, 2, f_x, heads)
        linear.matvec_q8_add(*w, 2, 0.5, f_x, y)

    ref = linear.matvec_q8_ref(w_q[2], w_d[2], x[0])
    return Built(call, field.inputs, {heads: close(ref.reshape(1, 3, 5)), y: close(old + 0.5 * ref)})


def build_embed():
    rng, field = np.random.default_rng(22), Fields()
    w_q, w_d = random_q8(rng, 1, 127, 96)
    w, x = q8_fields(field, w_q, w_d), field.poisoned(1, 96)
    call = functools.partial(embed.embed, *w, 126, 3.0, x)
    return Built(call, field.inputs, {x: close(embed.embed_ref(w_q[0], w_d[0], 126, 3.0)[None])})


def build_absorb(split):
    rng, field = np.random.default_rng(24), Fields()
    h, n, v, c, r = 3, 64, 96, 32, 16
    w_q, w_d = random_q8(rng, 2, *((h * c, n) if split else (h * (n + v), c)))
    q, scale = rng.standard_normal((1, h, n + r), np.float32), rng.uniform(0.05, 0.2, 8).astype(np.float32)
    w, qa, pos = q8_fields(field, w_q, w_d), field.poisoned(1, h, c + r), field(np.array([5], np.int32))
    call = functools.partial(absorb.absorb, *w, 1, field(q), n, v, field(scale), pos, qa, split=split)
    ref = absorb.absorb_ref(w_q[1], w_d[1], q[0], n, v, scale[5], split=split)
    return Built(call, field.inputs, {qa: close(ref[None])})


def build_v_combine(h, v, c, stride, offset):
    rng, field = np.random.default_rng(25), Fields()
    w_q, w_d = random_q8(rng, 2, h * stride, c)
    w, mix, o = q8_fields(field, w_q, w_d), rng.standard_normal((h, c), np.float32), field.poisoned(1, h * v)
    call = functools.partial(v_combine.v_combine, *w, 1, stride, offset, field(mix), o)
    return Built(call, field.inputs, {o: close(v_combine.v_combine_ref(w_q[1], w_d[1], stride, offset, v, mix)[None])})


def build_ffn(n_experts, n_used, fe, fs, gated):
    rng, field, dim = np.random.default_rng(26), Fields(), 64
    w = Record(n_used=n_used, expert_ffn_dim=fe, common_ffn_dim=fs, gated=gated)
    arrays = {}
    shapes = {"gate_exps": (n_experts * fe, dim), "up_exps": (n_experts * fe, dim), "down_exps": (n_experts * dim, fe)}
    shapes |= {"gate": (fs, dim), "up": (fs, dim), "down": (dim, fs)}
    for name, shape in shapes.items():
        if 0 not in shape:
            arrays[name] = random_q8(rng, 2, *shape)
            for suffix, made in zip(("_q", "_d"), q8_fields(field, *arrays[name])):
                setattr(w, name + suffix, made)
    chosen = rng.permutation(n_experts)[:n_used].astype(np.int32)
    share = rng.uniform(0.1, 1.0, n_used).astype(np.float32)
    route = Record(
        expert=field(chosen[None] if n_used else np.zeros((1, 1), np.int32)),
        weight=field(share[None] if n_used else np.zeros((1, 1), np.float32)),
    )
    xn, old = 3.0 * rng.standard_normal((1, dim), np.float32), rng.standard_normal((1, dim), np.float32)
    f_xn, hidden, x = field(xn), field.poisoned(1, n_used * fe + fs), field(old)

    def call():
        ffn.ffn_up(w, 1, f_xn, route, hidden)
        ffn.ffn_down(w, 1, 0.5, route, hidden, x)

    networks = [
        (
            p,
            *(
                [a[1].reshape(n_experts, -1, a.shape[-1])[e] for a in arrays[k + "_exps"]]
                for k in ("gate", "up", "down")
            ),
        )
        for e, p in zip(chosen, share)
    ]
    if fs:
        networks.append((1.0, *([a[1] for a in arrays[k]] for k in ("gate", "up", "down"))))
    parts = [p * ffn.ffn_up_ref(gate, up, xn[0], gated=gated) for p, gate, up, _ in networks]
    out = sum(linear.dequantise_ref(*down) @ part for (*_, down), part in zip(networks, parts))
    expected = {hidden: close(np.concatenate(parts)[None]), x: close(old + 0.5 * out)}
    return Built(call, field.inputs, expected)


def build_put(layout):
    """The upload of a matrix: host blocks into fields, in a stack whose other layer is not touched."""
    rng, field = np.random.default_rng(27), Fields()
    w_q, w_d = random_q8(rng, 5, 96)
    blocks = np.empty((5, 3, 34), np.uint8)
    blocks[..., :2], blocks[..., 2:] = w_d[..., None].view(np.uint8), w_q.reshape(5, 3, 32)
    width, dtype = (96, ti.u8) if layout == "bytes" else (24, ti.u32)
    f_q, f_d = field.poisoned(2, 7, width, dtype=dtype), field.poisoned(2, 7, 3, dtype=ti.f16)
    quants, scales = np.zeros((2, 7, width)), np.zeros((2, 7, 3))
    quants[1, 1:6], scales[1, 1:6] = w_q if layout == "bytes" else w_q.view(np.uint32), w_d
    touched = (1, slice(1, 6))
    expected = {
        f_q: close(quants, 0.0, only(quants.shape, touched)),
        f_d: close(scales, 0.0, only(scales.shape, touched)),
    }
    return Built(lambda: weights.put_q8(blocks, f_q, f_d, 1, 1), field.inputs, expected)


CASES = [
    MetalCase("matvec_q8_words", lambda: build_matvec("words")),
    MetalCase("matvec_q8_bytes", lambda: build_matvec("bytes")),
    MetalCase("matvec_q8_heads_and_add", build_matvec_heads_and_add),
    MetalCase("embed", build_embed),
    MetalCase("absorb_unsplit", lambda: build_absorb(False)),
    MetalCase("absorb_split", lambda: build_absorb(True)),
    MetalCase("v_combine_split", lambda: build_v_combine(3, 32, 64, 32, 0)),
    MetalCase("v_combine_unsplit", lambda: build_v_combine(5, 33, 32, 65, 32)),
    MetalCase("ffn_mixture", lambda: build_ffn(7, 3, 32, 96, True)),
    MetalCase("ffn_routed_only", lambda: build_ffn(5, 5, 64, 0, True)),
    MetalCase("ffn_dense_relu2", lambda: build_ffn(0, 0, 0, 96, False)),
    MetalCase("put_q8_words", lambda: build_put("words")),
    MetalCase("put_q8_bytes", lambda: build_put("bytes")),
]
