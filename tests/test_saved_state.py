"""Saved states: a restored session equals one that never stopped; bad files are refused; a kill loses nothing."""

import hashlib
import itertools
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import time
import types

import numpy as np
import pytest

import tmla
from tests.conftest import ROOT, backend, oracle_dir
from tests.gguf_build import mutate
from tmla import atomic, runtime, state_file
from tmla.cache_copy import CacheRows
from tmla.config import open_checked
from tmla.errors import ContextError, StateError, TmlaError
from tmla.fields import FieldPool
from tmla.saved_state import fingerprint
from tmla.stages.cache_row import cache_field, cache_numpy
from tmla.state_file import Header, open_state, write_state

ARCH = backend()
N_CTX = 96
PROMPT = list(range(7, 44))


def load(name="dsv2_mini", **options):
    path = oracle_dir() / f"{name}.gguf"
    return tmla.load(path, **{"arch": ARCH, "n_ctx": N_CTX, "cache_dtype": "f16"} | options)


@pytest.fixture(scope="module")
def models():
    """A model of each type of cache."""
    return {dtype: load(cache_dtype=dtype) for dtype in ("f16", "f32")}


@pytest.fixture
def model(models):
    models["f16"].reset()
    return models["f16"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "session.kv"


def rows_of(model, n):
    return b"".join(slab.tobytes() for slab in model._rows.all_of(n, 10))


def go_on(model):
    """What a session says next, in two ways of decoding."""
    logits = [model.prefill([3, 9, 4]), model.decode(8)]
    return [*model.decode_greedy(5, 20), model.tokens, *np.stack([*logits, model.decode(1)]).tobytes()]


@pytest.fixture
def saved(model, path):
    """A saved state, and its bytes."""
    model.prefill(PROMPT)
    model.save_state(path, {"about": "é"})
    return path.read_bytes()


# what comes back


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_a_restored_session_equals_one_that_never_stopped(models, path, dtype):
    model = models[dtype]
    model.reset()
    model.prefill(PROMPT[:30])
    for token in PROMPT[30:]:
        model.decode(token)
    kept, n_bytes = rows_of(model, len(PROMPT)), model.save_state(path)
    straight = go_on(model)
    assert n_bytes == path.stat().st_size < 700 + len(PROMPT) * (4 + model.config.n_layers * len(kept))
    assert len(kept) == len(PROMPT) * model.config.n_layers * model.config.cache_row_bytes(dtype)
    model.reset()
    model.prefill([1] * 60)
    assert rows_of(model, len(PROMPT)) != kept
    assert model.restore_state(path) is None
    assert (model.n_past, model.tokens, rows_of(model, len(PROMPT))) == (len(PROMPT), PROMPT, kept)
    assert go_on(model) == straight


def test_another_model_of_the_file_goes_on(model, path, saved):
    straight = go_on(model)
    other = load(n_ctx=70)  # has decoded nothing before
    assert other.restore_state(path) == {"about": "é"}
    assert go_on(other) == straight


def test_every_bit_pattern_comes_back(models, path, rng):
    """Rows are bits: not a number may change, least of all one that is none."""
    for dtype, model in models.items():
        model.reset()
        model.prefill([2] * 11)
        rows, width = model._rows, model.config.cache_row_bytes(dtype)
        noise = rng.integers(0, 256, (model.config.n_layers, 11, width), np.uint8)
        noise[:, 0] = 0xFF  # NaN
        for layer, n in itertools.product(range(model.config.n_layers), (0, 4)):
            rows.put(layer, n, noise[layer, n : n + 7])
        assert rows_of(model, 11) == noise.tobytes()
        model.save_state(path)
        model.reset()
        model.prefill([3] * 12)
        model.restore_state(path)
        assert rows_of(model, 11) == noise.tobytes()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_layers_in_several_banks(arch, rng, dtype):
    """Layers 0 and 1 in one field, 2 in another; rows of 37 values, which fill no whole number of words."""
    pool, banks, width = FieldPool(), [], 37
    for first, n in ((0, 2), (2, 1)):
        cache = pool.field(*cache_field(n, 9, width, dtype, runtime.caps().layout))
        banks.append(types.SimpleNamespace(first=first, n=n, cache=cache, cache_dtype=dtype, row_width=width))
    rows = CacheRows(banks)
    noise = rng.integers(0, 256, (3, 9, width * {"f16": 2, "f32": 4}[dtype]), np.uint8)
    for layer, (start, end) in itertools.product((2, 0, 1), ((4, 9), (0, 4))):
        rows.put(layer, start, noise[layer, start:end])
    assert b"".join(slab.tobytes() for slab in rows.all_of(8, 3)) == noise[:, :8].tobytes()
    np.testing.assert_array_equal(rows.get(1, 2, 5), noise[1, 2:7])
    values = cache_numpy(banks[1].cache, width, dtype)[0]
    np.testing.assert_array_equal(values, noise[2].view({"f16": np.float16, "f32": np.float32}[dtype]))
    del rows
    pool.destroy()


def test_slabs_join(model, path, monkeypatch, saved):
    monkeypatch.setattr(state_file, "SLAB_BYTES", 5 * model.config.cache_row_bytes("f16"))
    kept = rows_of(model, len(PROMPT))
    model.save_state(path, {"about": "é"})
    assert path.read_bytes() == saved
    model.reset()
    model.prefill([1] * 20)
    state = open_state(path)
    model.restore_from(state, 13)
    n = len(kept) // model.config.n_layers // len(PROMPT)
    parts = np.frombuffer(kept, np.uint8).reshape(model.config.n_layers, len(PROMPT), n)
    assert (model.tokens, rows_of(model, 13)) == (PROMPT[:13], parts[:, :13].tobytes())


def test_an_empty_cache(model, path):
    model.save_state(path)
    model.prefill([5])
    model.restore_state(path)
    assert (model.n_past, model.tokens) == (0, [])


def test_a_model_knows_its_tokens(model, monkeypatch, path):
    model.prefill([5, 6, 7])
    model.decode(8)
    chosen = model.decode_greedy(9, 5)
    assert model.tokens == [5, 6, 7, 8, 9, *chosen[:-1]]
    model.rewind(4)
    model.decode(np.int64(3))
    assert model.tokens == [5, 6, 7, 8, 3]
    model.rewind(2)
    left = iter([None, None])

    def interrupted():
        if next(left, 0) is not None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model._steps, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.decode_greedy(4, 6)
    assert (model.n_past, model.tokens) == (5, [5, 6, 4])
    with pytest.raises(ContextError, match=r"of the 5 positions .* only 3 .* rewind\(3\) first"):
        model.save_state(path)
    model.rewind(3)
    model.save_state(path)
    model.reset()
    assert model.tokens == []


# what is refused


def refused(model, path, kind, message):
    """The model refuses the file in one line that begins with its name, and is as it was."""
    before = model.n_past, model.tokens, rows_of(model, model.n_past)
    with pytest.raises(kind, match=message) as caught:
        model.restore_state(path)
    assert str(caught.value).startswith(f"{path.name}: ")
    assert str(caught.value).isprintable()
    assert (model.n_past, model.tokens, rows_of(model, model.n_past)) == before


def test_other_contexts_caches_and_models(models, model, path, saved, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model, "n_ctx", 20)
        message = rf"has {len(PROMPT)} positions, but the context holds 20; .*n_ctx={len(PROMPT)}"
        refused(model, path, ContextError, message)
    with monkeypatch.context() as patch:
        patch.setitem(model.__dict__, "fingerprint", "another")
        refused(model, path, StateError, rf"{open_state(path).header.fingerprint}.*'another'")
    models["f32"].reset()
    models["f32"].prefill([4, 5])
    refused(models["f32"], path, StateError, r"rows in f16, the cache is f32; .*--cache f16")


def test_fingerprint_is_of_what_decides_the_rows(tmp_path):
    source = oracle_dir() / "dsv2_mini.gguf"

    def of(path, **overrides):
        gf, cfg = open_checked(path, overrides={k.replace("__", "."): v for k, v in overrides.items()})
        with gf:
            return fingerprint(gf, cfg, 100), gf.tensors

    base, tensors = of(source)
    assert base == of(source, general__name="other")[0]
    assert base != of(source, deepseek2__attention__layer_norm_rms_epsilon=1e-5)[0]
    data = bytearray(source.read_bytes())
    t = tensors["blk.1.attn_output.weight"]
    for at in (t.offset, t.offset + t.n_bytes - 1):
        changed = bytearray(data)
        changed[at] ^= 1
        copy = tmp_path / "changed.gguf"
        copy.write_bytes(changed)
        assert of(copy)[0] != base


def with_header(data, change):
    """The bytes of a state with another header, its checksum right."""
    n = struct.unpack("<I", data[12:16])[0]
    text = change(data[16 : 16 + n])
    body = data[:12] + struct.pack("<I", len(text)) + text + data[16 + n : -32]
    return body + hashlib.blake2b(body, digest_size=32).digest()


def with_field(data, **fields):
    return with_header(data, lambda text: json.dumps(json.loads(text) | fields).encode())


def test_wrong_files_are_refused_by_name(model, path, saved):
    def refuse(data, message):
        path.write_bytes(data)
        refused(model, path, StateError, message)

    refuse(b"", "begins with b'', expected b'tmla-kv")
    refuse(b"GGUF" + saved[4:], "begins with b'GGUF-kv")
    refuse(saved[:8] + b"\2" + saved[9:], "version 2 of the format, expected 1")
    refuse(saved[:12] + b"\xff\xff\xff\xff" + saved[16:], "claims a header of 4,294,967,295 bytes")
    refuse(saved[:-1], "cut or damaged")
    refuse(saved + b"\0", "cut or damaged")
    refuse(saved[:-40] + bytes(8) + saved[-32:], "checksum")
    refuse(with_header(saved, lambda text: b"{"), "no JSON")
    refuse(with_header(saved, lambda text: b"[" * 100_000), "no JSON")
    refuse(with_header(saved, lambda text: b"[]"), "without the expected fields")
    refuse(with_field(saved, more=1), "without the expected fields")
    refuse(with_field(saved, n_past=37.0), "n_past 37.0 in its header, expected int")
    refuse(with_field(saved, n_past=True), "n_past True")
    refuse(with_field(saved, n_past=-1), "impossible numbers")
    refuse(with_field(saved, n_past=10**30), "bytes, expected 58")
    refuse(with_field(saved, cache_dtype="f8"), "impossible numbers")
    refuse(with_field(saved, fingerprint="\x1b[2J"), r"with fingerprint '\\x1b\[2J'")
    width, layers = model.config.cache_row_width, model.config.n_layers
    refuse(with_field(saved, row_width=width * layers, n_layers=1), "has 1 layers of rows of")
    n = struct.unpack("<I", saved[12:16])[0]
    body = saved[: 16 + n] + struct.pack("<i", -5) + saved[20 + n : -32]
    refuse(body + hashlib.blake2b(body, digest_size=32).digest(), "holds token -5, expected 0 to")
    path.unlink()
    refused(model, path, StateError, "does not exist")
    path.mkdir()
    refused(model, path, StateError, "no regular file")


def test_cut_and_mutated_files(model, path, saved, rng):
    """Only our own errors; and the model is as it was."""
    before = rows_of(model, len(PROMPT))
    header = 16 + struct.unpack("<I", saved[12:16])[0]
    cuts = [saved[:n] for n in (*range(0, header + 9, 3), *rng.integers(header, len(saved), 60))]
    flips = []
    for at in rng.integers(0, len(saved), 100):
        flips.append(saved[:at] + bytes([saved[at] ^ 1 << int(rng.integers(8))]) + saved[at + 1 :])
    mutated = [mutate(saved, rng, header + 40) for _ in range(150)]
    for data in (*cuts, *flips, *(m for m in mutated if m != saved)):
        path.write_bytes(data)
        with pytest.raises(StateError):
            model.restore_state(path)
    n_opened = 0
    for _ in range(200):  # made on purpose: the checksum is right
        path.write_bytes(with_header(saved, lambda text: mutate(text, rng, len(text))))
        try:
            model.restore_state(path)
            n_opened += 1
        except TmlaError:
            pass
        assert (model.tokens, rows_of(model, len(PROMPT))) == (PROMPT, before)
    assert n_opened < 100


def test_a_file_that_changes_under_the_reader(model, path, saved):
    state = open_state(path)
    path.write_bytes(saved[:-40] + bytes(8) + saved[-32:])
    with pytest.raises(StateError, match="changed while it was read"):
        model.restore_from(state)
    assert model.tokens == []
    path.write_bytes(saved[:-400])
    with pytest.raises(StateError, match="changed while it was read"):
        model.restore_from(state)
    path.unlink()
    with pytest.raises(StateError, match="cannot be read: no such file"):
        model.restore_from(state)


# what is written


def test_places_that_cannot_be_written(model, path, saved, tmp_path):
    other = tmp_path / "letter.txt"
    other.write_text("Dear Jane")
    for place, message in (
        (tmp_path / "none" / "a.kv", "cannot be written: no such file"),
        (tmp_path, "cannot be written: is no regular file"),
        (other, "begins with b'Dear Jan' and is no state saved by tmla: it is not replaced"),
    ):
        with pytest.raises(StateError, match=message):
            model.save_state(place)
    assert other.read_text() == "Dear Jane"
    if os.path.exists("/dev/null"):
        with pytest.raises(StateError, match="no regular file"):
            model.save_state("/dev/null")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["letter.txt", "session.kv"]


def test_links_are_followed_and_files_are_the_owners(model, path, saved, tmp_path):
    link = tmp_path / "link.kv"
    link.symlink_to(path)
    model.decode(5)
    model.save_state(link)
    assert link.is_symlink()
    assert open_state(path).tokens == [*PROMPT, 5]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("no space")])
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_what_ends_a_save_leaves_the_old_file(model, path, saved, monkeypatch, moment, error):
    def fail(*args):
        raise error

    model.decode(5)
    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, moment, fail)
        with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else StateError):
            model.save_state(path)
    assert path.read_bytes() == saved
    assert list(path.parent.iterdir()) == [path]


# Each child saves a second state over a first and is killed by SIGKILL at one moment; a child of its own, so that
# nothing of the interpreter can tidy up. They are forks of a process that has imported tmla and started no backend.
KILLED = """
import os, signal, sys
import numpy as np
from tmla import atomic
from tmla.state_file import Header, write_state

def state(n):
    rows = np.full((2, n, 8), n, np.uint8)
    return Header("f", "m", "f16", 2, 4, n), range(n), list(rows)

def killed_at(moment, count):
    calls = 0
    real = getattr(atomic.os, moment)
    def call(*args):
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    setattr(atomic.os, moment, call)

def slabs(pieces, count):
    for i, piece in enumerate(pieces):
        if i == count:
            os.kill(os.getpid(), signal.SIGKILL)
        yield piece

for at, moment in enumerate(sys.argv[2:]):
    path = f"{sys.argv[1]}/{at}.kv"
    write_state(path, *state(3))
    pid = os.fork()
    if not pid:
        header, tokens, pieces = state(5)
        name, count = moment.split(":")
        if name == "slab":
            pieces = slabs(pieces, int(count))
        else:
            killed_at(name, int(count))
        write_state(path, header, tokens, pieces)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.skipif(os.name != "posix", reason="there is no fork and no SIGKILL")
def test_kill_9_at_every_moment(tmp_path):
    moments = ["slab:0", "slab:1", "fsync:1", "open:1", "replace:1", "open:2", "fsync:2", "fsync:9"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, tmp_path, *moments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.stderr == ""
    codes = [int(code) for code in done.stdout.split()]
    assert codes == [-signal.SIGKILL] * 7 + [0]
    found = [open_state(tmp_path / f"{i}.kv").header.n_past for i in range(len(moments))]
    assert found == [3, 3, 3, 3, 3, 5, 5, 5]  # the old one, or from the replacement on the new one


SAVING = """
import sys, tmla
model = tmla.load(sys.argv[1], arch="cpu", n_ctx=4000)
model.prefill([5, 6, 7])
model.n_past = 3000  # rows of any value do
model._fed[:3000] = 9
for n in range(1000, 3000):
    model.n_past = n
    model.save_state(sys.argv[2])
    if n == 1000:
        print("saved", flush=True)
"""


@pytest.mark.skipif(os.name != "posix" or ARCH != "cpu", reason="a process that saves all the time, on a CPU")
def test_kill_9_of_a_process_that_saves(path):
    p = subprocess.Popen(
        [sys.executable, "-c", SAVING, oracle_dir() / "dsv2_mini.gguf", path], stdout=subprocess.PIPE, cwd=ROOT
    )
    assert p.stdout.read(5) == b"saved"
    time.sleep(0.03)
    p.kill()
    assert p.wait(timeout=60) == -signal.SIGKILL
    p.stdout.close()
    found = open_state(path)
    assert 1000 <= found.header.n_past < 3000
    assert found.tokens == [9] * found.header.n_past


def test_notes_that_cannot_be_kept(path, monkeypatch):
    for note in (object(), {1, 2}, [np.float32(1)]):
        with pytest.raises(StateError, match="no JSON value"):
            write_state(path, Header("f", "m", "f16", 1, 4, 0, note), [], [])
    assert not path.exists()
    monkeypatch.setattr(state_file, "MAX_HEADER_BYTES", 100)
    with pytest.raises(StateError, match="header would have"):
        write_state(path, Header("f", "m", "f16", 1, 4, 0, "x" * 100), [], [])
