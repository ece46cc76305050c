"""DeepSeek-V2's structure in PyTorch: MLA, a dense first layer, then routed and shared experts.

Letters as elsewhere in the project: D width, H heads, C latent, N nope, R rope, V value width, E experts, K used.
"""

import dataclasses
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ROPE_BASE = 10000.0
BETA_FAST, BETA_SLOW = 32.0, 1.0
RMS_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one model; the defaults are the shipped demo model's."""

    vocabulary: int = 4096
    layers: int = 6
    width: int = 320  # D
    heads: int = 8  # H
    latent: int = 96  # C
    nope: int = 32  # N
    rope: int = 32  # R
    value: int = 32  # V
    dense_width: int = 768
    experts: int = 8  # E
    experts_used: int = 2  # K
    expert_width: int = 128  # of a routed expert and of the one shared expert
    context: int = 2048
    original_context: int = 512  # YaRN's
    yarn_factor: float = 4.0
    yarn_mscale: float = 0.707

    @property
    def score_scale(self):
        """Softmax scale: the width before absorption and YaRN's mscale squared."""
        mscale = 1.0 + 0.1 * self.yarn_mscale * math.log(self.yarn_factor)
        return mscale**2 / math.sqrt(self.nope + self.rope)


def rope_table(shape):
    """YaRN's cos and sin: two f32 tensors [context, R/2], from float64."""
    pair = np.arange(shape.rope // 2)
    plain = ROPE_BASE ** (-2.0 * pair / shape.rope)

    def turns(beta):  # the pair that turns beta times within the original context
        return shape.rope * math.log(shape.original_context / (beta * 2 * math.pi)) / (2 * math.log(ROPE_BASE))

    low = max(0, math.floor(turns(BETA_FAST)))
    high = min(shape.rope - 1, math.ceil(turns(BETA_SLOW)))
    slow = np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)  # 0: keep the frequency, 1: divide by the factor
    angles = np.arange(shape.context)[:, None] * (plain * (1.0 - slow) + plain / shape.yarn_factor * slow)
    return torch.tensor(np.cos(angles), dtype=torch.float32), torch.tensor(np.sin(angles), dtype=torch.float32)


def rotate(x, cos, sin):
    """Turn consecutive pairs: x [..., T, R], cos and sin [T, R/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a weight, in at least f32."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_EPS) * self.weight).type_as(x)


class Dropout(nn.Module):
    """Dropout whose probability is a buffer: another value compiles nothing anew."""

    def __init__(self, p):
        super().__init__()
        self.register_buffer("p", torch.tensor(float(p)), persistent=False)

    def forward(self, x):
        if not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * (keep / (1.0 - self.p)).type_as(x)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form: keys and values are made from the latent."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        d, h = shape.width, shape.heads
        self.q = nn.Linear(d, h * (shape.nope + shape.rope), bias=False)
        self.kv_a = nn.Linear(d, shape.latent + shape.rope, bias=False)
        self.kv_a_norm = RMSNorm(shape.latent)
        self.kv_b = nn.Linear(shape.latent, h * (shape.nope + shape.value), bias=False)  # per head: N rows, V rows
        self.output = nn.Linear(h * shape.value, d, bias=False)

    def forward(self, x, cos, sin):
        s = self.shape
        b, t, _ = x.shape
        q = self.q(x).view(b, t, s.heads, s.nope + s.rope).transpose(1, 2)
        q = torch.cat((q[..., : s.nope], rotate(q[..., s.nope :], cos, sin)), dim=-1)
        c_kv, k_pe = self.kv_a(x).split((s.latent, s.rope), dim=-1)
        k_pe = rotate(k_pe[:, None], cos, sin).expand(b, s.heads, t, s.rope)
        kv = self.kv_b(self.kv_a_norm(c_kv)).view(b, t, s.heads, s.nope + s.value).transpose(1, 2)
        k = torch.cat((kv[..., : s.nope], k_pe), dim=-1)
        v = F.pad(kv[..., s.nope :], (0, s.nope + s.rope - s.value))  # the fast kernels want one head width
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=s.score_scale)[..., : s.value]
        return self.output(out.transpose(1, 2).reshape(b, t, s.heads * s.value))


class Dense(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, d, width):
        super().__init__()
        self.gate = nn.Linear(d, width, bias=False)
        self.up = nn.Linear(d, width, bias=False)
        self.down = nn.Linear(width, d, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """K of E routed experts, weighted by the softmax over all E, plus one shared expert.

    All E are computed as one wide network whose hidden units the routing weights scale, most of them by zero: at this
    size that is faster than gathering tokens. `forward` also returns the balance loss and the chosen experts.
    """

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.routed = Dense(shape.width, shape.experts * shape.expert_width)  # expert e: rows e * width and on
        self.shared = Dense(shape.width, shape.expert_width)

    def forward(self, x):
        s = self.shape
        with torch.autocast(x.device.type, enabled=False):
            wide = x if x.dtype == torch.float64 else x.float()
            scores = F.linear(wide, self.router.weight).softmax(-1)  # [B, T, E]
        best, chosen = scores.topk(s.experts_used, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best)
        hidden = F.silu(self.routed.gate(x)) * self.routed.up(x)
        hidden = hidden * weights.type_as(hidden).repeat_interleave(s.expert_width, dim=-1)
        share = (weights > 0).to(scores.dtype).mean((0, 1)) / s.experts_used  # of the tokens, by expert
        balance = s.experts * (share * scores.mean((0, 1))).sum()  # 1 when even
        return self.routed.down(hidden) + self.shared(x), balance, chosen


class Block(nn.Module):
    """One layer: attention, then the dense network or the experts."""

    def __init__(self, shape, dense, dropout):
        super().__init__()
        self.attn_norm = RMSNorm(shape.width)
        self.attn = Attention(shape)
        self.ffn_norm = RMSNorm(shape.width)
        self.dense = dense
        self.ffn = Dense(shape.width, shape.dense_width) if dense else Experts(shape)
        self.dropout = Dropout(dropout)

    def forward(self, x, cos, sin):
        x = x + self.dropout(self.attn(self.attn_norm(x), cos, sin))
        if self.dense:
            return x + self.dropout(self.ffn(self.ffn_norm(x))), x.new_ones(()), None
        out, balance, chosen = self.ffn(self.ffn_norm(x))
        return x + self.dropout(out), balance, chosen


class Network(nn.Module):
    """The whole model."""

    def __init__(self, shape, dropout=0.0):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, i == 0, dropout) for i in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.dropout = Dropout(dropout)
        cos, sin = rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                into_residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * shape.layers) if into_residual else 0.02)

    def hidden(self, tokens):
        """Final normed rows [B, T, D], mean balance loss over the expert layers, chosen experts by layer."""
        t = tokens.shape[1]
        x = self.dropout(self.embedding(tokens))
        balance, chosen = [], []
        for block in self.blocks:
            x, b, c = block(x, self.cos[:t], self.sin[:t])
            if c is not None:
                balance.append(b)
                chosen.append(c)
        return self.norm(x), torch.stack(balance).mean(), chosen

    def forward(self, tokens):
        """Logits [B, T, vocabulary] of token ids [B, T]."""
        return self.head(self.hidden(tokens)[0])

    def loss(self, tokens, targets):
        """Mean cross entropy in nats, and the balance loss."""
        x, balance, _ = self.hidden(tokens)
        return cross_entropy(self.head(x), targets), balance


def cross_entropy(logits, targets):
    """Mean cross entropy in nats of logits [B, T, vocabulary], in at least f32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def count_parameters(network):
    """All weights, and those that act on one token (K routed experts, one row of the embedding)."""
    s = network.shape
    total = sum(p.numel() for p in network.parameters())
    idle = (s.layers - 1) * (s.experts - s.experts_used) * 3 * s.width * s.expert_width
    return total, total - idle - (s.vocabulary - 1) * s.width
