"""Attention weights of one layer as a picture: which earlier tokens each head looks at.

    python docs/examples/attention_picture.py [attention.svg]

Queries are carried into the latent space (absorbed), so a score is a dot product with a cache row, as in the kernels.
"""

import html
import sys

import numpy as np

from tmla import reference, rope
from tmla.loading import demo_path
from tmla.reference_weights import Weights
from tmla.requantize import open_checked
from tmla.tokenizer import Tokenizer

LAYER = 4
TEXT = "the king of Israel said unto the people, and the people said unto the king"
CELL, GAP, COLUMNS = 11, 36, 4


def attention_weights(path, ids, layer):
    """Weights of every head, float64 [H, T, T]: row t is what position t looks at."""
    trace = reference.trace(path, ids)
    gf, cfg = open_checked(path)
    with gf:
        w, block, n = Weights(gf), f"blk.{layer}.", cfg.qk_nope_head_dim
        x = trace.hidden[layer - 1]  # the residual before the layer, which is not the first
        x = reference.rms_norm(x, w.vector(block + "attn_norm.weight"), cfg.rms_eps)
        q = w.linear(x, block + "attn_q.weight").reshape(len(ids), cfg.n_heads, -1)
        turns = np.arange(len(ids))[:, None] * rope.rope_frequencies(cfg, len(ids))
        q_pe = reference.rotate(q[..., n:], turns, cfg.rope_pairs, cfg.rope_magnitude)
        out = []
        for h in range(cfg.n_heads):
            w_uk, _ = reference.head_expansion(w, cfg, block, h)  # [C, N]
            fused = np.concatenate([q[:, h, :n] @ w_uk.T, q_pe[:, h]], axis=1)  # [T, C + R]
            scores = cfg.softmax_scale * fused @ trace.cache[layer].T
            scores[np.triu_indices(len(ids), 1)] = -np.inf
            out.append(reference.softmax(scores))
    return np.stack(out)


def picture(weights, labels):
    """An SVG: a square a head, a line a position, the darker the more weight."""
    n_heads, n = weights.shape[:2]
    side, left = n * CELL, 70
    width = left + min(n_heads, COLUMNS) * (side + GAP)
    height = -(-n_heads // COLUMNS) * (side + GAP) + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="monospace"',
        'font-size="9"><style>text{fill:#333}.c{fill:#1565c0}.f{fill:none;stroke:#999;stroke-width:.5}.p{fill:#fff}',
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.c{fill:#64b5f6}.p{fill:#1c1f26}}</style>",
        f'<rect class="p" width="{width}" height="{height}"/>',
    ]
    for head in range(n_heads):
        x0, y0 = left + head % COLUMNS * (side + GAP), GAP + head // COLUMNS * (side + GAP)
        out.append(f'<text x="{x0}" y="{y0 - 6}">head {head}</text>')
        out.append(f'<rect class="f" x="{x0}" y="{y0}" width="{side}" height="{side}"/>')
        for t, u in np.argwhere(weights[head] >= 0.01):
            at = f'x="{x0 + u * CELL}" y="{y0 + t * CELL}" width="{CELL}" height="{CELL}"'
            out.append(f'<rect class="c" {at} opacity="{weights[head, t, u]:.2f}"/>')
        if head % COLUMNS == 0:
            for t, label in enumerate(labels):
                y = y0 + t * CELL + 8
                out.append(f'<text x="{left - 5}" y="{y}" text-anchor="end">{html.escape(label)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main():
    path = demo_path()
    gf, _ = open_checked(path)
    with gf:
        tokenizer = Tokenizer.from_gguf(gf)
    ids = tokenizer.encode_prompt(TEXT)
    weights = attention_weights(path, ids, LAYER)
    labels = [tokenizer.decode([i]).strip() or "(begin)" for i in ids]
    target = sys.argv[1] if len(sys.argv) > 1 else "attention.svg"
    with open(target, "w", encoding="utf-8") as f:
        f.write(picture(weights, labels))
    for head, w in enumerate(weights):
        seen = int(w[-1].argmax())
        print(f"head {head}: the last token ({labels[-1]}) gives {w[-1, seen]:.2f} to token {seen} ({labels[seen]})")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
