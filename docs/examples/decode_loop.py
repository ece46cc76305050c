"""A decode loop by hand: what `tmla.load` and `tmla.generate` do, without them. The kernels are those of a CPU."""

from tmla import layer, runtime, state, weights
from tmla.fields import FieldPool
from tmla.loading import demo_path
from tmla.plan import make_plan
from tmla.requantize import open_checked
from tmla.tokenizer import Tokenizer
from tmla.upload import Writer

N_CTX, N_TOKENS, CACHE = 256, 24, "f16"

# load: read the header, plan the fields, allocate them, copy the weights
gf, cfg = open_checked(demo_path())
tokenizer = Tokenizer.from_gguf(gf)
caps = runtime.init("cpu")
plan, pool = make_plan(cfg, N_CTX, CACHE, caps.layout), FieldPool()
g = weights.Globals(plan, cfg, pool)  # embedding, final norm, head
attention = [weights.AttentionBank(p, cfg, CACHE, pool, pool) for p in plan.attention]  # layers, with their cache
ffn = [weights.FFNBank(p, cfg, pool) for p in plan.ffn]
s = state.State(cfg, N_CTX, caps, pool, tokenizer.n_vocab)  # every activation of one token
for bank in ffn:
    bank.hidden = s.hidden[bank.moe]
writer = Writer([f for bank in (g, *attention, *ffn) for f in bank.fields] + [s.rope, s.scale])
s.write_tables(writer)
weights.load_weights(gf, [g, *attention, *ffn], writer)

attention_of = [bank for bank in attention for _ in range(bank.n)]  # layer -> bank
ffn_of = [bank for bank in ffn for _ in range(bank.n)]


def step(token, pos):
    """Feed one token; the best next one."""
    layer.begin(g, s, token, pos)  # x = embedding
    for i in range(cfg.n_layers):
        layer.attention_cpu(attention_of[i], s)  # x += attention(norm(x)), one row more in the cache
        layer.ffn_cpu(ffn_of[i], s)  # x += FFN(norm(x)), the experts chosen on the way
    layer.head_cpu(g, s)  # final norm and logits
    return int(s.logits.to_numpy()[0, : s.n_choice].argmax())


ids = tokenizer.encode_prompt("The captain of the ship")
for pos in range(len(ids) + N_TOKENS - 1):
    token = step(ids[pos], pos)
    if pos + 1 == len(ids):
        if token in tokenizer.end_ids:
            break
        ids.append(token)

print(tokenizer.decode(ids, skip_special=True))
