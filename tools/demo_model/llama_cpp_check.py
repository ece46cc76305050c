"""Perplexity and logits of the demo file in llama.cpp (llama-cpp-python) on held-out documents.

    python -m tools.demo_model.llama_cpp_check tmla/data/demo.gguf build/demo/test.jsonl --save build/demo/llama.npz
    tmla compare tmla/data/demo.gguf --logits build/demo/llama.npz --cache f32

Text is tokenised by llama.cpp; documents are cut into windows as in `evaluate.py`. The cache is f32, flash attention
is off, all else is llama.cpp's default: it rounds activations to Q8_0, which alone moves the logits a little.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from llama_cpp import Llama

F32 = 0  # ggml's number of the type


def run(model, ids):
    """Logits f32 [T, vocabulary] after each of the ids, in one batch."""
    model.reset()
    model.eval([int(i) for i in ids])
    return np.array(model.scores[: len(ids)], np.float32)


def log_softmax(logits):
    """Log probabilities, f64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("documents", type=Path, help="test.jsonl")
    parser.add_argument("--windows", type=int, default=12, help="windows to measure, 0 all (12)")
    parser.add_argument("--every", type=int, default=1, help="take only each N-th document (1)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", type=Path, help="npz for tmla compare: tokens, starts and logits of all windows")
    args = parser.parse_args()
    model = Llama(
        str(args.gguf), n_ctx=0, n_batch=2048, n_ubatch=512, logits_all=True, verbose=False, seed=0,
        type_k=F32, type_v=F32, flash_attn=False, n_threads=args.threads, n_threads_batch=args.threads,
    )  # fmt: skip
    context, nats, inputs_of, logits_of = model.n_ctx(), [], [], []
    for line in args.documents.read_text(encoding="utf-8").splitlines()[:: args.every]:
        text = json.loads(line)["text"]
        ids = [*model.tokenize(text.encode(), add_bos=False, special=False), model.token_eos()]
        for start in range(0, len(ids), context):
            targets = np.array(ids[start : start + context])
            inputs = np.concatenate(([model.token_bos()], targets[:-1]))
            logits = run(model, inputs)
            nats.append(-log_softmax(logits)[np.arange(len(targets)), targets])
            if args.save:
                inputs_of.append(inputs)
                logits_of.append(logits)
            if len(nats) == args.windows:
                break
        if len(nats) == args.windows:
            break
    total = np.concatenate(nats)
    print(f"{len(nats)} windows, {len(total):,} tokens: perplexity {np.exp(total.mean()):.4f}")
    if args.save:
        starts = np.cumsum([0, *map(len, inputs_of)])[:-1]
        np.savez(args.save, tokens=np.concatenate(inputs_of), starts=starts, logits=np.concatenate(logits_of))


if __name__ == "__main__":
    main()
