"""How each ``tokenizer.ggml.pre`` cuts text into the pieces that byte-pair merging works on.

The patterns are those that llama.cpp applies to the same file, so that ids agree. It knows no letter case in
``youtu``, ``kimi-k2`` and the tekken family beyond ASCII, and counts every Unicode space as ``\\s`` alone, never as
a member of a range. The models' own tokenizers cut some pieces smaller; their merges never cross those cuts, so the
ids are the same. The patterns are Oniguruma's (the `tokenizers` library); each cuts every piece that the one before
left, and what it does not match stays a piece of its own.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """Patterns in the order they are applied, and what llama.cpp ties to the name.

    Parameters
    ----------
    patterns : tuple of str
        Oniguruma expressions.
    ignore_merges : bool
        A piece that is a token as a whole is taken as it is, whatever the merges say.
    add_bos : bool
        BOS is added where the file says nothing about it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _ranges(text: str) -> str:
    """``"41-5A B5"`` -> ``\\x{41}-\\x{5A}\\x{B5}``: the inside of a character class."""
    return "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in text.split())


# Letters with case as of Unicode 12, written out in DeepSeek's first tokenizer.
_CASED = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
# ASCII from "!" but no digits, full-width forms, quotation marks, ideographic comma and full stop.
_MARKS = _ranges("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3001-3002")
# Everything from Samaritan to the first ideograph, the ideographs, Hangul; without the spaces among them.
_EAST = _ranges("800-167F 1681-1FFF 200B-2027 202A-202E 2030-205E 2060-2FFF 3001-4E00 4E00-9FA5 AC00-D7FF")
_IDEOGRAPHS_KANA = _ranges("4E00-9FA5 3040-309F 30A0-30FF")
_HANGUL = _ranges("AC00-D7A3 3131-318E")
_CJK_MARKS = _ranges("FF01 2026 201C 201D 2018 2019 2014 FF1A FF1B FF0C 3001-303F FE30-FE4F")
_BOPOMOFO = _ranges("3105-312F")
_HAN = _ranges("4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF 2CEB0-2EBEF F900-FAFF 2F800-2FA1F")

_SUFFIX = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # (?i:) would also take a long s
_OTHERS = r" ?[^\s\p{L}\p{N}]+"  # a run of neither space, letter nor number
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # the last space before a word stays with the word
_GPT2_WORDS = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_OTHERS}|\s+(?!\S)"
_UPPER_THEN_LOWER = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*",
)


def _llama3_like(digits: str) -> str:
    return rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_OTHERS}[\r\n]*|{_SPACES}"


_GPT2 = PreTokenizer((_GPT2_WORDS,))
_LLAMA3 = PreTokenizer((_llama3_like(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_llama3_like(r"\p{N}"),))
_GLM = PreTokenizer(_LLAMA3.patterns, ignore_merges=True)
_GPT4O = PreTokenizer(
    ("|".join(f"{word}{_SUFFIX}?" for word in _UPPER_THEN_LOWER) + rf"|\p{{N}}{{1,3}}|{_OTHERS}[\r\n/]*|{_SPACES}",)
)
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        f"[{_IDEOGRAPHS_KANA}]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    )
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "gigachat": _GPT2,
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_MARKS}]+", r"\s+$", f"[{_EAST}]+", r"\p{N}+"),
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"[{_EAST}]+", r"\p{N}")),
    "deepseek-v3": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "kimi-k2": PreTokenizer(
        (
            rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_SUFFIX}?|\p{{N}}{{1,3}}|"
            rf"{_OTHERS}[\r\n]*|{_SPACES}",
        )
    ),
    "youtu": PreTokenizer(
        (
            f"[{_HANGUL}]+|[{_CJK_MARKS}]+|[{_BOPOMOFO}]+|[{_IDEOGRAPHS_KANA}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_SUFFIX}?|\p{{N}}|{_OTHERS}[\r\n/]*|{_SPACES}",
        ),
        ignore_merges=True,
    ),
    "glm4": _GLM,
    "glm5": _GLM,
    "chatglm-bpe": PreTokenizer(_GLM.patterns),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "tekken": PreTokenizer(
        ("|".join(_UPPER_THEN_LOWER) + rf"|\p{{N}}|{_OTHERS}[\r\n/]*|{_SPACES}",), ignore_merges=True, add_bos=True
    ),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "kanana2": _GPT4O,
}
