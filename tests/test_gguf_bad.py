"""GGUF files that are wrong, and files that are something else: refused in one line that says what was found."""

import os
import struct
import time
import tracemalloc

import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType as T

from tests.gguf_build import Tensor, build, kv, refusal, small, text, write
from tmla.errors import GGUFError
from tmla.gguf_file import open_gguf

STRUCTURAL = {
    "duplicate_tensor": "'blk.1.attn_norm.weight' is there twice",
    "empty": "empty",
    "huge_dim": "1099511627776",
    "huge_string": "claims 4611686018427387904 bytes",
    "huge_tensor_count": "claims 1152921504606846976 tensors",
    "offset_misaligned": "'output_norm.weight' has data offset .* alignment 32",
    "offset_outside": "'output_norm.weight' .* file ends at byte",
    "truncated_data": "file ends at byte 153504",
    "truncated_header": "file ends at byte 3000",
    "version_1": r"GGUF version 1 \(2023\)",
    "wrong_magic": "'GGML'",
}


def f32(*names):
    return [Tensor(n, (8,)) for n in names]


def test_bad_files_of_the_oracle(oracle):
    paths = {p.stem.removeprefix("bad_"): p for p in (oracle / "bad").glob("*.gguf")}
    assert set(STRUCTURAL) <= set(paths)
    for name, path in paths.items():
        if name in STRUCTURAL:
            message = refusal(path)
            assert message.startswith(path.name + ": ")
            with pytest.raises(GGUFError, match=STRUCTURAL[name]):
                open_gguf(path)
        else:
            open_gguf(path).close()  # well-formed: what it holds is for config to judge


INT = struct.pack("<I", T.UINT32)
MALFORMED = {
    "version 0": (build(version=0), "GGUF version 0, expected 2 or 3"),
    "version 4": (build(version=4), "GGUF version 4, expected 2 or 3"),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "only the magic": (b"GGUF", "4 bytes, expected at least a GGUF header"),
    "half a header": (build()[:20], "20 bytes"),
    "huge key count": (build(n_keys=2**63), "claims 9223372036854775808 metadata keys"),
    "one key too many": (build([kv("a", T.UINT8, 1)], n_keys=2), "metadata key 1, at byte .*, is empty"),
    "too many tensors": (build(n_tensors=2**20, tail=bytes(2**25)), "claims 1048576 tensors, .* at most 262144"),
    "duplicate key": (build([kv("a.b", T.UINT8, 1), kv("a.b", T.UINT8, 2)]), "'a.b' is there twice"),
    "key not UTF-8": (build([kv(b"a\xff", T.UINT8, 1)]), "metadata key 0 is not UTF-8 at byte 33"),
    "value not UTF-8": (build([kv("a", T.STRING, b"\x01\0\0\0\0\0\0\0\xff")]), "'a' is not UTF-8"),
    "element not UTF-8": (
        build([kv("a", T.ARRAY, struct.pack("<IQ", T.STRING, 2) + text("ok") + text(b"\xe6\x97"))]),
        "element 1 of metadata key 'a' is not UTF-8",
    ),
    "unknown value type": (build([kv("a", 13, b"\0" * 8)]), "'a' has value type 13, expected 0 to 12"),
    "unknown element type": (build([kv("a", T.ARRAY, struct.pack("<IQ", 99, 1) + b"\0" * 8)]), "value type 99"),
    "bool of 2": (build([kv("a", T.BOOL, b"\2")]), "boolean of value 2"),
    "bools of 3": (build([kv("a", T.ARRAY, struct.pack("<IQ", T.BOOL, 3) + b"\0\3\1")]), "booleans with value 3"),
    "huge string": (build([kv("a", T.STRING, text("x", 2**62))]), "claims 4611686018427387904 bytes"),
    "string past the end": (build([kv("a", T.STRING, text("x" * 40, 60))]), "file ends at byte .* cut short"),
    "huge element": (
        build([kv("a", T.ARRAY, struct.pack("<IQ", T.STRING, 2) + text("x") + text("y", 2**62))]),
        "element 1 of metadata key 'a' at byte .* claims 4611686018427387904 bytes",
    ),
    "huge array": (build([kv("a", T.ARRAY, struct.pack("<IQ", T.INT64, 2**61))]), "claims 18446744073709551616 bytes"),
    "huge string array": (build([kv("a", T.ARRAY, struct.pack("<IQ", T.STRING, 2**62))]), "'a' at byte .* claims"),
    "deep nesting": (
        build([kv("a", T.ARRAY, (T.ARRAY, [(T.ARRAY, [(T.ARRAY, [(T.ARRAY, [])])])]))]),
        "nests arrays deeper than 3",
    ),
    "deeper nesting": (build([kv("a", T.ARRAY, struct.pack("<IQ", T.ARRAY, 1) * 5000)]), "nests arrays deeper than 3"),
    "many nested arrays": (
        build([kv("a", T.ARRAY, struct.pack("<IQ", T.ARRAY, 2**20) + bytes(12 * 2**20))]),
        "brings the array elements to",
    ),
    "alignment 0": (build([kv("general.alignment", T.UINT32, 0)]), "general.alignment is 0, expected a power of two"),
    "alignment 48": (build([kv("general.alignment", T.UINT32, 48)]), "general.alignment is 48"),
    "alignment 2^31": (build([kv("general.alignment", T.UINT32, 2**31)]), "general.alignment is 2147483648"),
    "alignment true": (build([kv("general.alignment", T.BOOL, 1)]), "general.alignment is True"),
    "alignment text": (build([kv("general.alignment", T.STRING, "32")]), "general.alignment is 32"),
    "no dimensions": (build([], [Tensor("t", (), Q.F32, bytes(4))]), "'t' has 0 dimensions, expected 1 to 4"),
    "five dimensions": (build([], [Tensor("t", (1,) * 5)]), "'t' has 5 dimensions"),
    "dimension 0": (build([], [Tensor("t", (8, 0))]), r"'t' has dimensions \[8, 0\]"),
    "overflowing product": (build([], [Tensor("t", (2**32, 2**32), Q.F32, b"")]), "product does not fit 63 bits"),
    "product that wraps to 0": (build([], [Tensor("t", (2**32, 2**16, 2**16), Q.F32, b"")]), "does not fit 63 bits"),
    "overflowing bytes": (build([], [Tensor("t", (2**61, 2), Q.F32, b"")]), "does not fit 63 bits"),
    "row not tiling Q8_0": (build([], [Tensor("t", (48, 2), Q.Q8_0, bytes(102))]), "'t' is Q8_0 with rows of 48"),
    "row not tiling Q4_K": (build([], [Tensor("t", (128, 2), Q.Q4_K, bytes(144))]), "rows of 128 values, .* 256"),
    "retired type": (build([], [Tensor("t", (32,), 4, bytes(32))]), "'t' has type number 4"),
    "unknown type": (build([], [Tensor("t", (32,), 2**31, bytes(32))]), "'t' has type number 2147483648"),
    "misaligned offset": (build([], [*f32("a"), Tensor("t", (8,), offset=40)]), "data offset 40, .* alignment 32"),
    "offset outside": (build([], [*f32("a"), Tensor("t", (8,), offset=2**40)]), r"'t' \(F32 \[8\]\) lies at bytes"),
    "offset near 2^64": (build([], [Tensor("t", (8,), offset=2**64 - 32)]), r"'t' \(F32 \[8\]\) lies at bytes"),
    "overlap": (build([], [Tensor("a", (16,)), Tensor("t", (8,), offset=32)]), "'a' and 't' overlap"),
    "same place": (build([], [*f32("a"), Tensor("t", (8,), offset=0)]), "'a' and 't' overlap"),
    "duplicate tensor": (build([], f32("t", "t")), "tensor 't' is there twice"),
    "tensor name past the end": (build([], f32("t"), n_tensors=2), "ends at byte|empty"),
    "data cut by one byte": (build([], f32("a", "b"))[:-1], r"'b' .*\(1 of 2 tensors are not whole\)"),
    "data all missing": (build([], f32("a", "b"))[:-64], r"'a' .*\(2 of 2 tensors are not whole\)"),
    "control characters": (build([], f32("a\n\x1b[31m", "a\n\x1b[31m")), r"'a\\n\\x1b\[31m' is there twice"),
    "long names": (build([], f32("n" * 5000, "n" * 5000)), r"n{70,80}\.\.\.' is there twice"),
    "name of 2^16": (build([kv("k" * 65_536, T.UINT8, 1)]), "claims 65536 bytes, expected at most 65535"),
    "two files joined": (build([], f32("a")) + build([], f32("b")), "second GGUF file begins at byte .* cat"),
    "vocabulary joined": (build([kv("a", T.UINT8, 1)]) + build([], f32("b")), "second GGUF file begins"),
    "joined without padding": (
        build([], [Tensor("a", (3,), data=bytes(12))])[:-20] + build(), "second GGUF file begins",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(tmp_path, case):
    data, expected = MALFORMED[case]
    path = write(tmp_path, data)
    assert refusal(path).startswith("model.gguf: ")
    with pytest.raises(GGUFError, match=expected):
        open_gguf(path)


def test_every_truncation_is_refused(tmp_path):
    data = small()
    n = open_gguf(write(tmp_path, data)).tensors["blk.0.exps.weight"]
    end = n.offset + n.n_bytes
    for size in [*range(0, end, 7), end - 1]:
        message = refusal(write(tmp_path, data[:size]))
        assert str(size) in message
    assert open_gguf(write(tmp_path, data[:end])).tensors  # the padding of the last tensor may be missing


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 16702517632\n"
SAFETENSORS = struct.pack("<Q", 80) + b'{"__metadata__":{}}' + bytes(80)
KINDS = {
    "html": (b"\n <!DOCTYPE html><html><title>Sign in</title>" + b" " * 90, "is an HTML page"),
    "html with a mark": (b"\xef\xbb\xbf<html lang=en>" + b" " * 90, "is an HTML page"),
    "xml": (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "is an XML document"),
    "lfs": (LFS, "is a Git LFS pointer that stands for 16702517632 bytes, .*git lfs pull"),
    "short zeros": (bytes(100), "begins with zeros"),
    "long zeros": (bytes(200_000), "begins with zeros"),
    "zeros, then something": (bytes(5000) + b"x" * 200, "bytes 00 00 00 00"),
    "json": (b'{"error":"Repository not found"}', "text file that begins with .*Repository not found"),
    "plain text": (b"Entry not found and so on", "text file that begins with 'Entry not found"),
    "safetensors": (SAFETENSORS, "is a safetensors file"),
    "zip": (b"PK\x03\x04" + bytes(99), "ZIP archive or PyTorch"),
    "gzip": (b"\x1f\x8b\x08" + bytes(99), "gzip archive"),
    "pickle": (b"\x80\x02}q" + bytes(99), "Python pickle"),
    "ggjt": (b"tjgg" + bytes(99), "older than GGUF"),
    "swapped": (b"FUGG" + bytes(99), "swapped bytes"),
    "noise": (b"\x8e\xfe\x01\x92" * 30, "bytes 8e fe 01 92, expected 47 47 55 46"),
    "one byte": (b"G", "1 bytes"),
    "empty": (b"", r"empty \(0 bytes\)"),
}


@pytest.mark.parametrize("case", KINDS)
def test_other_files_are_named(tmp_path, case):
    data, expected = KINDS[case]
    path = write(tmp_path, data)
    assert refusal(path).startswith("model.gguf: ")
    with pytest.raises(GGUFError, match=expected):
        open_gguf(path)


def test_pieces_and_unfinished_downloads_are_named(tmp_path):
    data = small()
    for name, hint in [
        ("m.gguf.part1of2", "join all pieces with cat"),
        ("m.gguf-split-a", "join all pieces with cat"),
        ("m.gguf.incomplete", "unfinished download"),
    ]:
        assert hint in refusal(write(tmp_path, data[:-100], name))
    assert "join all pieces" in refusal(write(tmp_path, b"\x8e\xfe\x01\x92" * 30, "m.gguf.part2of2"))
    assert "join" not in refusal(write(tmp_path, data[:-100]))


def test_paths(tmp_path):
    assert "no such file" in refusal(tmp_path / "missing.gguf")
    write(tmp_path, small(), "there.gguf")
    assert "there.gguf" in refusal(tmp_path / "missing.gguf")
    assert "is a directory" in refusal(tmp_path)
    assert "there.gguf" in refusal(tmp_path)
    assert "no such file" in refusal(tmp_path / "no folder" / "x.gguf")
    assert "cannot be read" in refusal(tmp_path / "there.gguf" / "x.gguf")
    assert "cannot be read" in refusal("a\0b")
    assert "cannot be read" in refusal("n" * 5000)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "pipe or device" in refusal(tmp_path / "pipe")
        assert "pipe or device" in refusal("/dev/zero")
        (tmp_path / "odd\n\x1b name.gguf").write_bytes(b"")
        assert r"odd\n\x1b name.gguf" in refusal(tmp_path / "odd\n\x1b name.gguf")
        (tmp_path / "link.gguf").symlink_to(tmp_path / "there.gguf")
        assert open_gguf(tmp_path / "link.gguf").name == "link.gguf"
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        assert "cannot be read" in refusal(tmp_path / "loop")


def test_a_huge_sparse_file_costs_little(tmp_path):
    """Counts that the file's size allows but no model has: refused before memory or time is spent."""

    def long_array(kind, n):
        return build([kv("a", T.ARRAY, struct.pack("<IQ", kind, n))])

    heads = {
        "goes on behind byte 67108864 (metadata key": long_array(T.STRING, 2**30),
        "array elements to 4194305": long_array(T.STRING, 2**22 + 1),
        "array elements to 4194306": long_array(T.INT64, 2**22 + 2),
        "array elements to 8388608": long_array(T.ARRAY, 2**17),
        "claims 8589934592 bytes, expected at most 67108864": build([kv("a", T.STRING, struct.pack("<Q", 2**33))]),
        "header goes on behind byte 67108864 (": build([kv("a", T.STRING, struct.pack("<Q", 2**26))]),
        "claims 2147483648 metadata keys": build(n_keys=2**31),
        "claims 2147483648 tensors": build(n_tensors=2**31),
    }
    for expected, head in heads.items():
        path = write(tmp_path, head)
        try:
            os.truncate(path, 2**34)
        except OSError:
            pytest.skip("the file system has no sparse files")
        tracemalloc.start()
        start = time.perf_counter()
        message = refusal(path)
        seconds, peak = time.perf_counter() - start, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert expected in message
        assert peak < 10e6, expected
        assert seconds < 2, expected


def test_the_most_that_a_header_may_hold(tmp_path):
    """Four million empty strings are the worst case inside the bounds."""
    path = write(tmp_path, build([kv("a", T.ARRAY, struct.pack("<IQ", T.STRING, 2**22) + bytes(8 * 2**22))]))
    start = time.process_time()
    assert len(open_gguf(path).metadata["a"]) == 2**22
    assert time.process_time() - start < 10
