"""``tmla.load``: from a file's name to a model that can decode."""

import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from tmla import runtime
from tmla.errors import BackendError
from tmla.limits import check_limits, fit_n_ctx
from tmla.model import Model, Progress, log
from tmla.requantize import open_checked
from tmla.tokenizer import Tokenizer


def demo_path() -> pathlib.Path:
    """The small trained model that the package carries: DeepSeek-V2's structure, 11 M parameters, old novels."""
    return pathlib.Path(__file__).parent / "data" / "demo.gguf"


def load(
    path: str | os.PathLike | None = None,
    *,
    arch: str | None = None,
    n_ctx: int | str = 4096,
    cache_dtype: str = "f16",
    overrides: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    threads: int | None = None,
    requantize: bool = False,
) -> Model:
    """Load a DeepSeek-style GGUF model.

    Parameters
    ----------
    path : str or os.PathLike, optional
        GGUF file, or any shard of one; matrices in Q8_0, vectors in F32, F16 or BF16. Default: the small trained model
        that the package carries (:func:`demo_path`).
    arch : str, optional
        Backend: "metal", "cuda", "vulkan" or "cpu". Default "metal" on macOS, else "cpu"; never replaced by another.
    n_ctx : int or "max"
        Positions the latent cache holds, ``L * (C + R)`` values each. "max": the trained context, or as much of it as
        fits the memory.
    cache_dtype : {"f16", "f32"}
        Storage of the cache; all arithmetic is f32.
    overrides : dict, optional
        Metadata keys to replace or add: ``{"deepseek2.expert_gating_func": 2}``.
    progress : callable, optional
        Called with (done_bytes, total_bytes) while weights are copied.
    threads : int, optional
        CPU threads; counts for the first model of a process.
    requantize : bool
        Accept matrices of other types and round them to Q8_0 while loading (:mod:`tmla.requantize`).

    Returns
    -------
    Model

    Raises
    ------
    GGUFError
        The file is damaged, a key or tensor is missing, a shape disagrees with the metadata, a type is not supported,
        or scales or norms are not finite.
    BackendError
        `arch` is not available (Taichi itself would fall back to CPU), another one runs already in this process, or
        memory does not suffice.
    ContextError
        `n_ctx` is no positive number.
    """
    if cache_dtype not in ("f16", "f32"):
        raise BackendError(f"cache_dtype {cache_dtype!r} is unknown; expected 'f16' or 'f32'")
    start = time.perf_counter()
    path = demo_path() if path is None else path
    gf, cfg = open_checked(os.fspath(path), overrides=overrides, requantize=requantize)
    try:
        tokenizer = Tokenizer.from_gguf(gf)
        caps = runtime.init(arch, threads=threads)
        check_limits(gf.name, cfg, caps)
        model = Model(
            gf, cfg, tokenizer, caps, fit_n_ctx(gf.name, cfg, n_ctx, cache_dtype, caps), cache_dtype, progress
        )
    except BaseException:
        gf.close()
        raise
    model.load_s = time.perf_counter() - start
    log.info("%s: %d tensors; loaded in %.2f s; bytes: %s", gf.name, len(gf.tensors), model.load_s, model.memory)
    return model
