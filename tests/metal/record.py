"""Watch Taichi: the trees of fields that it makes, and the launches of kernels, recorded instead of executed."""

import contextlib
import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Tree:
    """One tree of fields: its place in the order of making, its size, and how many fields share it."""

    index: int
    n_bytes: int
    n_fields: int


@dataclasses.dataclass(frozen=True)
class Poke:
    """A value that the host sets in a field between launches: tree, byte offset, bytes in hexadecimal."""

    tree: int
    offset: int
    value: str


class Recorder:
    """Sees every tree of fields that is made, and, inside :meth:`launches`, every kernel launch.

    Made before Taichi starts: SPIR-V tasks name trees by the order in which they were made, however many are gone.
    """

    def __init__(self):
        from taichi._snode.fields_builder import FieldsBuilder
        from taichi.lang import kernel_impl

        self.trees = {}  # id of the root SNode -> Tree
        self._kernel = kernel_impl.Kernel
        finalize = FieldsBuilder._finalize

        def recording_finalize(builder, raise_warning, compile_only):
            made = finalize(builder, raise_warning, compile_only)
            root = builder.root
            self.trees[root._id] = Tree(len(self.trees), root._cell_size_bytes, _count_fields(root))
            return made

        FieldsBuilder._finalize = recording_finalize

    def tree_of(self, field):
        """The :class:`Tree` that holds a field."""
        node = field.snode.ptr
        while node.parent is not None:
            node = node.parent
        return self.trees[node.id]

    @contextlib.contextmanager
    def launches(self):
        """Yield a list that fills with (compiled kernel, argument values) and :class:`Poke`; no kernel is executed.

        Taichi's own kernels, which copy between fields and arrays, are left out: arrays read inside are zeros.
        """
        import taichi as ti
        from taichi.lang.field import ScalarField
        from taichi.lang.util import to_numpy_type

        recorded, launch, set_item = [], self._kernel.launch_kernel, ScalarField.__setitem__

        def record(kernel, compiled, *arguments):
            if not kernel.func.__module__.startswith("taichi."):
                pairs = zip(kernel.arguments, arguments)
                values = [a for p, a in pairs if not _is_template(p.annotation, ti.template)]
                recorded.append((compiled, values))

        def record_poke(field, key, value):
            place = np.ravel_multi_index(key if isinstance(key, tuple) else (key,), field.shape)
            stored = np.array(value, to_numpy_type(field.dtype))
            recorded.append(Poke(self.tree_of(field).index, int(place) * stored.itemsize, stored.tobytes().hex()))
            set_item(field, key, value)

        self._kernel.launch_kernel, ScalarField.__setitem__ = record, record_poke
        try:
            yield recorded
        finally:
            self._kernel.launch_kernel, ScalarField.__setitem__ = launch, set_item


def _is_template(annotation, template):
    return annotation is template or isinstance(annotation, template)


def _count_fields(node):
    children = node._get_children()
    return sum(map(_count_fields, children)) if children else 1
