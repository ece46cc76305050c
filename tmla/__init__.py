"""tmla: Multi-head Latent Attention from Q8_0 GGUF files, every stage a Taichi kernel."""

import logging
import os

os.environ.setdefault("ENABLE_TAICHI_HEADER_PRINT", "0")  # read when taichi is imported: `import tmla` prints nothing

from tmla import reference
from tmla.chat import chat
from tmla.compare import Comparison, compare
from tmla.errors import (
    BackendError,
    ContextError,
    GGUFError,
    NumericsError,
    ParameterError,
    StateError,
    TemplateError,
    TmlaError,
)
from tmla.generate import generate, stream_generate
from tmla.loading import load
from tmla.model import Model
from tmla.perplexity import Perplexity, perplexity

logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet until the application asks for the log

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "Comparison",
    "ContextError",
    "GGUFError",
    "Model",
    "NumericsError",
    "ParameterError",
    "Perplexity",
    "StateError",
    "TemplateError",
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
