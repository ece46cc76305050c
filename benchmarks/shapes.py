"""Every dimension of a generated model file, and the table of known models."""

import dataclasses
import math

BLOCK = 32  # values per Q8_0 block


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """All that decides the structure of a model file. Letters as in the style guide.

    Raises ``ValueError`` when the numbers contradict each other or rows would not tile Q8_0 blocks.
    """

    name: str
    dim: int  # D
    n_layers: int  # L, without nextn blocks
    n_heads: int  # H
    n_vocab: int
    ffn_dim: int  # F, dense layers
    arch: str = "deepseek2"  # deepseek2 | minicpm3 | plm
    q_lora_rank: int = 0  # 0 = one attn_q
    kv_lora_rank: int = 512  # C
    qk_nope_head_dim: int = 128  # N
    qk_rope_head_dim: int = 64  # R
    v_head_dim: int = 128  # V
    split: bool = False  # attn_k_b + attn_v_b instead of attn_kv_b

    n_dense_layers: int = 1  # leading dense layers; all of them when n_experts is 0
    n_experts: int = 0  # E, 0 = no router anywhere
    n_experts_used: int = 0  # K
    expert_ffn_dim: int = 0
    n_shared_experts: int = 0
    gating: str = "softmax"  # softmax | sigmoid
    gating_key: bool = True  # write expert_gating_func
    expert_bias: bool = False  # exp_probs_b
    expert_weights_norm: bool | None = None  # None = no key
    expert_weights_scale: float | None = 1.0  # None = no key
    n_expert_groups: int = 0  # 0 = no keys
    n_expert_groups_used: int = 0
    fused_gate_up: bool = False
    n_nextn_layers: int = 0
    tied_head: bool = False

    context_length: int = 163840
    rms_eps: float = 1e-6
    rope_base: float | None = 10000.0  # None = no key
    yarn_factor: float = 1.0  # 1 = no YaRN keys
    yarn_orig_ctx: int = 4096
    yarn_log_mul: float | None = 0.1  # None = no key
    yarn_betas: tuple[float, float] | None = None  # fast, slow; None = no keys
    attn_temp_scale: float = 0.0  # 0 = no keys
    attn_temp_length: int = 0
    rope_factors: bool = False  # long and short factors (minicpm3)
    rope_orig_ctx: int = 0  # 0 = no key (minicpm3)

    pre: str = "deepseek-llm"  # tokenizer.ggml.pre
    vector_type: str = "F32"  # F32 | F16 | BF16: norms, routers, biases, rope factors
    u64_keys: bool = False  # integers as u64 instead of u32
    layer_arrays: bool = False  # head counts and feed_forward_length as one value per layer
    q_lora_key: bool | None = None  # write q_lora_rank 0 where there is none; None = where llama.cpp demands it
    small_latents: bool = False  # latents before their norms so small that scales are f16 subnormals and epsilon counts
    ffn_gain: float = 1.0  # FFN intermediates times this, down matrices divided by it
    residual_gain: float = 1.0  # embedding and branch outputs times this
    latent_gain: float = 1.0  # kv_b times this, latent norm divided by it

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def n_blocks(self) -> int:
        return self.n_layers + self.n_nextn_layers

    @property
    def n_dense(self) -> int:
        return self.n_layers if self.n_experts == 0 else min(self.n_dense_layers, self.n_layers)

    @property
    def shared_ffn_dim(self) -> int:
        return self.n_shared_experts * self.expert_ffn_dim

    @property
    def yarn_mscale(self) -> float:
        """Factor on the score scale: mscale squared."""
        return (1.0 + (self.yarn_log_mul or 0.0) * math.log(self.yarn_factor)) ** 2

    def replace(self, **changes) -> "ModelShape":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __post_init__(self):
        rows = {"dim": self.dim, "ffn_dim": self.ffn_dim, "kv_lora_rank": self.kv_lora_rank}
        rows |= {"n_heads * v_head_dim": self.n_heads * self.v_head_dim}
        if self.q_lora_rank:
            rows["q_lora_rank"] = self.q_lora_rank
        if self.split:
            rows["qk_nope_head_dim"] = self.qk_nope_head_dim
        if self.n_experts:
            rows["expert_ffn_dim"] = self.expert_ffn_dim
        for what, n in rows.items():
            if n <= 0 or n % BLOCK:
                raise ValueError(f"shape {self.name}: {what} is {n}, expected a positive multiple of {BLOCK}")
        if self.qk_rope_head_dim <= 0 or self.qk_rope_head_dim % 2:
            raise ValueError(f"shape {self.name}: qk_rope_head_dim is {self.qk_rope_head_dim}, expected an even number")
        if self.arch not in ("deepseek2", "minicpm3", "plm"):
            raise ValueError(f"shape {self.name}: arch is {self.arch!r}, expected deepseek2, minicpm3 or plm")
        if self.arch != "deepseek2" and (self.split or self.n_experts or self.n_nextn_layers):
            raise ValueError(f"shape {self.name}: {self.arch} has neither split kv_b nor experts nor nextn blocks")
        if self.arch == "minicpm3" and (not self.q_lora_rank or self.dim != self.n_heads * self.v_head_dim):
            raise ValueError(f"shape {self.name}: minicpm3 needs q_lora_rank and dim = n_heads * v_head_dim")
        if self.arch == "plm" and self.q_lora_rank:
            raise ValueError(f"shape {self.name}: plm has no q_lora_rank")
        if self.n_experts and not 0 < self.n_experts_used <= self.n_experts:
            raise ValueError(f"shape {self.name}: n_experts_used is {self.n_experts_used} of {self.n_experts}")
        if self.n_expert_groups > 1 and (
            self.n_experts % self.n_expert_groups or not 0 < self.n_expert_groups_used < self.n_expert_groups
        ):
            raise ValueError(
                f"shape {self.name}: {self.n_expert_groups_used} of {self.n_expert_groups} groups of "
                f"{self.n_experts} experts"
            )


_V2_LITE = ModelShape(
    "v2-lite", dim=2048, n_layers=27, n_heads=16, n_vocab=102400, ffn_dim=10944,
    n_experts=64, n_experts_used=6, expert_ffn_dim=1408, n_shared_experts=2, gating_key=False,
    yarn_factor=40.0, yarn_log_mul=0.0707,
)  # fmt: skip
_V3 = ModelShape(
    "v3", dim=7168, n_layers=61, n_heads=128, n_vocab=129280, ffn_dim=18432, q_lora_rank=1536, split=True,
    n_dense_layers=3, n_experts=256, n_experts_used=8, expert_ffn_dim=2048, n_shared_experts=1,
    gating="sigmoid", expert_bias=True, expert_weights_norm=True, expert_weights_scale=2.5,
    n_expert_groups=8, n_expert_groups_used=4,
    yarn_factor=40.0, yarn_log_mul=0.1, yarn_betas=(32.0, 1.0), pre="deepseek-v3",
)  # fmt: skip

_MOONLIGHT = ModelShape(
    "moonlight", dim=2048, n_layers=27, n_heads=16, n_vocab=163840, ffn_dim=11264, split=True,
    n_experts=64, n_experts_used=6, expert_ffn_dim=1408, n_shared_experts=2,
    gating="sigmoid", expert_bias=True, expert_weights_norm=True, expert_weights_scale=2.446,
    n_expert_groups=1, n_expert_groups_used=1, rope_base=50000.0, rms_eps=1e-5, context_length=8192, pre="kimi-k2",
)  # fmt: skip

# Dimensions from each model's published configuration; those of kanana-2 and gigachat3 are checked only against the
# published totals of parameters and of active parameters.
_TABLE = (
    # a structurally complete V2-Lite of about 1 MB
    _V2_LITE.replace(
        name="tiny", dim=128, n_layers=4, n_heads=4, n_vocab=1024, ffn_dim=256, kv_lora_rank=64,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, n_experts=8, n_experts_used=3, expert_ffn_dim=32,
    ),
    # V2-Lite's widths in 408 MB, for measurements
    _V2_LITE.replace(name="mid", n_layers=4, n_experts=8, n_experts_used=2, n_vocab=512),
    _V2_LITE,
    _V2_LITE.replace(name="coder-v2-lite"),
    ModelShape(
        "v2", dim=5120, n_layers=60, n_heads=128, n_vocab=102400, ffn_dim=12288, q_lora_rank=1536,
        n_experts=160, n_experts_used=6, expert_ffn_dim=1536, n_shared_experts=2, gating_key=False,
        expert_weights_scale=16.0, yarn_factor=40.0, yarn_log_mul=0.0707,
    ),
    _V3,
    _V3.replace(name="r1"),
    _MOONLIGHT,
    _V3.replace(
        name="kimi-k2", n_heads=64, n_vocab=163840, n_dense_layers=1, n_experts=384, expert_weights_scale=2.827,
        n_expert_groups=1, n_expert_groups_used=1, rope_base=50000.0, yarn_factor=32.0, yarn_betas=(1.0, 1.0),
        context_length=131072, pre="kimi-k2",
    ),
    ModelShape(
        "glm-4.7-flash", dim=2048, n_layers=47, n_heads=20, n_vocab=154880, ffn_dim=10240, q_lora_rank=768, split=True,
        qk_nope_head_dim=192, v_head_dim=256, n_experts=64, n_experts_used=4, expert_ffn_dim=1536, n_shared_experts=1,
        gating="sigmoid", expert_bias=True, expert_weights_norm=True, expert_weights_scale=1.8,
        n_expert_groups=1, n_expert_groups_used=1, rope_base=1e6, rms_eps=1e-5, context_length=202752, pre="glm4",
    ),
    ModelShape(
        "mistral-large-3", dim=7168, n_layers=61, n_heads=128, n_vocab=131072, ffn_dim=16384, q_lora_rank=1536,
        split=True, n_dense_layers=3, n_experts=128, n_experts_used=4, expert_ffn_dim=4096, n_shared_experts=1,
        expert_weights_norm=True, yarn_factor=36.0, yarn_orig_ctx=8192, yarn_betas=(32.0, 1.0),
        attn_temp_scale=0.1, attn_temp_length=8192, context_length=294912, pre="tekken",
    ),
    ModelShape(
        "youtu-llm-2b", dim=2048, n_layers=32, n_heads=16, n_vocab=128256, ffn_dim=6144, q_lora_rank=1536, split=True,
        tied_head=True, rope_base=1.6e6, context_length=131072, pre="youtu",
    ),
    _MOONLIGHT.replace(
        name="kanana-2", n_layers=48, n_heads=32, n_vocab=128256, ffn_dim=6144, n_experts=128, expert_ffn_dim=768,
        expert_weights_scale=2.5, rope_base=1e6, context_length=32768, pre="kanana2",
    ),
    _MOONLIGHT.replace(
        name="gigachat3", dim=1536, n_layers=26, n_heads=32, n_vocab=128256, ffn_dim=8960, v_head_dim=192,
        n_experts_used=4, expert_ffn_dim=1280, n_shared_experts=1, expert_weights_scale=1.0,
        rope_base=100000.0, rms_eps=1e-6, context_length=262144, pre="gigachat",
    ),
    ModelShape(
        "minicpm3-4b", arch="minicpm3", dim=2560, n_layers=62, n_heads=40, n_vocab=73448, ffn_dim=6400,
        q_lora_rank=768, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64,
        tied_head=True, rope_base=None, rope_factors=True, context_length=32768, rms_eps=1e-5,
    ),
    ModelShape(
        "plm-1.8b", arch="plm", dim=2048, n_layers=32, n_heads=16, n_vocab=151936, ffn_dim=8192,
        tied_head=True, rope_base=100000.0, context_length=4096, pre="qwen2",
    ),
)  # fmt: skip
SHAPES = {s.name: s for s in _TABLE}
