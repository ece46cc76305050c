"""Train the tokenizer on the training documents and encode every split.

    python -m tools.demo_model.tokens build/demo

Byte-level BPE behind GPT-2's pre-tokenizer, which GGUF files call ``gpt-2``.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.demo_model.corpus import SOURCES, SPLITS, dialogues

VOCABULARY = 4096
PRE_TOKENIZER = "gpt-2"
CONTROL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>")  # ids 0, 1, 2, ...
BOS, EOS, PAD, USER, ASSISTANT = range(len(CONTROL))


def read_documents(folder, split):
    """Documents of one split: list of dicts with source, name and text."""
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def train_tokenizer(texts, vocabulary=VOCABULARY):
    """Train byte-level BPE on an iterable of str; the control tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_split(tokenizer, documents):
    """Encode documents, each as ``bos text eos``.

    Returns
    -------
    dict of np.ndarray
        ``ids`` u16 [T], ``starts`` i64 [documents] (place of each bos), ``source`` u8 [documents] (index in
        `SOURCES`), ``chat`` u16 (dialogues in the form of the chat template), ``chat_starts`` i64.
    """
    names = list(SOURCES)
    ids, starts, chat, chat_starts = [], [], [], []
    for document, encoded in zip(documents, tokenizer.encode_batch([d["text"] for d in documents])):
        starts.append(len(ids))
        ids += [BOS, *encoded.ids, EOS]
        if document["source"] in ("austen", "moby-dick"):
            for turns in dialogues(document["text"]):
                chat_starts.append(len(chat))
                chat.append(BOS)
                for n, turn in enumerate(tokenizer.encode_batch(turns)):
                    chat += [ASSISTANT, *turn.ids, EOS] if n % 2 else [USER, *turn.ids]
    return {
        "ids": np.array(ids, np.uint16),
        "starts": np.array(starts, np.int64),
        "source": np.array([names.index(d["source"]) for d in documents], np.uint8),
        "chat": np.array(chat, np.uint16),
        "chat_starts": np.array(chat_starts, np.int64),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder that tools.demo_model.corpus wrote")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    args = parser.parse_args()
    documents = {split: read_documents(args.folder, split) for split in SPLITS}
    tokenizer = train_tokenizer((d["text"] for d in documents["train"]), args.vocabulary)
    tokenizer.save(str(args.folder / "tokenizer.json"))
    arrays = {}
    for split in SPLITS:
        encoded = encode_split(tokenizer, documents[split])
        arrays |= {f"{split}_{key}": value for key, value in encoded.items()}
        n_bytes = sum(len(d["text"].encode()) for d in documents[split])
        n_ids = len(encoded["ids"])
        print(f"{split:6} {n_ids:9,} tokens, {n_bytes / n_ids:.3f} bytes a token; chat {len(encoded['chat']):,} tokens")
    np.savez_compressed(args.folder / "tokens.npz", vocabulary=args.vocabulary, **arrays)


if __name__ == "__main__":
    main()
