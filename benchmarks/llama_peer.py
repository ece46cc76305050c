"""llama.cpp behind the interface of :class:`tmla.bench.Engine`, through llama-cpp-python's low-level calls."""

import ctypes
import os

import numpy as np


class LlamaModel:
    """Weights, shared by contexts of different settings.

    Parameters
    ----------
    path : str or os.PathLike
    n_gpu_layers : int
        0 keeps everything on the CPU.
    """

    def __init__(self, path, n_gpu_layers: int = 0):
        import llama_cpp

        self.lib = llama_cpp
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.model:
            raise RuntimeError(f"{path}: llama.cpp could not load this file")
        self.n_gpu_layers = n_gpu_layers
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def close(self) -> None:
        """Free the weights, after all contexts."""
        self.lib.llama_model_free(self.model)


class LlamaEngine:
    """One context of llama.cpp.

    Parameters
    ----------
    model : LlamaModel
    n_ctx : int
    threads : int
    flash_attn : bool
    cache_dtype : {"f16", "f32"}
    n_batch : int
        Tokens that one call computes together.
    """

    name = "llama.cpp"

    def __init__(self, model: LlamaModel, *, n_ctx, threads, flash_attn, cache_dtype="f16", n_batch=512):
        lib = model.lib
        self.lib, self.n_vocab, self.n_threads, self.flash_attn = lib, model.n_vocab, threads, flash_attn
        self.backend = "GPU" if model.n_gpu_layers else "cpu"
        self.type_kv, self.n_batch, self.n_past = cache_dtype, n_batch, 0
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = params.n_ubatch = n_batch
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = {"f16": lib.GGML_TYPE_F16, "f32": lib.GGML_TYPE_F32}[cache_dtype]
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attn else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.ctx = lib.llama_init_from_model(model.model, params)
        if not self.ctx:
            raise RuntimeError(f"llama.cpp made no context of {n_ctx} positions with flash attention {flash_attn}")

    def prefill(self, tokens) -> np.ndarray:
        """Feed tokens; f32 [n_vocab] logits behind the last."""
        for start in range(0, len(tokens), self.n_batch):
            self._feed(tokens[start : start + self.n_batch])
        return self._logits()

    def decode(self, token: int) -> np.ndarray:
        """Feed one token; f32 [n_vocab] logits."""
        self._feed([token])
        return self._logits()

    def rewind(self, n_past: int) -> None:
        """Drop the cache from position `n_past` on."""
        memory = self.lib.llama_get_memory(self.ctx)
        if not self.lib.llama_memory_seq_rm(memory, 0, n_past, -1):
            raise RuntimeError(f"llama.cpp could not drop the cache from position {n_past} on")
        self.n_past = n_past

    def fill(self, tokens) -> None:
        """As :meth:`prefill`: it has no other way."""
        self.prefill(tokens)

    def close(self) -> None:
        """Free the context."""
        self.lib.llama_free(self.ctx)

    def _feed(self, tokens) -> None:
        array = (self.lib.llama_token * len(tokens))(*tokens)
        status = self.lib.llama_decode(self.ctx, self.lib.llama_batch_get_one(array, len(tokens)))
        if status:
            raise RuntimeError(f"llama_decode returned {status} at position {self.n_past}")
        self.n_past += len(tokens)

    def _logits(self) -> np.ndarray:
        pointer = self.lib.llama_get_logits_ith(self.ctx, -1)  # waits for the computation
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()
