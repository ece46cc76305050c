"""What loading does before it copies a tensor, for all tensors of a file and without a backend."""

from tmla.tensor_check import check_finite_tensor
from tmla.tensors import expected_tensors


def check_finite(gf, cfg):
    """Raise GGUFError for the first value that is not finite."""
    for name, spec in expected_tensors(cfg).items():
        if spec.kind == "vector" or gf.tensors[name].type == "Q8_0":
            check_finite_tensor(gf, name)
