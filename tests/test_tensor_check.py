"""Tensors against the configuration, and values that are not finite: all that is refused before a kernel runs."""

import dataclasses

import numpy as np
import pytest

from tests.finite import check_finite
from tests.v2_lite import F_E, VOCAB, C, D, E, H, N, R, V, config, refused, tensor, v2_lite, with_keys
from tests.variants import variant_file
from tmla import tensor_check
from tmla.config import check_tensors, open_checked
from tmla.errors import GGUFError
from tmla.gguf_file import open_gguf


def test_all_unsupported_types_are_listed_at_once():
    gf = v2_lite()
    cfg = config(gf)
    wrong = {"blk.1.attn_kv_b.weight": "Q4_K", "blk.2.attn_q.weight": "F16", "output.weight": "Q6_K",
             "blk.5.ffn_norm.weight": "Q8_0", "blk.7.ffn_up_exps.weight": "Q4_K"}  # fmt: skip
    for name, kind in wrong.items():
        gf.tensors[name] = dataclasses.replace(gf.tensors[name], type=kind)
    del gf.tensors["blk.3.attn_q.weight"]  # comes later than the types
    message = refused(check_tensors, gf, cfg)
    assert "5 tensors" in message
    assert all(name in message and kind in message for name, kind in wrong.items())
    for name in gf.tensors:
        if name.startswith("blk.") and name.endswith(("exps.weight", "attn_output.weight")):
            gf.tensors[name] = dataclasses.replace(gf.tensors[name], type="Q4_K")
    message = refused(check_tensors, gf, cfg)
    assert "blk.0-26.attn_output.weight" in message
    assert "blk.1-26.ffn_down_exps.weight" in message
    check_tensors(v2_lite(), cfg, matrix_types=("Q4_K", "Q8_0"))


def test_every_missing_tensor_is_named():
    for name in v2_lite(n_layers=2).tensors:
        if name in ("token_embd.weight", "output.weight", "blk.1.ffn_gate_inp.weight"):
            continue  # the first and last are looked at before; without output.weight the head is tied
        gf = v2_lite(n_layers=2)
        cfg = config(gf)
        del gf.tensors[name]
        assert name in refused(check_tensors, gf, cfg)


@pytest.mark.parametrize(
    ("name", "change", "found"),
    [
        ("blk.1.attn_kv_b.weight", {"shape": (H * (N + V) - 32, C)}, "[4064, 512], expected [4096, 512]"),
        ("blk.1.attn_kv_b.weight", {"shape": (C, H * (N + V))}, "[512, 4096], expected [4096, 512]"),
        ("blk.1.attn_kv_b.weight", {"shape": (H, N + V, C)}, "[16, 256, 512]"),
        ("blk.1.attn_kv_b.weight", {"n_bytes": 34}, "34 bytes, expected 2228224"),
        ("blk.1.attn_kv_b.weight", {"type": "Q4_0"}, "Q4_0: blk.1.attn_kv_b.weight"),
        ("blk.1.attn_kv_b.weight", {"type": "F16"}, "F16: blk.1.attn_kv_b.weight"),
        ("blk.26.ffn_down_exps.weight", {"shape": (E, F_E, D)}, "[64, 1408, 2048], expected [64, 2048, 1408]"),
        ("output_norm.weight", {"shape": (D + 1,)}, "[2049], expected [2048]"),
        ("output.weight", {"shape": (VOCAB - 1, D)}, "[102399, 2048]"),
        ("blk.1.ffn_gate_inp.weight", {"shape": (E + 1, D)}, "[65, 2048]"),
    ],
)
def test_tensors_refused(name, change, found):
    gf = v2_lite()
    cfg = config(gf)
    gf.tensors[name] = dataclasses.replace(gf.tensors[name], **change)
    message = refused(check_tensors, gf, cfg)
    assert name in message
    assert found in message


def test_rows_that_do_not_tile():
    gf = v2_lite()
    for name in list(gf.tensors):
        if "ffn_down_exps" in name:
            gf.tensors[name] = tensor(name, [E, D, 1400])
        elif "_exps" in name:
            gf.tensors[name] = tensor(name, [E, 1400, D])
    assert "rows of 1400" in refused(check_tensors, gf, config(gf, expert_feed_forward_length=1400))


def test_kv_b_that_32_bits_cannot_index():
    gf = with_keys(v2_lite(n_layers=1), attention__kv_lora_rank=2**19)
    for part, shape in (("kv_b", [H * (N + V), 2**19]), ("kv_a_norm", [2**19]), ("kv_a_mqa", [2**19 + R, D])):
        name = f"blk.0.attn_{part}.weight"
        gf.tensors[name] = tensor(name, shape, "F32" if "norm" in part else "Q8_0")
    message = refused(check_tensors, gf, config(gf))
    assert "'blk.0.attn_kv_b.weight' has 2147483648 values" in message


@pytest.mark.parametrize("at", [0, 1, 65535, 65536, 65537, 131071, 140000])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7C01])
def test_nonfinite_block_is_found(at, bits):
    blocks = np.random.default_rng(at).integers(0, 256, (140001, 34), np.uint8)
    blocks[:, :2] = np.random.default_rng(1).integers(0, 0x7C00, 140001).astype("<u2").view(np.uint8).reshape(-1, 2)
    blocks[5, :2] = np.array([0xFBFF], "<u2").view(np.uint8)  # -65504, the largest there is
    assert tensor_check.first_nonfinite_block(blocks.reshape(-1)) is None
    blocks[at, :2] = np.array([bits], "<u2").view(np.uint8)
    assert tensor_check.first_nonfinite_block(blocks.reshape(-1)) == at


@pytest.mark.parametrize(
    ("name", "offset", "data", "found"),
    [
        ("blk.1.attn_output.weight", 34 * (6 * 5 + 2), b"\x00\x7e", "row 5, block 2 is nan"),  # 6 blocks a row
        ("blk.1.ffn_down_exps.weight", 34 * (64 * 3 + 9), b"\x00\xfc", "row 3, 9, block 0 is -inf"),
        ("token_embd.weight", 34 * (2 * 388 + 1), b"\x00\x7c", "row 388, block 1 is inf"),
        ("blk.2.ffn_norm.weight", 4 * 7, b"\x00\x00\xc0\x7f", "value 7 is nan"),
        ("blk.1.ffn_gate_inp.weight", 4 * (64 * 2 + 3), b"\x00\x00\x80\xff", "value 2, 3 is -inf"),
    ],
)
def test_nonfinite_values_are_named(tmp_path, name, offset, data, found):
    path = variant_file("lite", tmp_path)
    with open_gguf(path) as gf:
        start = gf.tensors[name].offset + offset
    content = bytearray(path.read_bytes())
    content[start : start + len(data)] = data
    path.write_bytes(content)
    gf, cfg = open_checked(path)
    with pytest.raises(GGUFError) as error:
        check_finite(gf, cfg)
    assert f"{name!r}" in str(error.value)
    assert found in str(error.value)
    assert "\n" not in str(error.value)
