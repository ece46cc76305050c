"""Matrices of other types requantised to Q8_0: bytes, memory, what is refused, what is told, and whole models."""

import dataclasses
import math

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import quants as gguf_quants

import tmla
from benchmarks.shapes import ModelShape
from tests.finite import check_finite
from tests.gguf_build import Tensor, build, write
from tests.mixed_types import encode, q4_k_m, write_mixed
from tests.v2_lite import config, refused, v2_lite
from tests.variants import VARIANTS
from tmla import reference, requantize, requantize_report
from tmla.config import check_tensors
from tmla.errors import GGUFError
from tmla.gguf_file import open_gguf, q8_0_split
from tmla.tensor_check import REQUANTIZE_TYPES

ODD_ROWS = 37
LITE = ModelShape(
    "lite", dim=256, n_layers=2, n_heads=4, n_vocab=389, ffn_dim=256, kv_lora_rank=256, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=64, n_experts=7, n_experts_used=3, expert_ffn_dim=32, n_shared_experts=2,
    yarn_factor=40.0, yarn_log_mul=0.0707,
)  # fmt: skip


def one_tensor(folder, kind, data, width):
    """A file with one matrix `w` [rows, width], open for requantising."""
    tensor = Tensor("w", (width, len(data)), Q[kind], np.ascontiguousarray(data).tobytes())
    return requantize.open_requantized(open_gguf(write(folder, build(tensors=[tensor]))))


def quantize_row_q8_0(x):
    """One block at a time, in f32, ties away from zero: the definition. f32 [32] -> (f16 scale, int8 [32])."""
    x = np.asarray(x, np.float32)
    d = np.abs(x).max() / np.float32(127)
    inverse = np.float32(1) / d if d else np.float32(0)
    scaled = [float(v * inverse) for v in x]
    return np.float16(d), [int(math.copysign(math.floor(abs(v) + 0.5), v)) for v in scaled]


@pytest.mark.parametrize("kind", REQUANTIZE_TYPES)
def test_blocks_are_those_of_the_whole_tensor(tmp_path, rng, monkeypatch, kind):
    monkeypatch.setattr(requantize, "SLAB_VALUES", 5 * 512)  # 5 rows: no slice below is a multiple
    data = encode(kind, ODD_ROWS, 512, 0.05, rng)
    with one_tensor(tmp_path, kind, data, 512) as gf:
        values = gguf_quants.dequantize(data, Q[kind])
        assert 0.02 < values.std() < 0.1
        whole = gguf_quants.quantize(values, Q.Q8_0).reshape(ODD_ROWS, 16, 34)
        blocks = gf.q8_0_blocks("w")
        assert blocks.shape == whole.shape
        assert len(blocks) == ODD_ROWS
        np.testing.assert_array_equal(np.asarray(blocks), whole)
        for start, stop in [(0, 1), (3, 4), (4, 19), (36, 99), (5, 5), (9, 3)]:
            np.testing.assert_array_equal(blocks[start:stop], whole[start:stop])


def test_quantiser_is_the_reference_one(rng):
    """Ties go away from zero, tiny blocks and zeros are kept: bit for bit."""
    rows = np.concatenate(
        [
            rng.standard_normal((40, 32)),
            np.concatenate([np.full((40, 1), 127.0), rng.integers(-253, 254, (40, 31)) / 2], axis=1),  # x.5 everywhere
            np.nextafter(np.float32([[127.0] + [0.5, -0.5, 1.5, -2.5] * 7 + [0.0] * 3]), np.float32(0)),
            rng.standard_normal((10, 32)) * 1e-6,  # f16 subnormal scales
            np.zeros((1, 32)),
        ]
    ).astype(np.float32)
    blocks = gguf_quants.quantize(rows, Q.Q8_0)
    quants, scales = q8_0_split(blocks)
    for row, found, scale in zip(rows, quants.view(np.int8), scales):
        d, expected = quantize_row_q8_0(row)
        assert scale == d
        assert found.tolist() == expected
    assert np.abs(quants[40:80].view(np.int8) - rows[40:80]).max() == 0.5  # there were ties


def test_q8_0_is_not_touched(tmp_path, rng):
    data = encode("Q8_0", 5, 64, 1.0, rng)
    data[1, :2] = np.float16([1e-7]).view(np.uint8)  # a subnormal scale that rounding again would change
    with one_tensor(tmp_path, "Q8_0", data, 64) as gf:
        blocks = gf.q8_0_blocks("w")
        np.testing.assert_array_equal(blocks.reshape(5, -1), data)
        assert np.shares_memory(blocks, gf.raw("w"))
        base = gf._base
    for closed in (gf, base):
        with pytest.raises(GGUFError, match="was closed"):
            closed.raw("w")


def test_little_is_in_f32_at_a_time(tmp_path, rng, monkeypatch):
    seen = []
    rows = requantize.RequantizedFile.rows

    def spy(self, name, start, stop):
        seen.append((stop - start) * self.tensors[name].shape[-1])
        return rows(self, name, start, stop)

    monkeypatch.setattr(requantize.RequantizedFile, "rows", spy)
    data = np.tile(encode("F16", 64, 1024, 1.0, rng), (32, 1))
    with one_tensor(tmp_path, "F16", data, 1024) as gf:
        blocks = gf.q8_0_blocks("w")[:]
    np.testing.assert_array_equal(blocks[:64], blocks[-64:])
    assert sum(seen) == data.size // 2
    assert max(seen) * requantize.MAX_WORKERS * 4 <= 64e6
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("kind", "at", "value", "found"),
    [
        ("F16", 2 * 40, np.float16("nan"), "nan"),
        ("F32", 4 * 40, np.float32("-inf"), "-inf"),
        ("F32", 4 * 40, np.float32(9e6), "9000000"),  # 9e6 / 127 is beyond f16
        ("BF16", 2 * 40, np.uint16(0x7F80), "inf"),
        ("Q4_0", 18 * 1, np.float16("nan"), "nan"),
        ("Q4_K", 0, np.float16("inf"), "inf"),
    ],
)
def test_values_that_no_block_can_hold_are_named(tmp_path, rng, kind, at, value, found):
    data = encode(kind, 9, 256, 0.1, rng)
    data[7, at : at + value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
    with one_tensor(tmp_path, kind, data, 256) as gf:
        blocks = gf.q8_0_blocks("w")
        assert blocks[:7].shape == (7, 8, 34)
        with pytest.raises(GGUFError) as error:
            blocks[5:9]
    message = str(error.value)
    assert "tensor 'w': row 7, block " in message
    assert ("block 0" if kind == "Q4_K" else "block 1") in message
    assert found in message or (kind == "Q4_K" and "nan" in message)  # inf - inf
    assert message.isprintable()


def test_rows_that_do_not_tile_are_refused(tmp_path, oracle):
    with (
        one_tensor(tmp_path, "F16", np.zeros((3, 48), np.float16), 48) as gf,
        pytest.raises(GGUFError, match="rows of 48 values, expected a multiple of 32"),
    ):
        gf.q8_0_blocks("w")
    with pytest.raises(GGUFError, match=r"kv_lora_rank.*48.*multiple of 32"):
        requantize.open_checked(oracle / "bad" / "bad_kv_lora_48.gguf", requantize=True)
    gf = v2_lite()
    cfg = config(gf)
    for name, info in gf.tensors.items():  # a dense layer of 10,950
        if name in ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"):
            shape = tuple(10950 if n == 10944 else n for n in info.shape)
            gf.tensors[name] = dataclasses.replace(info, shape=shape, type="F16")
    cfg = dataclasses.replace(cfg, ffn_dim=10950)
    assert "rows of 10950" in refused(lambda: check_tensors(gf, cfg, matrix_types=("Q8_0", *REQUANTIZE_TYPES)))


def test_types_that_cannot_be_loaded(tmp_path, rng):
    gf = v2_lite()
    cfg = config(gf)
    name = "blk.3.attn_q.weight"
    gf.tensors[name] = dataclasses.replace(gf.tensors[name], type="IQ2_XXS")
    message = refused(lambda: check_tensors(gf, cfg, matrix_types=("Q8_0", *REQUANTIZE_TYPES)))
    assert f"IQ2_XXS: {name}" in message
    with (
        one_tensor(tmp_path, "TQ2_0", np.zeros((3, 66), np.uint8), 256) as gf,
        pytest.raises(GGUFError, match="tensor 'w' is TQ2_0, expected Q8_0 or F32"),
    ):
        gf.q8_0_blocks("w")


def test_refusals_mention_requantize():
    gf = v2_lite()
    cfg = config(gf)

    def message(**kinds):
        out = v2_lite()
        for name, kind in kinds.items():
            out.tensors[name] = dataclasses.replace(gf.tensors[name], type=kind)
        return refused(check_tensors, out, cfg)

    up, norm = "blk.2.ffn_up_exps.weight", "blk.2.attn_norm.weight"
    assert "pass --requantize (requantize=True): it rounds Q4_K to Q8_0" in message(**{up: "Q4_K"})
    mixed = message(**{up: "F16", "output.weight": "IQ2_XXS"})
    assert "it rounds F16 to Q8_0 while loading, but cannot load IQ2_XXS" in mixed
    assert "requantize" not in message(**{up: "IQ2_XXS"})
    assert "requantize" not in message(**{norm: "Q4_K"})  # a norm is never requantised
    cfg = dataclasses.replace(cfg, ffn_dim=10950)
    down = "blk.0.ffn_down.weight"
    gf.tensors[down] = dataclasses.replace(gf.tensors[down], type="F16", shape=(2048, 10950))
    assert "requantize" not in refused(check_tensors, gf, cfg)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return write_mixed(tmp_path_factory.mktemp("mixed") / "q4_k_m.gguf", LITE, q4_k_m)


def test_report(mixed):
    gf, cfg = requantize.open_checked(mixed, requantize=True)
    with gf:
        report = requantize_report.requantize_report(gf, cfg)
        names = {n: t for n, t in gf.tensors.items() if cfg.expected_tensors()[n].kind == "matrix"}
        assert [t.type for t in report.types] == ["Q4_K", "Q5_0", "Q5_K", "Q6_K", "Q8_0"]
        assert sum(t.n_tensors for t in report.types) == len(names)
        assert report.bytes_before == sum(t.n_bytes for t in names.values())
        assert report.bytes_after == sum(t.n_elements for t in names.values()) // 32 * 34
        for t in report.types:
            squared_error = squared = 0.0
            for name in (n for n, info in names.items() if info.type == t.type):
                quants, scales = q8_0_split(np.asarray(gf.q8_0_blocks(name)))
                rounded = quants.view(np.int8) * scales.astype(np.float64)[..., None]
                values = gf.array(name).astype(np.float64)
                squared_error += ((rounded.reshape(values.shape) - values) ** 2).sum()
                squared += (values**2).sum()
            error = (squared_error / squared) ** 0.5
            assert t.rms_error == pytest.approx(error, rel=0.05)  # of all rows
            assert (0.002 < t.rms_error < 0.01) if t.type != "Q8_0" else t.rms_error == 0.0
        text = report.text()
        assert "matrices 13 Q4_K, 1 Q5_0, 2 Q5_K, 2 Q6_K, 1 Q8_0; " in text
        assert f"{report.bytes_after / 1e6:.1f} MB in memory" in text
        assert "0.52 % of Q5_0" in text
        assert text.count("\n") == 1
        assert cfg.notes[-1] == (
            "Requantised to Q8_0 while loading: 13 matrices of Q4_K, 1 matrix of Q5_0, 2 matrices of Q5_K, "
            "2 matrices of Q6_K."
        )


def test_report_reads_a_sample(mixed, monkeypatch):
    read = []
    rows = requantize.RequantizedFile.q8_0_rows

    def spy(self, name, start, stop):
        read.append((stop - start) * self.tensors[name].shape[-1])
        return rows(self, name, start, stop)

    monkeypatch.setattr(requantize.RequantizedFile, "q8_0_rows", spy)
    monkeypatch.setattr(requantize_report, "SAMPLE_VALUES", 1 << 15)
    gf, cfg = requantize.open_checked(mixed, requantize=True)
    with gf:
        report = requantize_report.requantize_report(gf, cfg)
    assert sum(read) <= len(report.types) * (1 << 15) + 16 * 256 * 8
    assert all(0.002 < t.rms_error < 0.01 for t in report.types if t.type != "Q8_0")


def test_a_q8_0_file_has_nothing_to_report(oracle):
    gf, cfg = requantize.open_checked(oracle / "dsv2_mini.gguf", requantize=True)
    with gf:
        report = requantize_report.requantize_report(gf, cfg)
        assert report.text() == ""
        assert report.bytes_before == report.bytes_after
        assert not any("equantise" in note for note in cfg.notes)


def test_without_the_flag_it_is_refused(mixed):
    with pytest.raises(GGUFError, match="it rounds Q4_K and Q5_0 and Q5_K and Q6_K to Q8_0"):
        requantize.open_checked(mixed)
    with pytest.raises(GGUFError, match="requantize"):
        reference.logits(mixed, [1, 2, 3])


def test_norms_are_still_looked_at(mixed, tmp_path):
    gf, cfg = requantize.open_checked(mixed, requantize=True)
    with gf:
        check_finite(gf, cfg)
        at = gf.tensors["output_norm.weight"].offset
    content = bytearray(mixed.read_bytes())
    content[at : at + 4] = np.float32("nan").tobytes()
    gf, cfg = requantize.open_checked(write(tmp_path, content), requantize=True)
    with gf, pytest.raises(GGUFError, match="output_norm"):
        check_finite(gf, cfg)


@pytest.mark.parametrize(("name", "allowed"), [("bad_kv_b_f16", 0.05), ("bad_kv_b_q4_0", 1.5)])
def test_one_matrix_of_the_oracle(oracle, name, allowed):
    """The oracle's file with one matrix stored otherwise: only that rounding moves its logits."""
    z = np.load(oracle / "dsv2_mini.npz")
    logits = reference.logits(oracle / "bad" / f"{name}.gguf", z["tokens"], requantize=True)
    error = np.abs(logits - z["np_logits"]).max() / z["np_logits"].std()
    assert 1e-6 < error < allowed


def kinds(name, shape):
    """Every type without K blocks, in turn, so that one small file has them all."""
    order = ["F16", "BF16", "F32", "Q4_0", "Q5_0", "Q4_1", "Q5_1", "Q8_0"]
    return order[sum(name.encode()) % len(order)]


@pytest.mark.parametrize(
    ("shape", "kind_of"),
    [
        (LITE, q4_k_m),
        (VARIANTS["v3_fused"].replace(n_layers=2), kinds),  # split, fused, q_lora, narrow rows
        (VARIANTS["plm"].replace(n_layers=2), lambda name, shape: "F16"),  # tied head
    ],
    ids=["q4_k_m", "all_narrow_types", "f16"],
)
def test_model_equals_the_reference(tmp_path, arch, rng, shape, kind_of):
    path = write_mixed(tmp_path / "m.gguf", shape, kind_of)
    tokens = rng.integers(0, shape.n_vocab, 12).tolist()
    expected = reference.logits(path, tokens, requantize=True)
    model = tmla.load(path, arch=arch, n_ctx=32, cache_dtype="f32", requantize=True)
    got = model.prefill(tokens, all_logits=True)
    assert expected.std() > 0.1
    assert np.abs(got - expected).max() / expected.std() < 1e-4
