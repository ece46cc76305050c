"""Generated model files: structure, determinism, bounded memory, tokenizer tables."""

import math
import tracemalloc

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize, quantize

from benchmarks import model_plan
from benchmarks.gguf_stream import write_gguf
from benchmarks.make_model import main, plan, write_model
from benchmarks.shapes import SHAPES, ModelShape
from benchmarks.vocab import CONTROL_TOKENS, build_vocab
from tests.variants import VARIANTS, variant_file


@pytest.fixture(scope="session")
def variants_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("variants")


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_is_a_valid_file(variants_dir, name):
    path, shape = variant_file(name, variants_dir), VARIANTS[name]
    assert path.stat().st_size < 2e6
    reader = GGUFReader(path)
    expected = {t.name: t for t in plan(shape, 0)}
    assert {t.name for t in reader.tensors} == set(expected)
    for t in reader.tensors:
        assert tuple(reversed(t.shape.tolist())) == expected[t.name].shape
        values = dequantize(t.data, t.tensor_type)
        assert np.isfinite(values).all()
        assert values.std() > 0 or values.size == 1, t.name
    assert reader.fields["general.architecture"].contents() == shape.arch
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == shape.n_vocab


def test_config_and_tensor_check_accept_every_variant(variants_dir):
    gguf_file = pytest.importorskip("tmla.gguf_file", reason="the reader does not exist yet")
    config = pytest.importorskip("tmla.config", reason="the config does not exist yet")
    for name, shape in VARIANTS.items():
        with gguf_file.open_gguf(variant_file(name, variants_dir)) as gf:
            cfg = config.MLAConfig.from_gguf(gf)
            config.check_tensors(gf, cfg)
            found = (cfg.n_layers, cfg.dim, cfg.n_heads, cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.v_head_dim)
            assert found == (
                shape.n_layers, shape.dim, shape.n_heads, shape.kv_lora_rank, shape.qk_nope_head_dim, shape.v_head_dim
            ), name  # fmt: skip
            assert (cfg.n_experts, cfg.n_experts_used) == (shape.n_experts, shape.n_experts_used), name
            assert cfg.shared_ffn_dim == (shape.shared_ffn_dim if shape.n_experts else 0), name
            if shape.n_experts:
                assert cfg.gating == shape.gating, name


def test_q8_0_blocks_survive_quantisation_byte_for_byte(variants_dir):
    reader = GGUFReader(variant_file("lite", variants_dir))
    matrices = [t for t in reader.tensors if t.tensor_type == GGMLQuantizationType.Q8_0]
    assert len(matrices) > 20
    for t in matrices:
        again = quantize(dequantize(t.data, t.tensor_type), t.tensor_type)
        assert again.tobytes() == np.ascontiguousarray(t.data).tobytes(), t.name


@pytest.mark.parametrize(("gain", "shape"), [(1.0, (96, 2048)), (0.25, (3, 64, 352))])
def test_matrix_has_the_standard_deviation_asked_for(gain, shape):
    from benchmarks.make_model import q8_0_chunks

    data = np.concatenate([c.copy() for c in q8_0_chunks(shape, gain, np.random.SeedSequence(5))])
    values = dequantize(data.reshape(-1, 34), GGMLQuantizationType.Q8_0)
    want = gain / math.sqrt(shape[-1])
    assert abs(values.std() / want - 1) < 0.02
    assert abs(values.mean()) < 0.03 * want


def test_row_gains_apply_to_their_rows(variants_dir):
    reader = GGUFReader(variant_file("lite_subnormal", variants_dir))
    t = next(t for t in reader.tensors if t.name == "blk.1.attn_kv_a_mqa.weight")
    std = dequantize(t.data, t.tensor_type).std(axis=1)
    c = VARIANTS["lite_subnormal"].kv_lora_rank
    np.testing.assert_allclose(std[:c].mean() / std[c:].mean(), model_plan.SMALL_LATENT, rtol=0.1)
    scales = np.ascontiguousarray(t.data[:c].reshape(-1, 34)[:, :2]).view(np.float16)
    assert (scales > 0).all()
    assert (scales < 6.1e-5).all()  # f16 subnormals, the point of this variant


def test_same_seed_same_bytes(tmp_path):
    shape = VARIANTS["v3_fused"]
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_model(tmp_path / name, shape, seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b
    assert a != c
    assert len(a) == len(c)


def test_bytes_of_a_tensor_do_not_depend_on_the_other_tensors(tmp_path):
    shape = VARIANTS["lite"]
    write_model(tmp_path / "long", shape)
    write_model(tmp_path / "short", shape.replace(n_layers=2))
    long, short = ({t.name: np.array(t.data) for t in GGUFReader(tmp_path / n).tensors} for n in ("long", "short"))
    np.testing.assert_array_equal(long["blk.1.attn_q.weight"], short["blk.1.attn_q.weight"])


def test_memory_stays_bounded(tmp_path):
    shape = ModelShape("big", dim=2048, n_layers=1, n_heads=16, n_vocab=24000, ffn_dim=2048, n_dense_layers=1)
    write_model(tmp_path / "warm.gguf", VARIANTS["lite"])
    tracemalloc.start()
    (path,) = write_model(tmp_path / "big.gguf", shape)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 120e6
    assert peak < 24e6  # the vocabulary's strings, and one chunk


def test_wrong_amount_of_data_is_refused(tmp_path):
    (good, *_) = plan(VARIANTS["lite"], 0)
    from benchmarks.gguf_stream import TensorPlan

    bad = TensorPlan(good.name, good.shape, good.kind, lambda: iter([b"too short"]))
    with pytest.raises(ValueError, match="9 bytes produced"):
        write_gguf(tmp_path / "x", {}, [bad])


@pytest.mark.parametrize("n_shards", [2, 5])
def test_shards_hold_each_tensor_once(tmp_path, n_shards):
    shape = VARIANTS["glm"]
    paths = write_model(tmp_path / "m.gguf", shape, n_shards=n_shards)
    (whole,) = write_model(tmp_path / "whole.gguf", shape)
    assert [p.name for p in paths] == [f"m-{i + 1:05d}-of-{n_shards:05d}.gguf" for i in range(n_shards)]
    readers = [GGUFReader(p) for p in paths]
    for i, r in enumerate(readers):
        assert r.tensors, paths[i]
        assert r.fields["split.no"].contents() == i
        assert r.fields["split.count"].contents() == n_shards
    want = {t.name: np.array(t.data).tobytes() for t in GGUFReader(whole).tensors}
    got = [(t.name, np.array(t.data).tobytes()) for r in readers for t in r.tensors]
    assert len(got) == len(want)
    assert dict(got) == want
    assert readers[0].fields["split.tensors.count"].contents() == len(want)


@pytest.mark.parametrize("n_vocab", [8, 127, 261, 262, 389, 1024, 20000])
def test_vocabulary_is_consistent(n_vocab):
    tokens, types, merges = build_vocab(n_vocab)
    assert len(tokens) == len(types) == len(set(tokens)) == n_vocab
    assert tuple(tokens[-5:]) == CONTROL_TOKENS
    position = {t: i for i, t in enumerate(tokens)}
    results = []
    for merge in merges:
        left, right = merge.split(" ")
        assert max(position[left], position[right]) < position[left + right]
        results.append(position[left + right])
    assert results == sorted(results)  # rank and id agree
    assert len(results) == sum(t == 1 for t in types) - min(256, types.count(1))


def test_text_goes_in_and_out(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens, _, merges = build_vocab(3000)
    bpe = models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges])
    tok = Tokenizer(bpe)
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    text = "The ferry was late; Überraschung, 1998!\n\tπ ≈ 3.14 \U0001f600"
    ids = tok.encode(text).ids
    assert tok.decode(ids) == text
    assert len(ids) < len(text.encode())


@pytest.mark.parametrize("name", SHAPES)
def test_known_shape_makes_a_plan(name):
    shape = SHAPES[name]
    names = [t.name for t in model_plan.tensors(shape)]
    assert len(names) == len(set(names))
    assert sum(t.n_bytes for t in plan(shape, 0)) > 1e6
    small = shape.replace(n_vocab=300)
    assert model_plan.metadata(small)[f"{shape.arch}.block_count"] == shape.n_blocks


def test_command_line(tmp_path, capsys):
    out = tmp_path / "m.gguf"
    sizes = {"--layers": 2, "--experts": 5, "--experts-used": 2, "--vocab": 300}
    options = [str(x) for item in sizes.items() for x in item]
    assert main([str(out), "--shape", "tiny", "--split", *options, "--set", "rms_eps=1e-5"]) == 0
    fields = GGUFReader(out).fields
    assert fields["deepseek2.block_count"].contents() == 2
    assert fields["deepseek2.expert_count"].contents() == 5
    assert fields["deepseek2.attention.layer_norm_rms_epsilon"].contents() == pytest.approx(1e-5)
    assert fields["deepseek2.attention.head_count_kv"].contents() == 1
    assert "1 file(s)" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert "v2-lite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "dim=100"], "dim is 100, expected a positive multiple of 32"),
        (["--experts-used", "99"], "n_experts_used is 99 of 8"),
        (["--set", "colour=red"], "no such field"),
    ],
)
def test_command_line_refuses(tmp_path, capsys, args, message):
    with pytest.raises(SystemExit) as exit_info:
        main([str(tmp_path / "m.gguf"), "--shape", "tiny", *args])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="qk_nope_head_dim is 48"):
        VARIANTS["lite_nope_48"].replace(split=True)
    with pytest.raises(ValueError, match="groups"):
        VARIANTS["v3"].replace(n_expert_groups=5)
    with pytest.raises(ValueError, match="even"):
        VARIANTS["lite"].replace(qk_rope_head_dim=17)
