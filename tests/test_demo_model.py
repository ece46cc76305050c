"""The shipped demo model against its frozen perplexity, and the parts of its tools that need no PyTorch."""

import json
import pathlib

import numpy as np
import pytest

from tmla import reference
from tmla.gguf_file import open_gguf
from tmla.tokenizer import Tokenizer
from tools.demo_model.corpus import HELD_OUT_EVERY, clean, dialogues, paragraphs, split_of
from tools.demo_model.ngram import KneserNey

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEMO = ROOT / "tmla" / "data" / "demo.gguf"
EXCERPT = json.loads((ROOT / "tests" / "data" / "demo_excerpt.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trace():
    return reference.trace(DEMO, EXCERPT["ids"])


def test_excerpt_tokens():
    with open_gguf(DEMO) as gf:
        tokenizer = Tokenizer.from_gguf(gf)
        assert tokenizer.encode(EXCERPT["text"]) == EXCERPT["ids"]
        assert tokenizer.decode(EXCERPT["ids"], skip_special=True) == EXCERPT["text"]


def test_excerpt_perplexity(trace):
    logits, targets = trace.logits[:-1], EXCERPT["ids"][1:]
    assert len(logits) > 512  # beyond YaRN's original context
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    perplexity = np.exp(-log_p[np.arange(len(targets)), targets].mean())
    # float64 on both sides: only the order of sums differs
    np.testing.assert_allclose(perplexity, EXCERPT["perplexity"], rtol=1e-9)


def test_excerpt_uses_every_expert(trace):
    for layer, experts in enumerate(trace.experts):
        counts = np.bincount(experts.ravel(), minlength=8)
        assert counts.min() > 0, f"expert layer {layer}: {counts}"


def test_file_is_small_and_named():
    assert DEMO.stat().st_size <= 12_000_000
    with open_gguf(DEMO) as gf:
        assert gf.metadata["general.name"] == "tmla demo"
        assert gf.metadata["general.license"] == "mit"
        assert gf.metadata["general.dataset.count"] == 4


def test_splits_are_disjoint_and_steady():
    splits = [split_of(n) for n in range(4 * HELD_OUT_EVERY)]
    assert splits.count("test") == splits.count("valid") == 4
    assert splits[:HELD_OUT_EVERY] == splits[HELD_OUT_EVERY : 2 * HELD_OUT_EVERY]


def test_clean_text():
    assert clean("“Ah!”—said  he—_very_\nwell’s snake_case") == '"Ah!"--said he--very well\'s snake_case'
    assert paragraphs(["one", "two", "", " ", "three"]) == "one two\n\nthree"


def test_dialogues_keep_speech_alone():
    text = '"Are you well," said he, "my dear?"\n\n"I am well."\n\n"Good."\n\nHe left the room.\n\n"Alone again."'
    assert dialogues(text) == [["Are you well, my dear?", "I am well."]]  # "Good." has no answer
    assert dialogues('"Only one speaker here."\n\nNobody answered.') == []


@pytest.mark.parametrize("order", [1, 2, 3])
def test_kneser_ney_is_a_distribution(rng, order):
    vocabulary = 7
    ids = rng.integers(0, vocabulary - 1, 400)  # the last token is never seen
    model = KneserNey(ids, order, vocabulary)
    for history in ([1, 2], [3, 3], [6, 6]):  # 6: an unseen history
        p = [model.probabilities([*history[3 - order :], w])[-1] for w in range(vocabulary)]
        np.testing.assert_allclose(sum(p), 1.0, rtol=1e-12)
        assert min(p) > 0


def test_kneser_ney_knows_a_repeated_text():
    ids = np.tile([0, 1, 2, 3, 4], 50)
    assert KneserNey(ids, 3, 8).probabilities(ids).min() > 0.9
