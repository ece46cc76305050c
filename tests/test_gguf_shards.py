"""Shards: any one opens all; what is missing, mixed up or joined is named. Overrides: types and refusals."""

import shutil

import gguf
import hypothesis.strategies as st
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType as T
from hypothesis import given

from tests.gguf_build import Tensor, build, kv, refusal, write
from tmla.errors import GGUFError
from tmla.gguf_file import open_gguf, parse_override


def shard(no, count, names, *, total=None, keys=()):
    """Bytes of one shard; each tensor holds its name's number."""
    keys = [*keys, kv("split.no", T.UINT16, no), kv("split.count", T.UINT16, count)]
    if total is not None:
        keys.append(kv("split.tensors.count", T.INT32, total))
    return build(keys, [Tensor(n, (8,), Q.F32, np.full(8, int(n[1:]), "<f4").tobytes()) for n in names])


@pytest.fixture
def shards(tmp_path):
    """Three shards of five tensors; the first carries a key of its own."""
    parts = [("t0",), ("t1", "t2", "t3"), ("t4",)]
    for i, names in enumerate(parts):
        keys = [kv("general.name", T.STRING, "whole")] if i == 0 else []
        write(tmp_path, shard(i, 3, names, total=5, keys=keys), f"m-{i + 1:05d}-of-00003.gguf")
    return sorted(tmp_path.iterdir())


def test_any_shard_opens_all(shards):
    for given_path in shards:
        gf = open_gguf(given_path)
        assert gf.path == given_path
        assert gf.name == given_path.name
        assert list(gf.paths) == shards
        assert gf.metadata["general.name"] == "whole"
        assert gf.n_bytes == sum(p.stat().st_size for p in shards)
        assert [(t.name, t.shard) for t in gf.tensors.values()] == [
            ("t0", 0),
            ("t1", 1),
            ("t2", 1),
            ("t3", 1),
            ("t4", 2),
        ]
        for name in gf.tensors:
            np.testing.assert_array_equal(gf.array(name), np.full(8, int(name[1:])))


@pytest.mark.parametrize("first_empty", [False, True])
def test_shards_of_the_gguf_writer(tmp_path, first_empty):
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "deepseek2", split_max_tensors=2, small_first_shard=first_empty)
    writer.add_uint32("deepseek2.block_count", 5)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full(40, i, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    paths = sorted(tmp_path.glob("w-*.gguf"))
    assert len(paths) == 3 + first_empty
    gf = open_gguf(paths[1])
    assert gf.metadata["deepseek2.block_count"] == 5
    assert [gf.array(f"t{i}").mean() for i in range(5)] == [0, 1, 2, 3, 4]


def test_missing_shards_are_named(shards):
    shards[1].unlink()
    for path in (shards[0], shards[2]):
        assert "m-00002-of-00003.gguf is missing" in refusal(path)
    shards[2].unlink()
    assert "m-00002-of-00003.gguf, m-00003-of-00003.gguf is missing" in refusal(shards[0])


def test_mixed_up_shards(shards, tmp_path):
    shutil.copy(shards[0], tmp_path / "copy")
    shutil.copy(shards[1], shards[0])  # a copy in another's place
    assert "says it is shard 2 of 3, expected 1 of 3" in refusal(shards[2])
    shutil.copy(tmp_path / "copy", shards[1])  # now swapped
    assert "m-00001-of-00003.gguf: says it is shard 2 of 3, expected 1 of 3" in refusal(shards[1])


def test_shards_that_do_not_belong_together(shards, tmp_path):
    data = shards[2].read_bytes()
    write(tmp_path, shard(2, 3, ["t2"], total=5), shards[2].name)
    assert "tensor 't2' is also in m-00002-of-00003.gguf" in refusal(shards[0])
    write(tmp_path, shard(2, 3, ["t4", "t5"], total=5), shards[2].name)
    assert "the 3 shards hold 6 tensors, expected 5" in refusal(shards[0])
    write(tmp_path, shard(2, 4, ["t4"], total=5), shards[2].name)
    assert "m-00003-of-00003.gguf: says it is shard 3 of 4, expected 3 of 3" in refusal(shards[0])
    write(tmp_path, build([], [Tensor("t4", (8,))]), shards[2].name)
    assert "m-00003-of-00003.gguf: has no split.count" in refusal(shards[0])
    write(tmp_path, data[:-9], shards[2].name)
    assert "m-00003-of-00003.gguf: tensor 't4'" in refusal(shards[0])
    write(tmp_path, data, shards[2].name)
    assert len(open_gguf(shards[0]).tensors) == 5


def test_names_of_shards(shards, tmp_path):
    shutil.copy(shards[0], tmp_path / "renamed.gguf")
    assert "is one of 3 shards (split.count), expected a name that ends in" in refusal(tmp_path / "renamed.gguf")
    shutil.copy(shards[0], tmp_path / "m-00001-of-00004.gguf")
    assert "is one of 3 shards" in refusal(tmp_path / "m-00001-of-00004.gguf")
    shutil.copy(shards[0], tmp_path / "m-00004-of-00003.gguf")
    assert "is one of 3 shards" in refusal(tmp_path / "m-00004-of-00003.gguf")
    for i, path in enumerate(shards):
        path.rename(tmp_path / f"odd.-00001-of-00002-{i + 1:05d}-of-00003.GGUF")
    assert len(open_gguf(tmp_path / "odd.-00001-of-00002-00002-of-00003.GGUF").tensors) == 5


def test_a_single_file_with_split_keys(tmp_path):
    for count in (0, 1):  # 0 is what llama-gguf-split --merge leaves
        assert list(open_gguf(write(tmp_path, shard(0, count, ["t0"]))).tensors) == ["t0"]
    gf = open_gguf(write(tmp_path, build([], [Tensor("t0", (8,))]), "m-00001-of-00002.gguf"))
    assert "named like shard 1 of 2" in gf.notes[0]


def test_joined_shards_are_explained(shards, tmp_path):
    joined = write(tmp_path, b"".join(p.read_bytes() for p in shards))
    assert "3 shards were joined with cat" in refusal(joined)
    joined = write(tmp_path, b"".join(p.read_bytes() for p in reversed(shards)), "m-00001-of-00001.gguf")
    assert "3 shards were joined with cat" in refusal(joined)


@pytest.mark.parametrize(("kind", "value"), [(T.UINT64, 2**60), (T.INT32, -1), (T.STRING, "3"), (T.BOOL, 1)])
def test_odd_split_counts(tmp_path, kind, value):
    path = write(tmp_path, build([kv("split.count", kind, value)]), "m-00001-of-00003.gguf")
    assert "split.count" in refusal(path)


PARSED = {
    "a.b=2": 2,
    " a.b = -7 ": -7,
    "a.b=0.5": 0.5,
    "a.b=1e-6": 1e-6,
    "a.b=.5": 0.5,
    "a.b=true": True,
    "a.b=False": False,
    "a.b=sigmoid": "sigmoid",
    "a.b=": "",
    "a.b=x=y": "x=y",
    'a.b="2"': "2",
    "a.b=nan": "nan",
    "a.b=[1, 2, 3]": [1, 2, 3],
    'a.b=["x", "y"]': ["x", "y"],
    "a.b=int:2": 2,
    "a.b=float:2": 2.0,
    "a.b=bool:true": True,
    "a.b=str:2": "2",
    "a.b=1.2.3": "1.2.3",
    "a.b=١": "١",
}


@pytest.mark.parametrize("text", PARSED)
def test_parse_override(text):
    key, value = parse_override(text)
    assert key == "a.b"
    assert value == PARSED[text]
    assert type(value) is type(PARSED[text])


@pytest.mark.parametrize(
    "text", ["", "a.b", "=2", "a.b=int:x", "a.b=bool:2", "a.b=float:", "a.b=[1,", "a.b=" + "[" * 9**5]
)
def test_parse_override_refuses(text):
    with pytest.raises(GGUFError, match="override") as caught:
        parse_override(text)
    assert str(caught.value).isprintable()


@given(st.text())
def test_parse_override_never_crashes(text):
    try:
        key, value = parse_override(text)
    except GGUFError as error:
        key, value = "refused", str(error)
    assert key
    assert isinstance(value, (bool, int, float, str, list))
    assert key != "refused" or value.isprintable()


KEYS = [
    kv("int", T.UINT32, 3), kv("float", T.FLOAT32, 0.5), kv("bool", T.BOOL, 1), kv("text", T.STRING, "x"),
    kv("ints", T.ARRAY, (T.INT32, [1, 2])), kv("texts", T.ARRAY, (T.STRING, ["a", "b"])),
]  # fmt: skip
APPLIED = [
    ("int", 4, 4), ("int", 4.0, 4), ("int", "4", 4), ("int", np.int64(4), 4), ("int", [4, 5], [4, 5]),
    ("float", 2, 2.0), ("float", "1e-6", 1e-6), ("float", np.float32(0.25), 0.25),
    ("bool", False, False), ("bool", 0, False), ("bool", "false", False),
    ("text", "y", "y"), ("text", 2, "2"), ("text", True, "true"),
    ("ints", [5, 6, 7], [5, 6, 7]), ("ints", 5, 5), ("ints", "5", 5), ("ints", np.arange(3), [0, 1, 2]),
    ("texts", ["c"], ["c"]), ("texts", ("c",), ["c"]),
    ("new", 2, 2), ("new", "2", "2"), ("new", True, True), ("new", [0.5, 1], [0.5, 1.0]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "want"), APPLIED)
def test_overrides(tmp_path, key, value, want):
    gf = open_gguf(write(tmp_path, build(KEYS)), overrides={key: value})
    found = gf.metadata[key]
    assert list(gf.overridden) == [key]
    found = found.tolist() if isinstance(found, np.ndarray) else found
    assert found == want
    assert type(found) is type(want)
    assert len(gf.metadata) == len(KEYS) + (key == "new")


REFUSED = [
    ("int", 4.5, "a whole number"), ("int", True, "a whole number"), ("int", "many", "a whole number"),
    ("float", "x", "a number"), ("float", True, "a number"), ("bool", 2, "true or false"),
    ("text", [1, 2], "text"), ("ints", ["a"], "a list of numbers"), ("texts", "a", "a list of texts"),
    ("texts", [1], "a list of texts"), ("new", None, "NoneType"), ("new", {}, "dict"), ("new", [[1]], "list"),
    ("new", 2**64, "64 bits"), ("new", float("nan"), "finite"), ("int", float("inf"), "finite"), ("new", [], "list"),
    ("new", [1, "a"], "list"), ("general.alignment", 64, "layout"), ("split.count", 2, "layout"), ("", 1, "no text"),
    (3, 1, "no text"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "expected"), REFUSED)
def test_overrides_that_do_not_fit(tmp_path, key, value, expected):
    path = write(tmp_path, build(KEYS))
    with pytest.raises(GGUFError, match=expected) as caught:
        open_gguf(path, overrides={key: value})
    assert "override" in str(caught.value)
    assert str(caught.value).isprintable()
