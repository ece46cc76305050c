"""Which experts a text goes to, layer by layer: the router's choices of the float64 reference."""

import numpy as np

from tmla import reference
from tmla.loading import demo_path
from tmla.requantize import open_checked
from tmla.tokenizer import Tokenizer

TEXTS = {
    "novel": "Mr. Darcy bowed, and said that he had not the pleasure of understanding her; he was in no humour.",
    "scripture": "And the LORD spake unto Moses, saying, Speak unto the children of Israel, and say unto them.",
}

path = demo_path()
gf, cfg = open_checked(path)
with gf:
    tokenizer = Tokenizer.from_gguf(gf)
first = cfg.n_layers - cfg.n_moe_layers

for name, text in TEXTS.items():
    ids = tokenizer.encode_prompt(text)
    chosen = reference.trace(path, ids).experts  # [mixture layers, T, K]
    print(f"{name}: {len(ids)} tokens, {cfg.n_experts_used} of {cfg.n_experts} experts each")
    for layer, experts in enumerate(chosen):
        count = np.bincount(experts.ravel(), minlength=cfg.n_experts)
        share = count / count.sum()
        spread = np.exp(-np.sum(share * np.log(np.where(share > 0, share, 1.0))))  # as many equally used experts
        numbers = " ".join(f"{n:3}" for n in count)
        print(f"  layer {first + layer}: {numbers}   like {spread:.1f} experts used equally")
