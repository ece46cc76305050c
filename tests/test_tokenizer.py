"""Ids against llama.cpp's, round trips, streaming, and vocabularies that are not sound."""

import contextlib
import copy
import gzip
import itertools
import json
import pathlib
import random
import time
import zlib

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from tests.vocabularies import bpe, bpe_keys, gguf, spm
from tmla.errors import GGUFError, ParameterError
from tmla.gguf_file import open_gguf
from tmla.pretokenizers import PRE_TOKENIZERS
from tmla.text import byte_chars
from tmla.tokenizer import Tokenizer

FILES = [
    "dsv2_lite",
    "dsv2_mini",
    "dsv2_lite_27l",
    "dsv2_qlora",
    "dsv2_split",
    "dsv3",
    "dsv3_unsplit",
    "dsv3_fused",
    "moonlight",
    "glm47flash",
    "youtu",
    "mistral_large3",
    "minicpm3",
    "plm",
]
HARD_TEXTS = (
    "camelCase HTTPServer don't DON'T we'LL 'x ''s",
    "大海　很　安静。「早上」の港口、ㄅㄆㄇ 안녕하세요 ㄱㄴ",
    "👩‍👩‍👧‍👦 🇩🇪 e\u0301 n\u0303 \u200d\u200b\ufeff\u00ad",
    "a\r\nb\r\r\n\n \n\t x\x0b\x0c\x85\u2028\u2029y\u3000z\u00a0\u00a0w",
    "\x00\x01\x1f\x7f\x80\x9f",
    "1234567 12,345.678 ½ ² Ⅷ 〇 ๑๒๓٤٥٦",
    "    if x:\n        return {'a': [1, 2]}\n\n\n\t\t# end",
    "x" * 3000,
    " " * 500 + "." * 500 + "\n" * 500,
    "ǅ ª º ʰ ﬁ İı ſ K Å 𝕏 𐐀 𞤀",
)


@pytest.mark.parametrize("name", FILES)
def test_ids_equal_llama_cpp(oracle, name):
    tokenizer = Tokenizer.from_gguf(open_gguf(oracle / f"{name}.gguf"))
    cases = json.loads((oracle / "tokenizer.json").read_text(encoding="utf-8"))[name]["cases"]
    assert len(cases) >= 27
    for case in cases:
        assert tokenizer.encode(case["text"], add_bos=False) == case["plain"], case["text"]
        assert tokenizer.encode(case["text"], special=True) == case["special"], case["text"]
        assert tokenizer.decode(case["plain"]) == case["text"]


@pytest.fixture(scope="module")
def llama_cpp_ids():
    """Vocabularies, texts, and checksums of the ids that llama.cpp gives: see data/make_tokenizer_reference.py."""
    path = pathlib.Path(__file__).parent / "data" / "tokenizer_llama_cpp.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))


def check_against(sums, texts, tokenizer):
    assert len(texts) >= 2000
    for text, expected in zip(texts, sums, strict=True):
        plain = tokenizer.encode(text, add_bos=False)
        found = zlib.crc32(repr((plain, tokenizer.encode(text, special=True))).encode()) & 0xFFFF
        assert found == expected, text
        assert tokenizer.decode(plain) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_of_many_texts_equal_llama_cpp(llama_cpp_ids, pre):
    sums = next(r["sums"] for r in llama_cpp_ids["bpe_reference"] if pre in r["pre"])
    keys = llama_cpp_ids["bpe"] | {"pre": pre, "add_bos_token": True}
    check_against(sums, llama_cpp_ids["texts"], Tokenizer.from_gguf(gguf(**keys)))


@pytest.mark.parametrize("i", range(3))
def test_sentencepiece_ids_equal_llama_cpp(llama_cpp_ids, i):
    keys = llama_cpp_ids["spm_common"] | llama_cpp_ids["spm"][i]
    sums = keys.pop("sums")
    check_against(sums, llama_cpp_ids["texts"], Tokenizer.from_gguf(gguf(**keys)))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_round_trip(pre):
    tokenizer = bpe(pre=pre)
    rng = random.Random(7)
    alphabet = "".join(HARD_TEXTS[:7]) + "the theThe"
    texts = [*HARD_TEXTS, *("".join(rng.choices(alphabet, k=rng.randrange(1, 60))) for _ in range(100))]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("deepseek-llm", "12345 don't", ["12345", " don", "'", "t"]),
        ("deepseek-coder", "12345 don't", ["1", "2", "3", "4", "5", " don", "'", "t"]),
        ("deepseek-v3", "12345 don't", ["123", "45", " don", "'t"]),
        ("gpt-2", "12345 don't", ["12345", " don", "'t"]),
        ("qwen2", "12 DON'T", ["1", "2", " DON", "'T"]),
        ("glm4", "12345 DON'T", ["123", "45", " DON", "'T"]),
        ("kimi-k2", "中文abc DON'T1234", ["中文", "abc", " DON'T", "123", "4"]),
        ("youtu", "안녕ㅋ。x DON'T12/", ["안녕ㅋ", "。", "x", " DON'T", "1", "2", "/"]),
        ("tekken", "fooBar 12", ["foo", "Bar", " ", "1", "2"]),
        ("gpt-4o", "fooBar's 1234", ["foo", "Bar's", " ", "123", "4"]),
        ("default", "a$$b 12345", ["a", "$$", "b", " ", "123", "45"]),
        ("deepseek-v3", "a  b \n\n c", ["a", " ", " b", " \n\n", " c"]),
    ],
)
def test_pieces(pre, text, pieces):
    """With a vocabulary that can join anything, the pieces show where the pre-tokenizer cuts."""
    splits = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in PRE_TOKENIZERS[pre].patterns])
    assert [piece for piece, _ in splits.pre_tokenize_str(text)] == pieces


def test_special_text_stays_text():
    tokenizer = bpe()
    plain = tokenizer.encode("<bos>the<eos>", add_bos=False)
    assert not {259, 260} & set(plain)
    assert tokenizer.decode(plain) == "<bos>the<eos>"
    assert tokenizer.encode("<bos>the<eos>", add_bos=False, special=True) == [259, 257, 260]
    assert tokenizer.encode("a<think>", add_bos=False)[-1] == 261  # user-defined: always whole
    assert tokenizer.is_control(259)
    assert not tokenizer.is_control(261)


def test_bos_once():
    tokenizer = bpe()
    assert tokenizer.encode("the") == [259, 257]
    assert tokenizer.encode_prompt("the") == [259, 257]
    assert tokenizer.encode_prompt("<bos>the", special=True) == [259, 257]
    assert tokenizer.encode_prompt("<bos>the").count(259) == 1
    assert bpe(add_bos_token=False).encode_prompt("the") == [257]
    assert bpe(add_bos_token=False).encode("the", add_bos=True) == [259, 257]


def test_whole_tokens_are_cut_out_longest_first():
    tokens = [*byte_chars(), "<a>", "<a><b>", "<b>"]
    tokenizer = Tokenizer.from_gguf(
        gguf(model="gpt2", pre="gpt-2", tokens=tokens, token_type=[1] * 256 + [3, 3, 3], merges=[])
    )
    assert tokenizer.encode("<a><b><b><a>", special=True) == [257, 258, 256]


def test_stream_never_splits_a_character():
    tokenizer = bpe()
    text = "é大🙂 the 👩‍👩‍👧 end"
    stream, shown = tokenizer.stream(), ""
    for i in tokenizer.encode(text, add_bos=False):
        piece = stream.push(i)
        shown += piece
        assert "\ufffd" not in piece
        assert text.startswith(shown)
    assert shown + stream.flush() == text
    stream = tokenizer.stream()
    assert stream.push(tokenizer.encode("🙂", add_bos=False)[0]) == ""
    assert stream.flush() == "\ufffd"


def test_stream_equals_decode_of_any_ids(rng):
    tokenizer = bpe()
    for _ in range(200):
        ids = rng.integers(0, tokenizer.n_vocab, rng.integers(0, 30)).tolist()
        whole = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, ids), stream.flush()]) == whole == tokenizer.decode(ids)


def test_ends_padding_and_unused():
    tokenizer = bpe()
    assert (tokenizer.eos_id, tokenizer.eot_id, tokenizer.pad_id, tokenizer.end_ids) == (260, None, 262, {260})
    assert tokenizer.unused_ids.tolist() == [262, 263]
    assert bpe(padding_token_id=260).unused_ids.tolist() == [263]  # padding that also ends turns may be chosen
    keys = bpe_keys()
    keys["tokens"][261] = "<|im_end|>"  # typed user-defined, as some converters do
    tokenizer = Tokenizer.from_gguf(gguf(**keys))
    assert tokenizer.end_ids == {260, 261}
    assert tokenizer.eot_id == 261
    assert tokenizer.is_control(261)
    assert bpe(eom_token_id=261).end_ids == {260, 261}
    assert tokenizer.decode([259, 257, 260]) == "<bos>the<eos>"
    assert tokenizer.decode([259, 257, 260], skip_special=True) == "the"


def test_ids_outside_the_list_are_refused():
    for bad in (264, 10**6, -1):
        with pytest.raises(ParameterError, match=r"outside the vocabulary, expected 0 to 263"):
            bpe().decode([bad])


def test_odd_text():
    tokenizer = bpe()
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.decode(tokenizer.encode("a\udc80b", add_bos=False)) == "a\ufffdb"
    with pytest.raises(ParameterError, match="bytes"):
        tokenizer.encode(b"the")
    with pytest.raises(ParameterError, match="BOS"):
        bpe(bos_token_id=None, add_bos_token=None).encode("x", add_bos=True)


def test_byte_without_a_token_is_said():
    keys = bpe_keys()
    keys["tokens"][ord("z")] = "ZZ"
    tokenizer = Tokenizer.from_gguf(gguf(**keys))
    assert tokenizer.encode("the", add_bos=False) == [257]
    with pytest.raises(ParameterError, match="0x7A"):
        tokenizer.encode("fizz")


def test_first_of_two_equal_merges_counts():
    tokens = [*byte_chars(), "ab", "bc"]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens}
    a = Tokenizer.from_gguf(gguf(**keys, merges=["b c", "a b", "b c"])).encode("abc")
    assert a == [tokens.index("a"), 257]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert', expected gpt2"),
        ({"pre": "nonsense"}, r"pre is 'nonsense'.*--override tokenizer\.ggml\.pre="),
        ({"pre": 3}, r"pre is no text"),
        ({"tokens": None}, r"tokens is missing"),
        ({"tokens": []}, r"tokens is empty"),
        ({"tokens": [1, 2]}, r"tokens is no list of texts"),
        ({"tokens": [*byte_chars(), "th", "the", "th"]}, r"tokens holds 'th' twice \(256 and 258\)"),
        ({"merges": None}, r"merges is missing"),
        ({"merges": ["t h", "q u"]}, r"merges number 1, 'q u', names a token"),
        ({"merges": ["th"]}, r"merges number 0, 'th', has no space"),
        ({"merges": [""]}, r"merges number 0"),
        ({"token_type": [1, 1]}, r"token_type holds 2 values, expected 264"),
        ({"token_type": [1] * 263 + [9]}, r"token_type is 9 for token 263"),
        ({"token_type": [1] * 257 + [3] + [1] * 6}, r"merges make a control token, 'the'"),
        ({"bos_token_id": 264}, r"bos_token_id is '264', expected an id below 264"),
        ({"eos_token_id": -1}, r"eos_token_id is '-1'.*--override tokenizer\.ggml\.eos_token_id"),
        ({"eos_token_id": 1.5}, r"eos_token_id"),
        ({"eos_token_id": True}, r"eos_token_id"),
        ({"bos_token_id": None}, r"bos_token_id is missing.*add_bos_token=false"),
        ({"add_bos_token": 7}, r"add_bos_token is '7', expected true or false"),
    ],
)
def test_unsound_vocabulary(changes, message):
    with pytest.raises(GGUFError, match=message) as e:
        bpe(**changes)
    assert str(e.value).startswith("x.gguf: ")
    assert "\n" not in str(e.value)


def test_unsound_metadata_never_crashes():
    """Whatever a key holds instead of what belongs there, the error is a GGUFError."""
    junk = [None, 0, -1, 2.5, "", "x", True, [], ["a"], [1], np.arange(3), np.zeros(264), [None], {"a": 1}]
    for key in bpe_keys():
        for value in junk:
            keys = copy.deepcopy(bpe_keys()) | {key: value}
            with contextlib.suppress(GGUFError, ParameterError):
                Tokenizer.from_gguf(gguf(**keys)).encode("the é")


def test_empty_token_texts_are_named():
    keys = bpe_keys()
    keys["tokens"][261] = keys["tokens"][262] = ""
    assert Tokenizer.from_gguf(gguf(**keys)).n_vocab == 264


def test_spm_joins_by_score():
    tokenizer = spm()
    names = tokenizer.vocab.tokens
    assert [names[i] for i in tokenizer.encode("abc")] == ["<s>", "▁ab", "c"]
    assert [names[i] for i in tokenizer.encode("abc", add_bos=False)] == ["▁ab", "c"]
    free = spm(add_space_prefix=False)
    assert [names[i] for i in free.encode("aaaa", add_bos=False)] == ["aaa", "a"]  # equal scores: leftmost
    assert [names[i] for i in free.encode("xé€", add_bos=False)] == ["<0x78>", "é", "<0xE2>", "<0x82>", "<0xAC>"]


def test_spm_round_trip_and_specials():
    tokenizer = spm()
    for text in ("abc", " abc", "  a  b ", "x\n€🙂", "", "aaaaaa", "</s>", "<0x0A>"):
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids) == text
        assert not {1, 2} & set(ids)
    ids = tokenizer.encode("<s>ab</s> b", special=True, add_bos=False)
    assert [tokenizer.vocab.tokens[i] for i in ids] == ["<s>", "▁ab", "</s>", "▁", "▁", "b"]
    assert tokenizer.decode(ids) == "<s>ab</s> b"
    assert tokenizer.encode_prompt("<s>ab", special=True) == tokenizer.encode("ab")
    assert tokenizer.decode([266], skip_special=True) == "ab"
    assert tokenizer.stream(continues=True).push(266) == " ab"  # within a text the space belongs to it


def test_spm_needs_scores():
    with pytest.raises(GGUFError, match="scores is missing"):
        spm(scores=None)


def big_vocabulary(n=102_400, n_special=800):
    tokens, merges = list(byte_chars()), []
    pairs = itertools.chain(
        itertools.product(tokens[:], tokens[:]), ((a + b, c) for a, b, c in itertools.product(*[tokens[:]] * 3))
    )
    for left, right in itertools.islice(pairs, n - n_special - len(tokens)):
        tokens.append(left + right)
        merges.append(f"{left} {right}")
    tokens += [f"<｜place▁holder▁{i}｜>" for i in range(n_special)]
    return gguf(
        model="gpt2",
        pre="deepseek-llm",
        tokens=tokens,
        merges=merges,
        token_type=[1] * (n - n_special) + [3] * n_special,
    )


def test_building_a_big_vocabulary_is_quick():
    gf = big_vocabulary()
    seconds = []
    for _ in range(2):
        start = time.process_time()
        tokenizer = Tokenizer.from_gguf(gf)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.5
    text = "The quick brown fox; 12345 大海 " * 500
    assert tokenizer.decode(tokenizer.encode(text)) == text
