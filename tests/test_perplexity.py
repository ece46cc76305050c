"""Perplexity: windows, the frozen number of the demo model, llama.cpp's way of scoring, the command, the dump."""

import io
import json
import math
import os
import sys

import numpy as np
import pytest

import tmla
from tests.conftest import ROOT, backend
from tests.test_generate import FakeModel
from tmla import cli, cli_perplexity, log_probs
from tmla.errors import ContextError, ParameterError
from tmla.loading import demo_path
from tmla.logits_file import LogitsFile
from tmla.perplexity import make_windows, perplexity, text_ids

ARCH = backend()
EXCERPT = json.loads((ROOT / "tests" / "data" / "demo_excerpt.json").read_text(encoding="utf-8"))
IDS, N_CTX = EXCERPT["ids"], 600
BOS = IDS[0]


@pytest.fixture(scope="module")
def model():
    return tmla.load(arch=ARCH, n_ctx=N_CTX, cache_dtype="f32")


@pytest.fixture(scope="module")
def text_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "excerpt.txt"
    path.write_text(EXCERPT["text"], encoding="utf-8")
    return path


def nats_of(model, inputs, targets):
    """By the definition, one window from an empty cache; float64 throughout."""
    model.reset()
    logits = model.prefill(inputs, all_logits=True).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return -np.log(p[np.arange(len(targets)), targets])


# windows


@pytest.mark.parametrize("bos", [None, 99])
@pytest.mark.parametrize(
    ("n", "ctx", "stride"), [(2, 2, 1), (20, 6, 3), (20, 6, 6), (21, 6, 4), (20, 50, 7), (9, 4, 1)]
)
def test_every_token_is_scored_once(n, ctx, stride, bos):
    ids = list(range(n))
    windows = make_windows(ids, ctx, stride, bos)
    scored = [t for w in windows for t in w.targets[w.first :]]
    assert scored == ids[1:]
    for k, w in enumerate(windows):
        start = k * stride
        assert w.inputs[0] == (start if bos is None else bos)
        assert w.inputs[1:] == ids[start + 1 : start + len(w.inputs)]
        assert w.targets == ids[start + 1 : start + 1 + len(w.inputs)]
        assert len(w.inputs) == ctx or w is windows[-1]
        assert w.first < len(w.targets)
        assert w.first >= ctx - stride or k == 0 or w is windows[-1]


def test_halves_are_those_of_llama_cpp():
    """``first = n_ctx / 2``; the targets are tokens first + 1 to n_ctx - 1 of each whole chunk."""
    windows = make_windows(list(range(35)), 10, 10, 99, halves=True)
    assert [w.inputs for w in windows] == [[99, *range(s + 1, s + 9)] for s in (0, 10, 20)]
    assert [w.targets[w.first :] for w in windows] == [list(range(s + 6, s + 10)) for s in (0, 10, 20)]


@pytest.mark.parametrize(
    ("n", "ctx", "stride", "halves", "message"),
    [
        (1, 8, 4, False, "has 1 tokens, expected at least 2"),
        (15, 8, 8, True, "has 15 tokens, expected at least 16"),
        (20, 1, 1, False, "ctx is 1"),
        (20, 8, 0, False, "stride 0"),
        (20, 8, 9, False, "stride 9"),
    ],
)
def test_windows_that_cannot_be(n, ctx, stride, halves, message):
    with pytest.raises(ParameterError, match=message):
        make_windows(list(range(n)), ctx, stride, halves=halves)


# numbers


def test_the_frozen_number(model):
    result = perplexity(model, EXCERPT["text"], ctx=N_CTX)
    # f32 against the float64 that was frozen: its mean KL is 1e-13
    np.testing.assert_allclose(result.perplexity, EXCERPT["perplexity"], rtol=1e-5)
    assert (result.n_tokens, result.n_windows, result.n_fed, result.ctx) == (545, 1, 545, N_CTX)
    np.testing.assert_allclose(result.nats[:90], nats_of(model, IDS[:90], IDS[1:91]), rtol=1e-4, atol=1e-5)
    # the standard error of a mean, carried through exp
    expected = np.exp(result.nats.mean()) * result.nats.std(ddof=1) / math.sqrt(545)
    np.testing.assert_allclose(result.standard_error, expected, rtol=1e-12)
    assert result.tok_s == result.n_fed / result.seconds


@pytest.mark.parametrize("halves", [False, True])
def test_windows_are_computed_from_an_empty_cache(model, monkeypatch, halves):
    """Also where the logits come in pieces, and the beginning of a window is not looked at."""
    monkeypatch.setattr(sys.modules["tmla.perplexity"], "rows_at_a_time", lambda n_vocab: 11)
    model.prefill([5, 6])
    told = []
    result = perplexity(
        model, IDS[1:101], ctx=40, stride=None if halves else 15, halves=halves, progress=lambda *a: told.append(a)
    )
    starts = range(0, 80, 40) if halves else range(0, 75, 15)
    expected = []
    for start in starts:
        targets = IDS[start + 1 : min(101, start + (40 if halves else 41))]
        nats = nats_of(model, [BOS, *IDS[start + 1 : start + len(targets)]], targets)
        expected.append(nats[20:] if halves else nats if start == 0 else nats[25:])
    np.testing.assert_allclose(result.nats, np.concatenate(expected), rtol=1e-4, atol=1e-5)
    assert told[-1] == (result.n_fed, result.n_fed)
    assert len(expected) == result.n_windows


def test_cross_entropy_in_pieces(rng, monkeypatch):
    logits = (30 * rng.standard_normal((9, 50))).astype(np.float32)
    targets = rng.integers(0, 50, 9)
    monkeypatch.setattr(log_probs, "_BLOCK_VALUES", 100)
    x = logits.astype(np.longdouble)
    expected = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1) - x[np.arange(9), targets]
    np.testing.assert_allclose(log_probs.cross_entropy(logits, targets), expected.astype(np.float64), rtol=1e-12)


def test_memory_stays_bounded():
    """At a vocabulary of 102,400 a piece of logits is 33 MB, and the temporaries 8 MB."""
    assert log_probs.rows_at_a_time(102_400) * 102_400 * 4 < 40e6
    assert max(s.stop - s.start for s in log_probs.blocks(200, 102_400)) * 102_400 * 8 < 10e6
    assert log_probs.rows_at_a_time(7) == 512


def test_texts_and_ids(model):
    assert text_ids(model.tokenizer, EXCERPT["text"]) == (IDS, BOS)
    assert text_ids(model.tokenizer, np.array(IDS[1:])) == text_ids(model.tokenizer, IDS) == (IDS, BOS)
    assert text_ids(None, [4, 5]) == ([4, 5], None)
    with pytest.raises(ParameterError, match="no tokenizer"):
        text_ids(None, "x")
    with pytest.raises(ContextError, match=f"ctx is 601, but the model's context holds {N_CTX}"):
        perplexity(model, IDS, ctx=601)
    with pytest.raises(ContextError, match="not in the vocabulary"):
        perplexity(model, [5, 10**6, 7])


def test_a_model_that_knows_nothing():
    class Uniform(FakeModel):
        def prefill(self, tokens, all_logits=False):
            self.fed += tokens
            return np.zeros((len(tokens), self.config.n_vocab) if all_logits else self.config.n_vocab, np.float32)

    model = Uniform(n_ctx=64)
    result = perplexity(model, list(range(3, 150)))
    np.testing.assert_allclose(result.perplexity, model.config.n_vocab, rtol=1e-12)
    assert (result.ctx, result.stride) == (64, 32)
    assert result.standard_error < 1e-9


# the dump


def test_dump(model, tmp_path):
    path = tmp_path / "logits.npz"
    result = perplexity(model, IDS[:30], ctx=20, stride=10, dump=path)
    z = np.load(path, allow_pickle=False)
    assert z["starts"].tolist() == [0, 20]
    assert z["tokens"].tolist() == [*IDS[:20], BOS, *IDS[11:29]]
    model.reset()
    first = model.prefill(IDS[:20], all_logits=True)
    np.testing.assert_allclose(z["logits"][:20], first, rtol=1e-4, atol=1e-4)
    assert z["logits"].dtype == np.float32
    assert result.nats.shape == (29,)
    np.testing.assert_array_equal(result.nats, perplexity(model, IDS[:30], ctx=20, stride=10, dump=path).nats)
    with LogitsFile(path) as f:
        np.testing.assert_array_equal(f.read(3), z["logits"][:3])
    with pytest.raises(ParameterError, match="cannot be written: no such file"):
        perplexity(model, IDS[:30], dump=tmp_path / "none" / "x.npz")
    assert os.listdir(tmp_path) == ["logits.npz"]


# the command


@pytest.fixture
def command(model, monkeypatch, capsys):
    monkeypatch.setattr(cli_perplexity, "load_with_bar", lambda args: (model, 0.0, 0.0))

    def call(*args):
        code = cli.main(["perplexity", *map(str, args)])
        return code, *capsys.readouterr()

    return call


def test_command(command, model, text_path, tmp_path, monkeypatch):
    code, out, err = command(demo_path(), text_path, "--ctx", N_CTX)
    assert code == 0
    assert out.startswith(f"perplexity {EXCERPT['perplexity']:.4f} +- ")
    assert f"; 545 tokens scored; 1 window of {N_CTX}, stride 300; {ARCH}: " in out
    assert "tmla demo" in err
    short = model.tokenizer.decode(IDS[1:81])
    monkeypatch.setattr(sys, "stdin", io.StringIO(short))
    code, out, err = command("-", "--json", "--ctx", 100)
    assert err.startswith("tmla: no FILE given: this is the demo model")
    found, expected = json.loads(out), perplexity(model, IDS[:81], ctx=100)
    np.testing.assert_allclose(found["perplexity"], expected.perplexity, rtol=1e-6)
    np.testing.assert_allclose(found["standard_error"], expected.standard_error, rtol=1e-6)
    assert (found["tokens"], found["windows"], found["ctx"], found["arch"]) == (80, 1, 100, ARCH)
    path, text = tmp_path / "x.npz", tmp_path / "short.txt"
    text.write_text(short, encoding="utf-8")
    code, out, err = command(text, "--ctx", 20, "--halves", "--dump", path, "--json")
    assert (json.loads(out)["tokens"], json.loads(out)["windows"]) == (4 * 9, 4)
    assert f"{path}: tokens and logits of 76 positions" in err
    assert np.load(path)["logits"].shape == (76, 4096)


def test_command_refuses_before_loading(capsys, monkeypatch, text_path, tmp_path):
    monkeypatch.setattr(cli_perplexity, "load_with_bar", lambda args: pytest.fail("loaded"))
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for args, message in (
        ([tmp_path / "none"], "none: no such file"),
        ([empty], "the text has 1 tokens, expected at least 2"),
        ([text_path, "--halves", "--ctx", "400"], "has 546 tokens, expected at least 800"),
        ([text_path, "--halves", "--stride", "4"], "give one of the two"),
        ([text_path, "--ctx", "8", "--stride", "9"], "ctx is 8 and stride 9"),
    ):
        assert cli.main(["perplexity", str(demo_path()), *map(str, args)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
