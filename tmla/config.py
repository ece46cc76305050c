"""Architecture of one model, read from its file; derived numbers are properties."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from tmla import config_read, rope, tensors
from tmla.gguf_file import GGUFFile, open_gguf
from tmla.tensor_check import check_tensors
from tmla.tensors import TensorSpec

__all__ = ["MIN_WEIGHT_SUM", "MLAConfig", "TensorSpec", "check_tensors", "open_checked"]

MIN_WEIGHT_SUM = 1.0e-20  # normalised expert weights are divided by at least this, so that 0/0 is 0 (llama.cpp: 2**-14)


@dataclasses.dataclass(frozen=True)
class MLAConfig:
    """Architecture of one MLA model. Every field comes from the GGUF; none has a default.

    Where a key is missing, :meth:`from_gguf` takes the documented value and says so in `notes`. Letters: L layers, D
    residual width, H heads, C latent width; N, R, V widths of a head: without position, with rope, of the value; E
    experts, K experts used.
    """

    arch: str  # "deepseek2", "minicpm3" or "plm"
    name: str  # general.name, or the file name
    n_layers: int  # L: layers that are decoded, without next-token-prediction blocks
    n_nextn_layers: int  # appended blocks that decoding ignores
    dim: int  # D
    n_heads: int  # H
    n_vocab: int  # rows of token_embd
    context_length: int  # positions the model was trained for
    rms_eps: float

    q_lora_rank: int  # 0: a single attn_q
    kv_lora_rank: int  # C
    qk_nope_head_dim: int  # N
    qk_rope_head_dim: int  # R
    v_head_dim: int  # V
    kv_b_split: bool  # attn_k_b [H, C, N] and attn_v_b [H, V, C] instead of attn_kv_b [H (N + V), C]

    ffn_dim: int  # F of the dense layers, 0 when there are none
    ffn_act: str  # "swiglu", or "relu2" (no gate)
    is_moe_layer: tuple[bool, ...]  # [L]
    n_experts: int  # E, 0 when all layers are dense (like all that follows here)
    n_experts_used: int  # K
    n_expert_groups: int  # 1: routing is not limited to groups
    n_expert_groups_used: int
    expert_ffn_dim: int
    shared_ffn_dim: int  # all shared experts together, 0 without
    gating: str  # "softmax" or "sigmoid"
    gating_source: str  # why
    has_expert_bias: bool  # exp_probs_b: selects, never weighs
    expert_weights_norm: bool
    expert_weights_scale: float
    fused_gate_up: bool  # ffn_gate_up_exps [E, 2 F, D], gate rows first
    tied_head: bool  # no output.weight: the embedding is the head

    rope_base: float
    rope_pairs: str  # "consecutive" (2i, 2i + 1) or "half" (i, i + R/2)
    rope_scaling: str  # "none", "yarn" or "longrope"
    yarn_factor: float  # 1.0 without YaRN
    yarn_orig_ctx: int
    yarn_log_mul: float  # as stored: 0.1 * mscale_all_dim; 0.0 without
    yarn_beta_fast: float
    yarn_beta_slow: float
    rope_factors_long: tuple[float, ...]  # [R/2], or empty
    rope_factors_short: tuple[float, ...]
    rope_orig_ctx: int  # above this allocated context the long factors apply

    embd_scale: float
    residual_scale: float  # of each branch before it is added
    logit_scale: float
    attn_temp_scale: float  # 0.0: no attention temperature
    attn_temp_length: int

    ignored_tensors: tuple[str, ...]
    notes: tuple[str, ...]  # each default, guess or ignored thing, one sentence

    @classmethod
    def from_gguf(cls, gf: GGUFFile) -> "MLAConfig":
        """Read the architecture from an open file.

        Parameters
        ----------
        gf : GGUFFile
            Metadata, tensor names and shapes are read, and the rope factors; no weights.

        Returns
        -------
        MLAConfig

        Raises
        ------
        GGUFError
            Unknown architecture, a needed key is missing, or a value that no model can have.
        """
        cfg = cls(**config_read.read_fields(gf), ignored_tensors=())
        ignored = tensors.find_ignored(gf, cfg)
        return dataclasses.replace(cfg, ignored_tensors=ignored, notes=cfg.notes + tensors.ignored_notes(cfg, ignored))

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head before absorption, N + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_row_width(self) -> int:
        """Values of one cached position in one layer: latent and rotated key, C + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def n_moe_layers(self) -> int:
        """Layers with a mixture of experts."""
        return sum(self.is_moe_layer)

    @property
    def n_dense_layers(self) -> int:
        """Layers with one plain feed-forward network."""
        return self.n_layers - self.n_moe_layers

    @property
    def rope_magnitude(self) -> float:
        """Factor on cos and sin: 1.0 in every known file.

        YaRN's magnitude belongs to the softmax scale alone as long as the file has ``yarn_log_multiplier``. Without it
        (or with 0) this follows llama.cpp, which then applies ``1 + 0.1 ln factor`` here as well.
        """
        if self.rope_scaling == "yarn" and self.yarn_log_mul == 0.0:
            return 1.0 + 0.1 * math.log(self.yarn_factor)
        return 1.0

    @property
    def softmax_scale(self) -> float:
        """Score scale: 1/sqrt(N + R), the width before absorption, times YaRN's mscale squared."""
        mscale = self.rope_magnitude * (1.0 + self.yarn_log_mul * math.log(self.yarn_factor))
        return mscale**2 / math.sqrt(self.qk_head_dim)

    def cache_row_bytes(self, dtype: str = "f16") -> int:
        """Bytes of one cached position in one layer, for a cache of `dtype` "f16" or "f32"."""
        return self.cache_row_width * {"f16": 2, "f32": 4}[dtype]

    def rope_table(self, n_ctx: int) -> np.ndarray:
        """Return cos and sin of every pair at every position below `n_ctx`, float32 [n_ctx, R/2, 2].

        Angles in float64 (YaRN: Peng et al. 2023; docs/mla.md, section 5), rounded once.
        """
        return rope.rope_table(self, n_ctx)

    def temperature_table(self, n_ctx: int) -> np.ndarray:
        """Return the factor on the scores of each query position below `n_ctx`, float32 [n_ctx].

        Ones without an attention temperature; the formula is in docs/mla.md, section 6.
        """
        return rope.temperature(self, n_ctx).astype(np.float32)

    def expected_tensors(self) -> dict[str, TensorSpec]:
        """Return name -> TensorSpec of every tensor that decoding reads."""
        return tensors.expected_tensors(self)


def open_checked(path: str | os.PathLike, *, overrides: Mapping[str, Any] | None = None) -> tuple[GGUFFile, MLAConfig]:
    """Open a file and check all that can be checked without reading weights.

    Parameters
    ----------
    path : str or os.PathLike
        The file, or any of its shards.
    overrides : dict, optional
        Metadata keys to replace or add.

    Returns
    -------
    gf : GGUFFile
        Open; the caller closes it.
    cfg : MLAConfig

    Raises
    ------
    GGUFError
        See :func:`open_gguf`, :meth:`MLAConfig.from_gguf` and :func:`check_tensors`.
    """
    gf = open_gguf(path, overrides=overrides)
    try:
        cfg = MLAConfig.from_gguf(gf)
        check_tensors(gf, cfg)
    except BaseException:
        gf.close()
        raise
    return gf, cfg
