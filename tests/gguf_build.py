"""Builds small GGUF files byte by byte, right or wrong on purpose, and mutates them."""

import dataclasses
import struct

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType as T

from tmla.errors import GGUFError
from tmla.gguf_file import open_gguf

CODES = {T.UINT8: "B", T.INT8: "b", T.UINT16: "H", T.INT16: "h", T.UINT32: "I", T.INT32: "i", T.FLOAT32: "f"}
CODES |= {T.BOOL: "B", T.UINT64: "Q", T.INT64: "q", T.FLOAT64: "d"}


@dataclasses.dataclass
class Tensor:
    name: str
    dims: tuple  # ggml order, fastest first
    type: int = Q.F32
    data: bytes | None = None  # None: as many zeros as dims say, F32
    offset: int | None = None  # None: behind the one before


def text(s, n=None):
    """A GGUF string; ``n`` replaces its true length."""
    raw = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(raw) if n is None else n) + raw


def payload(kind, value):
    if kind == T.STRING:
        return text(value)
    if kind == T.ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(payload(inner, v) for v in values)
    return struct.pack("<" + CODES[kind], value)


def kv(key, kind, value):
    """One metadata entry; arrays are (element type, values); bytes stand for a payload as it is."""
    return text(key) + struct.pack("<I", kind) + (value if isinstance(value, bytes) else payload(kind, value))


def build(keys=(), tensors=(), *, version=3, magic=b"GGUF", alignment=32, n_keys=None, n_tensors=None, tail=b""):
    """Bytes of a GGUF file. ``keys`` from :func:`kv`; the counts can be replaced by wrong ones."""
    counts = (len(tensors) if n_tensors is None else n_tensors, len(keys) if n_keys is None else n_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys)
    data = b""
    for t in tensors:
        raw = bytes(4 * int(np.prod(t.dims))) if t.data is None else t.data
        offset = len(data) if t.offset is None else t.offset
        head += text(t.name) + struct.pack(f"<I{len(t.dims)}QIQ", len(t.dims), *t.dims, t.type, offset)
        data += raw + bytes(-len(raw) % alignment)
    return head + bytes(-len(head) % alignment) + data + tail


def small(rng=None, *, extra=()):
    """A right file of a few kB: every value type, F32, F16 and Q8_0 tensors with random contents."""
    rng = rng or np.random.default_rng(7)
    keys = [kv("general.architecture", T.STRING, "deepseek2"), *extra]
    keys += [kv(f"x.{kind.name}", kind, 1) for kind in CODES]
    keys += [kv(f"a.{kind.name}", T.ARRAY, (kind, [0, 1, 1])) for kind in CODES]
    keys += [kv("tokenizer.ggml.tokens", T.ARRAY, (T.STRING, ["a", "Ġb", "", "日本"] * 8))]
    keys += [kv("nested", T.ARRAY, (T.ARRAY, [(T.INT32, [1, 2]), (T.STRING, ["x"]), (T.UINT8, [])]))]
    q8 = rng.integers(0, 256, (6, 34), np.uint8)
    q8[:, :2] = rng.uniform(0.1, 1, (6, 1)).astype(np.float16).view(np.uint8)
    tensors = [
        Tensor("token_embd.weight", (64, 3), Q.Q8_0, q8.tobytes()),
        Tensor("output_norm.weight", (7,), Q.F32, rng.standard_normal(7).astype("<f4").tobytes()),
        Tensor("blk.0.exps.weight", (5, 3, 2), Q.F16, rng.standard_normal(30).astype("<f2").tobytes()),
    ]
    return build(keys, tensors)


def write(folder, data, name="model.gguf"):
    path = folder / name
    path.write_bytes(data)
    return path


def refusal(path):
    """Open ``path``, which must fail; returns the message, which must be one printable line."""
    with pytest.raises(GGUFError) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 800
    return message


_INTERESTING = [0, 1, 2, 3, 7, 8, 9, 12, 31, 33, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]
_INTERESTING += [2**20, 2**22, 2**26, 2**40, 2**60, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 32]


def mutate(data, rng, n_header):
    """One to four random changes, most of them within the first ``n_header`` bytes."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 5)):
        end = min(len(data), n_header) if rng.random() < 0.9 else len(data)
        if end < 9:
            break
        at = int(rng.integers(0, end - 8))
        n = int(rng.integers(1, 64))
        value = _INTERESTING[rng.integers(len(_INTERESTING))]
        match rng.integers(10):
            case 0:
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                data[at] = int(rng.integers(256))
            case 2:
                data[at : at + 4] = struct.pack("<I", value & 0xFFFFFFFF)
            case 3:
                data[at : at + 8] = struct.pack("<Q", value)
            case 4:  # where a small count or length stands
                spots = [i for i in range(at, min(at + 200, end - 8)) if data[i] and not any(data[i + 1 : i + 8])]
                if spots:
                    data[spots[0] : spots[0] + 8] = struct.pack("<Q", value)
            case 5:
                del data[at : at + n]
            case 6:
                data[at:at] = rng.bytes(n)
            case 7:
                data[at:at] = data[at : at + n]
            case 8:
                other = int(rng.integers(0, end - 8))
                data[at : at + 8], data[other : other + 8] = data[other : other + 8], data[at : at + 8]
            case 9:
                del data[at + n :]
    return bytes(data)
