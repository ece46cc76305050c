"""Mutated GGUF files: each opens or raises GGUFError, nothing else; no hang, no great memory.

A few hundred mutations by default; ``TMLA_FUZZ=20000`` sets the number. Mutation ``i`` depends on its number alone, so
a failure names the one to repeat.
"""

import os
import struct
import sys
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType as T
from hypothesis import HealthCheck, given, settings

from tests.gguf_build import Tensor, build, kv, mutate, small, write
from tmla.errors import GGUFError
from tmla.gguf_file import open_gguf

N_MUTATIONS = int(os.environ.get("TMLA_FUZZ", "400"))


def use(path):
    """Open and read everything, as a loader would; returns whether the file passed."""
    try:
        with open_gguf(path) as gf:
            for name, t in gf.tensors.items():
                assert gf.raw(name).size == t.n_bytes
                if t.type in ("F32", "F16", "BF16", "Q8_0"):
                    assert gf.array(name).shape == t.shape
                if t.type == "Q8_0":
                    assert gf.q8_0_blocks(name).nbytes == t.n_bytes
            assert all(isinstance(v, (bool, int, float, str, list, np.ndarray)) for v in gf.metadata.values())
            return True
    except GGUFError as error:
        if not str(error).isprintable() or len(str(error)) > 800:
            raise AssertionError(f"not one short line: {error!r}") from error
        return False


def peak_bytes():
    """The most resident memory this process ever had; mapped pages count, too."""
    resource = pytest.importorskip("resource")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(folder, bases, seed):
    """Try the mutations of some files (name -> bytes, header length, neighbours to lie beside it)."""
    passed, slowest, before = 0, 0.0, peak_bytes()
    for i in range(N_MUTATIONS):
        rng = np.random.default_rng([seed, i])
        name, data, n_header = bases[i % len(bases)]
        mutated = mutate(data, rng, n_header)
        start = time.perf_counter()
        try:
            passed += use(write(folder, mutated, name))
        except Exception as error:
            raise AssertionError(f"mutation {i} of {name}, seed {seed}: {error!r}") from error
        finally:
            write(folder, data, name)
        slowest = max(slowest, time.perf_counter() - start)
    assert 0 < passed < N_MUTATIONS  # some changes do no harm, most do
    assert slowest < 5
    assert peak_bytes() - before < 1e9
    return passed


def test_mutations_of_a_built_file(tmp_path):
    data = small()
    run(tmp_path, [("m.gguf", data, data.index(b"token_embd") + 300)], seed=1)


def test_mutations_of_an_oracle_file(tmp_path, oracle):
    data = (oracle / "dsv2_mini.gguf").read_bytes()
    infos = data.index(b"token_embd.weight")
    run(tmp_path, [("m.gguf", data, 1700), ("n.gguf", data, infos + 3000)], seed=2)


def test_mutations_of_the_tensor_list(tmp_path, oracle):
    """The part behind the vocabulary alone, where offsets, types and dimensions stand."""
    data = (oracle / "dsv2_mini.gguf").read_bytes()
    at = data.index(b"token_embd.weight") - 8
    keys = [kv("general.architecture", T.STRING, "deepseek2")]
    head = build(keys)[: 24 + len(keys[0])]
    short = head[:8] + data[8:16] + head[16:] + data[at : at + 3200]
    short += bytes(-len(short) % 32) + data[at + 3200 :]
    run(tmp_path, [("m.gguf", small(), 700), ("t.gguf", short, len(head) + 2400)], seed=3)


def test_mutations_of_shards(tmp_path):
    bases = []
    for i in range(3):
        keys = [kv("split.no", T.UINT16, i), kv("split.count", T.UINT16, 3), kv("split.tensors.count", T.INT32, 6)]
        tensors = [Tensor(f"t{i}", (8,)), Tensor(f"q{i}", (32, 2), Q.Q8_0, bytes(68))]
        name, data = f"m-{i + 1:05d}-of-00003.gguf", build(keys, tensors)
        bases.append((name, data, 200))
        write(tmp_path, data, name)
    run(tmp_path, bases, seed=4)


NUMBERS = st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63]))
TENSORS = st.builds(
    lambda name, dims, kind, offset, n: Tensor(name, tuple(dims), kind, bytes(n), offset),
    st.text(max_size=6),
    st.lists(NUMBERS, max_size=6),
    st.one_of(st.sampled_from([0, 1, 8, 30]), st.integers(0, 2**32 - 1)),
    st.one_of(st.none(), st.integers(0, 8).map(lambda i: 32 * i), NUMBERS),
    st.integers(0, 200),
)
VALUES = st.one_of(
    st.binary(max_size=60),
    st.tuples(NUMBERS, st.binary(max_size=40)).map(lambda x: struct.pack("<Q", x[0]) + x[1]),
    st.tuples(st.integers(0, 13), NUMBERS, st.binary(max_size=60)).map(lambda x: struct.pack("<IQ", *x[:2]) + x[2]),
)
ENTRIES = st.builds(kv, st.one_of(st.text(max_size=6), st.just("general.alignment")), st.integers(0, 14), VALUES)
QUICK = settings(
    max_examples=max(150, N_MUTATIONS // 20),
    deadline=5000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@QUICK
@given(keys=st.lists(ENTRIES, max_size=3), tensors=st.lists(TENSORS, max_size=3), tail=st.binary(max_size=64))
def test_built_from_arbitrary_parts(tmp_path, keys, tensors, tail):
    for t in tensors:
        t.dims = t.dims or (1,)
    use(write(tmp_path, build(keys, tensors, tail=tail)))


@QUICK
@given(n_tensors=NUMBERS, n_keys=NUMBERS, version=st.integers(0, 5), rest=st.binary(max_size=300))
def test_arbitrary_bytes_behind_the_magic(tmp_path, n_tensors, n_keys, version, rest):
    use(write(tmp_path, b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys) + rest))


@QUICK
@given(data=st.binary(max_size=400))
def test_arbitrary_bytes(tmp_path, data):
    assert use(write(tmp_path, data)) is False or data.startswith(b"GGUF")
