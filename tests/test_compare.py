"""Logits of another engine: the numbers against their definitions, files that are refused, the command."""

import contextlib
import json
import pickle
import sys
import zipfile

import numpy as np
import pytest

import tmla
from tests.conftest import backend, oracle_dir
from tests.gguf_build import mutate
from tmla import cli, cli_compare
from tmla.compare import compare
from tmla.errors import ContextError, ParameterError
from tmla.logits_file import LogitsFile, write_logits

ARCH = backend()
TOKENS = np.array([3, 9, 4, 8, 5, 3, 40, 2, 2, 31, 8, 11])
STARTS = np.array([0, 7])


@pytest.fixture(scope="module")
def model():
    return tmla.load(oracle_dir() / "dsv2_mini.gguf", arch=ARCH, n_ctx=20, cache_dtype="f32")


@pytest.fixture(scope="module")
def own(model):
    """The model's logits of both windows."""
    rows = []
    for window in np.split(TOKENS, STARTS[1:]):
        model.reset()
        rows.append(model.prefill(window.tolist(), all_logits=True))
    return np.concatenate(rows)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "other.npz"


def save(path, logits, tokens=TOKENS, starts=STARTS, **more):
    arrays = {"tokens": tokens, "logits": logits, "starts": starts} | more
    np.savez(path, **{name: a for name, a in arrays.items() if a is not None})
    return path


def noisy(own, rng, scale=0.05):
    return (own + scale * rng.standard_normal(own.shape)).astype(np.float32)


# numbers


def test_a_model_agrees_with_itself(model, own, path):
    r = compare(model, save(path, own))
    assert r.kl.max() < 1e-9
    assert r.error.max() < 1e-4
    assert r.top1_agreement == 1.0
    assert r.perplexity_here == pytest.approx(r.perplexity_there, rel=1e-6)
    assert (r.kl >= 0).all()


@pytest.mark.parametrize("rows", [2, 512])
def test_numbers_are_their_definitions(model, own, path, rng, monkeypatch, rows):
    monkeypatch.setattr(sys.modules["tmla.compare"], "rows_at_a_time", lambda n_vocab: rows)
    other = noisy(own, rng, 0.5)
    told = []
    r = compare(model, save(path, other), progress=lambda *a: told.append(a))
    p, q = (np.exp(x.astype(np.longdouble)) for x in (other, own))
    p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
    kl = (p * np.log(p / q)).sum(-1).astype(np.float64)
    np.testing.assert_allclose(r.kl, kl, rtol=1e-3, atol=1e-8)
    assert kl.max() > 0.1  # a file that agrees proves nothing
    error = np.abs(other.astype(np.float64) - own).max(-1) / other.std(-1)
    np.testing.assert_allclose(r.error, error, rtol=1e-3)
    assert r.best_there.tolist() == other.argmax(-1).tolist()
    assert r.best_here.tolist() == own.argmax(-1).tolist()
    known = [0, 1, 2, 3, 4, 5, 7, 8, 9, 10]  # nothing follows the last of a window
    nats = -np.log(p[known, TOKENS[np.add(known, 1)]].astype(np.float64))
    np.testing.assert_allclose(r.nats_there[known], nats, rtol=1e-6)
    assert np.flatnonzero(np.isnan(r.nats_there)).tolist() == np.flatnonzero(np.isnan(r.nats_here)).tolist() == [6, 11]
    assert r.perplexity_there == pytest.approx(np.exp(nats.mean()), rel=1e-6)
    assert r.worst(12) == np.argsort(-r.kl).tolist()
    s = r.summary()
    assert s["kl_nats"] == {
        "mean": r.kl.mean(), "median": np.median(r.kl), "p99": np.quantile(r.kl, 0.99), "max": r.kl.max(),
    }  # fmt: skip
    assert told[-1] == (12, 12)


def test_a_constant_does_not_change_probabilities(model, own, path):
    r = compare(model, save(path, own + np.float32(2.0)))
    assert r.kl.max() < 1e-9
    assert r.error.min() > 0.1


def test_one_window_where_starts_are_left_out(model, own, path):
    r = compare(model, save(path, own[:7], TOKENS[:7], None, about=np.array("not looked at")))
    assert r.kl.max() < 1e-9
    assert r.starts.tolist() == [0]
    flat = compare(model, save(path, np.zeros_like(own[:1]), TOKENS[:1], None))
    assert np.isnan(flat.perplexity_here)
    assert 1e20 < flat.error[0] < np.inf
    assert flat.summary()["perplexity_here"] is None


def test_contexts_and_vocabularies(model, own, path):
    long = np.resize(TOKENS, 21)
    with pytest.raises(ContextError, match=r"other\.npz: has a window of 21 tokens, but the context holds 20"):
        compare(model, save(path, np.resize(own, (21, own.shape[1])), long, None))
    n = own.shape[1]
    with pytest.raises(ParameterError, match=f"logits of {n - 1:,} tokens, the model's vocabulary has {n:,}"):
        compare(model, save(path, own[:, :-1]))


# files


class Evil:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


def test_files_that_are_refused(own, path, tmp_path):
    n = own.shape[1]

    def refused(message, logits=own, **arrays):
        save(path, logits, **arrays)
        check(message)

    def check(message):
        with pytest.raises(ParameterError, match=message) as caught:
            read_all(path)
        assert str(caught.value).startswith("other.npz: ")
        assert str(caught.value).isprintable()

    refused("no array 'logits'", None)
    refused("no array 'tokens'", tokens=None)
    refused("logits in float64, expected float32", own.astype(np.float64))
    refused("logits in float16, expected float32", own.astype(np.float16))
    refused("logits in >f4, expected float32", own.astype(">f4"))
    refused("Fortran order", np.asfortranarray(own))
    refused(r"shape \[12\], expected \[T, n_vocab\]", own[:, 0])
    refused(r"shape \[1, 12, \d+\], expected", own[None])
    refused("11 rows of logits and 12 tokens", own[:-1])
    refused("'tokens' in float64, expected integers", tokens=TOKENS.astype(float))
    refused(r"shape \[3, 4\], expected \[n\]", tokens=TOKENS.reshape(3, 4))
    refused(f"token {n} at 2, expected 0 to {n - 1}", tokens=np.where(np.arange(12) == 2, n, TOKENS))
    refused("token -1 at 0", tokens=np.where(np.arange(12) == 0, -1, TOKENS))
    refused("no tokens or no vocabulary", own[:0], tokens=TOKENS[:0])
    refused("no tokens or no vocabulary", own[:, :0])
    for starts in ([], [1, 4], [0, 4, 4], [0, 12], [0, -3]):
        refused("starts that do not rise from 0 and stay below 12", starts=np.array(starts, np.int64))
    refused("not finite", np.where(own == own.max(), np.float32(np.nan), own))
    refused("Python objects in 'logits', which are never unpickled", np.array([Evil()], object))
    refused("Python objects in 'tokens'", tokens=np.array([Evil()], object))
    path.write_bytes(pickle.dumps(Evil()))
    check("is no .npz file")
    with path.open("wb") as f:
        np.save(f, own)
    check("is no .npz file")
    with pytest.raises(ParameterError, match=r"none\.npz: no such file"):
        LogitsFile(tmp_path / "none.npz")
    with pytest.raises(ParameterError, match=r"is no \.npz file"):
        LogitsFile(tmp_path)


def read_all(path):
    with LogitsFile(path) as f:
        return np.concatenate([f.read(1) for _ in range(len(f.tokens))])


def test_headers_that_lie(own, path):
    """A size that the data does not have is not allocated."""
    for shape in ((1 << 40, 1 << 40), (12, -1), (12, 1 << 62)):
        with zipfile.ZipFile(path, "w") as z:
            for name, ids in (("tokens", TOKENS), ("starts", STARTS)):
                with z.open(f"{name}.npy", "w") as f:
                    np.save(f, ids)
            with z.open("logits.npy", "w") as f:
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(f, header)
                f.write(own.tobytes())
        with pytest.raises(ParameterError, match=r"'logits' of shape"):
            read_all(path)


@pytest.mark.parametrize("compressed", [False, True])
def test_mutated_files(own, path, rng, compressed):
    """Only our own error, or other numbers."""
    (np.savez_compressed if compressed else np.savez)(path, tokens=TOKENS, logits=own[:, :48] + 0, starts=STARTS)
    data, n_read = path.read_bytes(), 0
    read_all(path)
    for i in range(400):
        path.write_bytes(data[: rng.integers(len(data))] if i < 60 else mutate(data, rng, len(data)))
        with contextlib.suppress(ParameterError):
            read_all(path)
            n_read += 1
    assert n_read < 200


def test_rows_come_back(own, path):
    with write_logits(path, TOKENS, STARTS, own.shape[1]) as put:
        put(own[:5])
        put(own[5:])
    np.testing.assert_array_equal(read_all(path), own)
    with LogitsFile(path) as f:
        assert [w.tolist() for w in f.windows()] == [TOKENS[:7].tolist(), TOKENS[7:].tolist()]
        assert (f.longest, f.n_vocab) == (7, own.shape[1])
        with pytest.raises(ParameterError, match="ends within its logits"):
            f.read(13)


# the command


@pytest.fixture
def command(model, monkeypatch, capsys):
    monkeypatch.setattr(cli_compare, "load_with_bar", lambda args: (model, 0.0, 0.0))

    def call(*args):
        code = cli.main(["compare", str(model.file.path), *map(str, args)])
        return code, *capsys.readouterr()

    return call


def test_command(command, own, path, rng):
    save(path, noisy(own, rng))
    code, out, err = command("--logits", path, "--json")
    s = json.loads(out)
    assert (code, s["positions"], s["windows"], s["vocabulary"], s["arch"]) == (0, 12, 2, own.shape[1], ARCH)
    mean = s["kl_nats"]["mean"]
    code, table, err = command("--logits", path)
    assert code == 0
    lines = table.splitlines()
    assert lines[0] == f"12 positions in 2 windows, vocabulary {own.shape[1]:,}"
    numbers = lines[3].split()[2:]
    assert [float(x) for x in numbers] == pytest.approx(list(s["kl_nats"].values()), rel=0.01)
    assert f"{100 * s['top1_agreement']:.2f} %" in lines[5]
    assert len(lines) == 14
    assert int(lines[9].split()[0]) == s["worst"][0]["position"]
    assert command("--logits", path, "--max-kl", 1.01 * mean)[0] == 0
    code, out, err = command("--logits", path, "--max-kl", 0.99 * mean)
    assert (code, out) == (1, table)
    assert err.endswith("(--max-kl)\n")


def test_command_refuses_before_loading(capsys, monkeypatch, own, path):
    monkeypatch.setattr(cli_compare, "load_with_bar", lambda args: pytest.fail("loaded"))
    save(path, own.astype(np.float64))
    assert cli.main(["compare", "m.gguf", "--logits", str(path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "tmla: error: other.npz: has logits in float64, expected float32; write "
                          "logits.astype('<f4')\n")  # fmt: skip
    assert cli.main(["compare", "m.gguf"]) == 2
    assert "--logits" in capsys.readouterr().err
