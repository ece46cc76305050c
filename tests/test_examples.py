"""Every file of docs/examples runs on CPU and says what is right."""

import os
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import tmla
from tests.conftest import ROOT
from tmla import reference, rope
from tmla.config import open_checked
from tmla.loading import demo_path
from tmla.reference_weights import Weights
from tmla.tokenizer import Tokenizer

FOLDER = ROOT / "docs" / "examples"
EXAMPLES = sorted(path.stem for path in FOLDER.glob("*.py"))
CHECKED = ["attention_picture", "decode_loop", "expert_use", "one_stage"]


@pytest.fixture
def run(tmp_path):
    def call(name, *args):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "ENABLE_TAICHI_HEADER_PRINT": "0"}
        command = [sys.executable, FOLDER / f"{name}.py", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return call


def test_each_is_checked_here():
    assert EXAMPLES == CHECKED, "a new example needs a test of what it prints"


def test_one_stage(run):
    lines = run("one_stage").splitlines()
    errors = {line[:22].strip(): float(line[22:]) for line in lines}
    assert list(errors) == ["absorb", "attention", "v-combine", "all, against expanded"]
    assert 0 < max(errors.values()) < 2e-5, "f32 sums; exactly zero would mean that nothing was computed"


def test_decode_loop_says_what_the_model_says(run, arch):
    said = run("decode_loop").rstrip("\n")
    if arch != "cpu":
        pytest.skip("the example runs the CPU's kernels, and this process another backend")
    model = tmla.load(arch="cpu", n_ctx=256)
    prompt = "The captain of the ship"
    assert said == prompt + tmla.generate(model, prompt, max_tokens=24)


@pytest.fixture(scope="module")
def demo():
    gf, cfg = open_checked(demo_path())
    with gf:
        yield gf, cfg, Tokenizer.from_gguf(gf)


def test_attention_picture(run, demo, tmp_path):
    """The weights, applied to the expanded values, are what the reference's attention gives; the picture shows them."""
    gf, cfg, tokenizer = demo
    example = runpy.run_path(str(FOLDER / "attention_picture.py"))
    ids, layer = tokenizer.encode_prompt(example["TEXT"]), example["LAYER"]
    weights = example["attention_weights"](demo_path(), ids, layer)
    np.testing.assert_allclose(weights.sum(axis=2), 1.0, rtol=1e-12)
    assert not np.triu(weights, 1).any()
    trace, w, block = reference.trace(demo_path(), ids), Weights(gf), f"blk.{layer}."
    latent = trace.cache[layer][:, : cfg.kv_lora_rank]
    heads = [weights[h] @ latent @ reference.head_expansion(w, cfg, block, h)[1] for h in range(cfg.n_heads)]
    got = w.linear(np.concatenate(heads, axis=1), block + "attn_output.weight")
    x = reference.rms_norm(trace.hidden[layer - 1], w.vector(block + "attn_norm.weight"), cfg.rms_eps)
    turns = np.arange(len(ids))[:, None] * rope.rope_frequencies(cfg, len(ids))
    want, _ = reference.attention(w, cfg, block, x, turns, np.ones(len(ids)))
    np.testing.assert_allclose(got, want, atol=1e-10 * np.abs(want).max())

    said = run("attention_picture", "out.svg")
    first = re.search(r"head 0: .* gives ([\d.]+) to token (\d+)", said)
    assert float(first[1]) == pytest.approx(weights[0, -1, int(first[2])], abs=0.006)
    drawn = ET.parse(tmp_path / "out.svg").getroot()
    shown = [float(e.get("opacity")) for e in drawn.iter() if e.get("class") == "c"]
    assert len(shown) == (weights >= 0.01).sum()
    np.testing.assert_allclose(sum(shown), weights[weights >= 0.01].sum(), rtol=0.02)
    kept = ET.parse(ROOT / "docs" / "img" / "attention.svg").getroot()
    assert abs(len(list(kept.iter())) - len(list(drawn.iter()))) < 5, (
        "run the example again: docs/img/attention.svg is old"
    )


def test_expert_use(run, demo):
    _, cfg, tokenizer = demo
    said = run("expert_use")
    texts = runpy.run_path(str(FOLDER / "expert_use.py"))["TEXTS"]
    rows = [line for line in said.splitlines() if line.startswith("  layer")]
    assert len(rows) == len(texts) * cfg.n_moe_layers
    ids = tokenizer.encode_prompt(texts["novel"])
    chosen = reference.trace(demo_path(), ids).experts
    for row, experts in zip(rows, chosen):
        numbers = [int(n) for n in row.partition(":")[2].partition("like")[0].split()]
        assert numbers == [int((experts == e).sum()) for e in range(cfg.n_experts)]
        assert sum(numbers) == len(ids) * cfg.n_experts_used
        assert 1.0 <= float(row.partition("like")[2].split()[0]) <= cfg.n_experts
