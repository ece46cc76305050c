"""tmla: Multi-head Latent Attention from Q8_0 GGUF files, every stage a Taichi kernel."""

import logging
import os

os.environ.setdefault("ENABLE_TAICHI_HEADER_PRINT", "0")  # read when taichi is imported: `import tmla` prints nothing

from tmla import reference
from tmla.chat import chat
from tmla.errors import (
    BackendError,
    ContextError,
    GGUFError,
    NumericsError,
    ParameterError,
    TemplateError,
    TmlaError,
)
from tmla.generate import generate, stream_generate
from tmla.loading import load
from tmla.model import Model

logging.getLogger(__name__).addHandler(logging.NullHandler())  # quiet until the application asks for the log

__version__ = "0.1.0"
__all__ = [
    "BackendError",
    "ContextError",
    "GGUFError",
    "Model",
    "NumericsError",
    "ParameterError",
    "TemplateError",
    "TmlaError",
    "__version__",
    "chat",
    "generate",
    "load",
    "reference",
    "stream_generate",
]
