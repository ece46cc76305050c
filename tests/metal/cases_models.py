"""Whole models of every family: layers fused and stage by stage, the head, and greedy choice on the device.

Logits and cache rows are compared with the float64 reference, whose attention is expanded.
"""

import functools
import pathlib
import tempfile

import numpy as np
import taichi as ti

import tmla
from tests.variants import variant_file
from tmla import layer_stages, reference

from .case import Built, Expect, MetalCase
from .package import only, start_taichi  # noqa: F401 (the export looks for start_taichi here)

N_CTX = 40
TOKENS = (7, 201, 33)  # every vocabulary among the variants has them
SCRATCH = ("cache", "hidden")  # fields of banks that loading does not write
TOLERANCE = {"f32": 1e-4, "f16": 3e-2}  # in standard deviations of the array, as the oracle allows


@functools.lru_cache
def _folder():
    return tempfile.TemporaryDirectory(prefix="tmla_variants_")


def load(name, cache_dtype):
    """A variant's model, and the path of its file."""
    path = variant_file(name, pathlib.Path(_folder().name))
    return tmla.load(path, arch="metal", n_ctx=N_CTX, cache_dtype=cache_dtype), path


def inputs_of(model):
    """Contents of what loading has written: weights and tables, and fields that stay zero. All else starts poisoned."""
    owners = [model._globals, *model.attention_banks, *model.ffn_banks]
    fields = {f for o in owners for name, f in vars(o).items() if isinstance(f, ti.Field) and name not in SCRATCH}
    return {field: field.to_numpy() for field in fields | {model._state.rope, model._state.scale}}


def _expected(model, path, tokens, cache_dtype):
    trace = reference.trace(path, tokens, N_CTX)
    tolerance = TOLERANCE[cache_dtype]
    logits = trace.logits[-1:]
    expected = {model._state.logits: Expect(logits, 0, tolerance * logits.std())}
    dtype = {"f32": np.float32, "f16": np.float16}[cache_dtype]
    for bank in model.attention_banks:
        width = trace.cache.shape[2]
        rows = np.zeros((bank.n, N_CTX, bank.cache.shape[2] * 8 // dtype().itemsize))  # words of padded rows
        rows[:, : len(tokens), :width] = trace.cache[bank.first : bank.first + bank.n]
        known = only(rows.shape, (slice(None), slice(0, len(tokens)), slice(0, width)))
        expected[bank.cache] = Expect(rows, 0, tolerance * rows[known].std(), known, dtype)
    return expected


def build_decode(name, cache_dtype, tiles=False):
    """Tokens fed one after the other: the launches of `Model.prefill` and `Model.decode`.

    With `tiles`, attention runs as it does for long contexts.
    """
    model, path = load(name, cache_dtype)
    if tiles:
        model._steps.max_short = 0

    def call():
        model.prefill(TOKENS[:-1])
        model.decode(TOKENS[-1])

    return Built(call, inputs_of(model), _expected(model, path, TOKENS, cache_dtype))


def build_greedy(name):
    """A token and two greedy successors, chosen and fed on the device."""
    model, path = load(name, "f32")
    tokens = [TOKENS[0]]
    for _ in range(2):
        tokens.append(int(np.argmax(reference.logits(path, tokens, n_ctx=N_CTX)[-1, : model._state.n_choice])))
    expected = _expected(model, path, tokens[:2], "f32")
    chosen = np.zeros(model._state.chosen.shape)
    chosen[:2] = tokens[1:]
    expected[model._state.chosen] = Expect(chosen, 0, 0, only(chosen.shape, slice(0, 2)))
    return Built(lambda: model.decode_greedy(tokens[0], 2), inputs_of(model), expected)


def build_stage_by_stage(name):
    """The layers as separate kernels, one for each stage."""
    model, path = load(name, "f32")

    def call():
        model._steps.begin(TOKENS[0], 0)
        for i in range(model.config.n_layers):
            model._state.layer_attn[0] = i
            attention = next(b for b in model.attention_banks if b.first <= i < b.first + b.n)
            ffn = next(b for b in model.ffn_banks if b.first <= i < b.first + b.n)
            layer_stages.layer_stages(attention, ffn, model._state)
        model._steps.head()

    return Built(call, inputs_of(model), _expected(model, path, TOKENS[:1], "f32"))


STAGED = ("lite", "v3", "minicpm3")
FAMILIES = ("lite", "q_lora", "v3", "v3_unsplit", "v3_fused", "moonlight", "glm", "mistral", "dense", "minicpm3", "plm")
CASES = [
    *(MetalCase(f"model_{name}", functools.partial(build_decode, name, "f32")) for name in FAMILIES),
    MetalCase("model_lite_tiles", functools.partial(build_decode, "lite", "f32", tiles=True)),
    MetalCase("model_minicpm3_tiles_f16", functools.partial(build_decode, "minicpm3", "f16", tiles=True)),
    MetalCase("model_lite_f16_cache", functools.partial(build_decode, "lite", "f16")),
    MetalCase("model_lite_vocab_127_greedy", functools.partial(build_greedy, "lite_vocab_127")),
    *(MetalCase(f"stages_{name}", functools.partial(build_stage_by_stage, name)) for name in STAGED),
]
