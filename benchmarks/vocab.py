"""Byte-level BPE vocabularies of any size for generated model files.

Every token but the control and padding ones is a byte or the result of a merge of two earlier tokens, so text goes in
and out of every file, and the tables are as large as those of the real model.
"""

import collections
import itertools
import re

# A few plain sentences: enough of English for readable pieces in small vocabularies.
TEXT = """
The old ferry left the harbour before the sun was over the hills, and there were only three people on the deck: a woman
who wanted to see her brother, a boy with a box of letters, and the man that kept the engine going. None of them had
said a word since the rope was thrown off. The water was grey and still, and the wind that would come later in the day
had not yet started. She asked how long it would take to get to the other side. About an hour, the man said, if nothing
goes wrong; and when something does go wrong, it takes as long as it takes. He had been doing this work for thirty years
and he knew every rock, every light and every turn of the current between the two towns. The boy looked at the letters
again. Most of them were for the school, some for the doctor, and one had no name on it at all, which is what made him
think about it more than about the others. What should I do with this one, he asked. Keep it until somebody wants it,
said the woman, and if nobody ever does, then read it yourself, and write back. They all laughed at that. Then the
engine stopped, just for a moment, and it was so quiet that they could hear the birds on the shore behind them. It
started again by itself, as it always did, and the small white houses of the town came slowly out of the morning mist.
"""
CONTROL_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜▁pad▁｜>")
N_PADDING = 24  # unused ids at the end of large vocabularies, as converters append them
TYPE_NORMAL, TYPE_CONTROL, TYPE_UNUSED = 1, 3, 5

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}<｜User｜>{{ m['content'] }}"
    "{% else %}<｜Assistant｜>{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


def byte_symbols() -> list[str]:
    """The 256 printable stand-ins for bytes, in the order of their code points (ids 0..255 of GPT-2)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in plain] + [chr(0x100 + i) for i in range(256 - len(plain))]


def _trained_merges(text: str, limit: int):
    """Yield BPE merges of a text, the most frequent pair first; ties go to the pair seen first."""
    words = collections.Counter(re.findall(r"[A-Za-z]+", text))
    pieces = [("Ġ", *w) for w in words]
    weights = list(words.values())
    for _ in range(limit):
        count: dict[tuple[str, str], int] = {}
        for piece, weight in zip(pieces, weights):
            for pair in itertools.pairwise(piece):
                count[pair] = count.get(pair, 0) + weight
        if not count:
            return
        best = max(count, key=count.__getitem__)
        yield best
        for k, piece in enumerate(pieces):
            if best in itertools.pairwise(piece):
                pieces[k] = _merged(piece, best)


def _merged(piece: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    i = 0
    while i < len(piece):
        if piece[i : i + 2] == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(piece[i])
            i += 1
    return tuple(out)


def _systematic_merges():
    """Yield merges without end in sight: letter pairs, pairs after a space, then pairs of pairs (460,000)."""
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    pairs = [a + b for a in letters for b in letters]
    yield from ((a, b) for a in letters for b in letters)
    yield from (("Ġ", a) for a in letters)
    yield from (("Ġ" + a, b) for a in letters for b in letters)
    yield from ((a, b) for a in pairs for b in pairs)
    yield from ((a + b, c) for a in pairs for b in pairs for c in letters)


def build_vocab(n_vocab: int) -> tuple[list[str], list[int], list[str]]:
    """Make tokens, token types and merges of a byte-level BPE vocabulary.

    Parameters
    ----------
    n_vocab : int
        Ids in all. Below 261 some bytes have no token (printable ASCII comes first); at least 8.

    Returns
    -------
    tokens : list of str, length `n_vocab`
        Bytes, merges, padding (large vocabularies), and the five control tokens last.
    types : list of int
        GGUF token types.
    merges : list of str
        ``"left right"``; both sides are earlier tokens.

    Raises
    ------
    ValueError
        `n_vocab` is too small, or larger than 12 million.
    """
    if n_vocab < 8:
        raise ValueError(f"a vocabulary of {n_vocab} tokens; at least 8 are needed")
    n_control, n_padding = len(CONTROL_TOKENS), N_PADDING if n_vocab >= 4096 else 0
    room = n_vocab - n_control - n_padding
    tokens = byte_symbols()
    if room < 256:
        blanks = ["Ġ", "Ċ", "ĉ"]
        tokens = (blanks + [t for t in tokens if t not in blanks])[:room]
    seen, merges = set(tokens), []
    source = itertools.chain(_trained_merges(TEXT, min(room - 256, 1500)), _systematic_merges())
    while len(tokens) < room:
        left, right = next(source, (None, None))
        if left is None:
            raise ValueError(f"no vocabulary of {n_vocab} tokens can be made; at most 12,000,000")
        if left + right not in seen and left in seen and right in seen:
            seen.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    types = [TYPE_NORMAL] * room + [TYPE_UNUSED] * n_padding + [TYPE_CONTROL] * n_control
    tokens += [f"[PAD{room + i}]" for i in range(n_padding)] + list(CONTROL_TOKENS)
    return tokens, types, merges
