"""tmla: Multi-head Latent Attention from Q8_0 GGUF files, every stage a Taichi kernel."""

import os

os.environ.setdefault("ENABLE_TAICHI_HEADER_PRINT", "0")  # read when taichi is imported: `import tmla` prints nothing

from tmla import reference
from tmla.chat import chat
from tmla.compare import Comparison, compare
from tmla.errors import BackendError, ContextError, GGUFError, NumericsError, StateError, TmlaError
from tmla.generate import generate, stream_generate
from tmla.model import Model, load
from tmla.perplexity import Perplexity, perplexity

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "Comparison",
    "ContextError",
    "GGUFError",
    "Model",
    "NumericsError",
    "Perplexity",
    "StateError",
    "TmlaError",
    "__version__",
    "chat",
    "compare",
    "generate",
    "load",
    "perplexity",
    "reference",
    "stream_generate",
]
