"""Source excerpts of kernels, made once: Taichi makes one for every node it compiles, in case of an error.

Taichi 1.7.4 reads a function's source anew wherever it is inlined, and runs every line through
:class:`textwrap.TextWrapper` for every node: half of the time that its Python takes over a kernel, and that at every
start, also with compiled kernels in the cache (docs/log.md). Rests on internals of the pinned Taichi release; where
they are not found, nothing changes.
"""

import functools
import textwrap
from typing import Any

from taichi.lang import kernel_impl
from taichi.lang.ast import ast_transformer_utils

_positions: dict[tuple, str] = {}


class ShortLines(textwrap.TextWrapper):
    """The same lines; those that need no wrapping without the work."""

    def wrap(self, text: str) -> list[str]:
        """Lines of at most `width` characters."""
        if len(text) > self.width or "\t" in text:
            return super().wrap(text)
        line = text.rstrip()
        return [line] if line else []


def remember(get_pos_info):
    """`get_pos_info` of Taichi's compiler, which returns what it made before for the same place in the same source."""

    @functools.wraps(get_pos_info)
    def remembered(context, node):
        place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
        key = (context.file, context.lineno_offset, *place, type(node), context.src[node.lineno - 1])
        if key not in _positions:
            _positions[key] = get_pos_info(context, node)
        return _positions[key]

    return remembered


@functools.cache
def quicken() -> None:
    """Let Taichi make its excerpts this way; once a process."""
    context: Any = getattr(ast_transformer_utils, "ASTTransformerContext", None)
    if hasattr(context, "get_pos_info"):
        context.get_pos_info = remember(context.get_pos_info)
    if hasattr(ast_transformer_utils, "TextWrapper"):
        ast_transformer_utils.TextWrapper = ShortLines
    if hasattr(kernel_impl, "getsourcelines"):
        kernel_impl.getsourcelines = functools.cache(kernel_impl.getsourcelines)
