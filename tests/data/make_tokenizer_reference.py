"""Asks llama.cpp for the ids of the texts in tokenizer_llama_cpp.json.gz and stores their checksums there.

``python tests/data/make_tokenizer_reference.py`` needs llama-cpp-python (extra ``bench``). The file holds two
vocabularies, made so that merges cross every boundary a pre-tokenizer may draw, and some 2,200 texts.
"""

import ctypes
import gzip
import json
import tempfile
import zlib
from pathlib import Path

import gguf
import llama_cpp

from tmla.pretokenizers import PRE_TOKENIZERS

FILE = Path(__file__).with_name("tokenizer_llama_cpp.json.gz")


def checksum(plain: list[int], special: list[int]) -> int:
    return zlib.crc32(repr((plain, special)).encode()) & 0xFFFF


def write_vocabulary(path: Path, keys: dict) -> None:
    w = gguf.GGUFWriter(str(path), "deepseek2")
    w.add_tokenizer_model(keys["model"])
    w.add_token_list(keys["tokens"])
    w.add_token_types(keys["token_type"])
    w.add_bos_token_id(keys["bos_token_id"])
    w.add_eos_token_id(keys["eos_token_id"])
    if keys["model"] == "gpt2":
        w.add_tokenizer_pre(keys["pre"])
        w.add_token_merges(keys["merges"])
        w.add_add_bos_token(True)
    else:
        w.add_token_scores(keys["scores"])
        w.add_add_space_prefix(keys["add_space_prefix"])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def llama_cpp_checksums(path: Path, texts: list[str]) -> list[int]:
    parameters = llama_cpp.llama_model_default_params()
    parameters.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    vocab = llama_cpp.llama_model_get_vocab(model)
    buffer = (ctypes.c_int32 * 20_000)()
    out = []
    for text in texts:
        data, ids = text.encode(), []
        for special in (False, True):
            n = llama_cpp.llama_tokenize(vocab, data, len(data), buffer, len(buffer), special, special)
            assert n >= 0
            ids.append(list(buffer[:n]))
        out.append(checksum(*ids))
    llama_cpp.llama_model_free(model)
    return out


def main() -> None:
    stored = json.loads(gzip.decompress(FILE.read_bytes()))
    reference: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in PRE_TOKENIZERS:
            write_vocabulary(Path(folder) / "x.gguf", stored["bpe"] | {"pre": pre})
            sums = llama_cpp_checksums(Path(folder) / "x.gguf", stored["texts"])
            reference.setdefault(str(sums), {"pre": [], "sums": sums})["pre"].append(pre)
        for keys in stored["spm"]:
            write_vocabulary(Path(folder) / "x.gguf", stored["spm_common"] | keys)
            keys["sums"] = llama_cpp_checksums(Path(folder) / "x.gguf", stored["texts"])
    stored["bpe_reference"] = list(reference.values())
    stored["llama_cpp_python"] = llama_cpp.__version__
    FILE.write_bytes(gzip.compress(json.dumps(stored, ensure_ascii=False).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
