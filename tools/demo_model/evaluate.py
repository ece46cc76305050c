"""Measure a trained demo model on the held-out test documents.

    python -m tools.demo_model.evaluate build/demo tmla/data/demo.gguf --run build/demo/run

Prints perplexity by source and by position, how often each expert is chosen, and n-gram baselines on the same tokens.
With `--run`, the f32 weights before quantisation are measured, too.
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import torch

from tools.demo_model.corpus import SOURCES
from tools.demo_model.export import load_tensors, read_tensors
from tools.demo_model.network import Network, Shape
from tools.demo_model.ngram import KneserNey
from tools.demo_model.tokens import BOS, read_documents
from tools.demo_model.train import load_weights

POSITIONS = (0, 128, 256, 512, 768, 1024, 1280, 1536, 1792, 2048)


def windows_of(ids, starts, context):
    """Cut each document into windows of at most `context` targets: (document, inputs, targets) with a leading bos."""
    for document, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)])):
        for place in range(start + 1, end, context):
            targets = ids[place : min(end, place + context)]
            yield document, np.concatenate(([BOS], targets[:-1])), targets


@torch.no_grad()
def measure(network, arrays, split="test", limit=None):
    """Run the network over a split.

    Returns
    -------
    nats : list of (int, np.ndarray)
        Document and cross entropy of each target of each window.
    chosen : np.ndarray, i64 [MoE layers, E]
        How often each expert was chosen.
    """
    shape = network.shape
    nats, counts = [], np.zeros((shape.layers - 1, shape.experts), np.int64)
    for document, inputs, targets in windows_of(arrays[f"{split}_ids"], arrays[f"{split}_starts"], shape.context):
        if limit is not None and len(nats) >= limit:
            break
        x, _, chosen = network.hidden(torch.from_numpy(inputs.astype(np.int64))[None])
        logp = network.head(x)[0].log_softmax(-1)
        index = torch.from_numpy(targets.astype(np.int64))
        nats.append((document, -logp.gather(-1, index[:, None])[:, 0].numpy()))
        for layer, c in enumerate(chosen):
            counts[layer] += np.bincount(c.flatten().numpy(), minlength=shape.experts)
    return nats, counts


def by_source(nats, source, n_bytes):
    """Rows (name, tokens, perplexity a token, perplexity a byte), the last for everything."""
    rows = []
    for n, name in [*enumerate(SOURCES), (None, "all")]:
        values = [v for d, v in nats if n is None or source[d] == n]
        size = sum(b for d, b in enumerate(n_bytes) if n is None or source[d] == n)
        total = np.concatenate(values)
        rows.append((name, len(total), np.exp(total.mean()), np.exp(total.sum() / size)))
    return rows


def by_position(nats, context):
    """Rows (from, to, perplexity) over the windows that fill the context: each row a part of all of them."""
    full = np.array([v for _, v in nats if len(v) == context])
    return [(a, b, np.exp(full[:, a:b].mean())) for a, b in itertools.pairwise(POSITIONS) if b <= context], len(full)


def report_network(name, network, arrays, n_bytes):
    """Measure one set of weights and print its tables."""
    nats, counts = measure(network, arrays)
    print(f"\n{name}\n| text | tokens | perplexity a token | a byte |\n| --- | --- | --- | --- |")
    for row in by_source(nats, arrays["test_source"], n_bytes):
        print("| {} | {:,} | {:.3f} | {:.4f} |".format(*row))
    rows, n = by_position(nats, network.shape.context)
    print(f"\n| position ({n} full windows) | perplexity |\n| --- | --- |")
    for a, b, p in rows:
        print(f"| {a} to {b - 1} | {p:.2f} |")
    print("\n| layer |" + "".join(f" {e} |" for e in range(network.shape.experts)))
    print("| --- |" + " --- |" * network.shape.experts)
    for layer, row in enumerate(counts):
        print(f"| {layer + 1} |" + "".join(f" {100 * c / row.sum():.1f} % |" for c in row))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with tokens.npz and test.jsonl")
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--run", type=Path, help="folder with best-*.npz")
    args = parser.parse_args()
    arrays = dict(np.load(args.folder / "tokens.npz"))
    n_bytes = [len(d["text"].encode()) for d in read_documents(args.folder, "test")]
    is_target = arrays["test_ids"] != BOS
    for order in (2, 3, 5):
        model = KneserNey(arrays["train_ids"], order, int(arrays["vocabulary"]))
        nats = -np.log(model.probabilities(arrays["test_ids"]))[is_target[order - 1 :]]
        share = np.exp(nats.sum() / sum(n_bytes))
        print(f"Kneser-Ney order {order}: perplexity {np.exp(nats.mean()):.2f} a token, {share:.4f} a byte", flush=True)
    network = Network(Shape(vocabulary=int(arrays["vocabulary"]))).eval()
    load_tensors(network, read_tensors(args.gguf))
    report_network("Q8_0, dequantised", network, arrays, n_bytes)
    if args.run:
        report_network("f32", load_weights(args.run, network.shape), arrays, n_bytes)


if __name__ == "__main__":
    main()
