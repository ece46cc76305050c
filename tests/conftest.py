"""Fixtures: the backend under test, seeded random numbers, fields, poisoned outputs, the oracle files.

``TMLA_TEST_ARCH`` picks the backend (default: Metal on macOS, else CPU); ``TMLA_ORACLE`` the oracle folder.
"""

import os
import pathlib

import numpy as np
import pytest
import taichi as ti

from tmla import runtime
from tmla.fields import FieldPool

ROOT = pathlib.Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items):
    """Tests marked slow run with TMLA_ALL=1 only."""
    if os.environ.get("TMLA_ALL", "0") in ("", "0"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: TMLA_ALL=1 runs it"))


def oracle_dir() -> pathlib.Path:
    """Folder of the oracle files: the whole set, or the two that the repository holds."""
    path = pathlib.Path(os.environ.get("TMLA_ORACLE", ROOT.parent / "shared" / "oracle"))
    return path if (path / "dsv2_mini.gguf").exists() else ROOT / "tests" / "data" / "oracle"


class OracleFolder(type(pathlib.Path())):
    """A folder of which ``folder / name`` skips the test when there is no such file."""

    def __truediv__(self, name):
        path = super().__truediv__(name)
        if not path.exists():
            pytest.skip(f"oracle file {name} is not beside this checkout; set TMLA_ORACLE to its folder")
        return path


def backend() -> str:
    """Backend the suite runs on."""
    return os.environ.get("TMLA_TEST_ARCH") or runtime.default_arch()


@pytest.fixture(scope="session")
def oracle() -> pathlib.Path:
    return OracleFolder(oracle_dir())


@pytest.fixture(scope="session")
def arch() -> str:
    """Start the backend under test and give its name."""
    return runtime.init(backend()).arch


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


class FieldFactory:
    """Makes fields that are freed when the test ends."""

    def __init__(self):
        self.pool = FieldPool()

    def __call__(self, array: np.ndarray, dtype=None):
        """Field with the values of an array; dtype by the array's unless given."""
        types = {"float32": ti.f32, "float16": ti.f16, "uint8": ti.u8, "int32": ti.i32, "uint64": ti.u64}
        out = self.pool.field(dtype or types[array.dtype.name], array.shape)
        out.from_numpy(array)
        return out

    def poisoned(self, *shape: int, dtype=ti.f32):
        """Field full of NaN (integers: of -7777)."""
        out = self.pool.field(dtype, shape)
        out.fill(float("nan") if dtype in (ti.f32, ti.f16) else -7777)
        return out


@pytest.fixture
def field(arch):
    factory = FieldFactory()
    yield factory
    factory.pool.destroy()
