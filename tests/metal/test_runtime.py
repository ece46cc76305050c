"""What Taichi's Metal backend refuses at run time, and the package must not ask of it."""

import os
import subprocess
import sys

from . import tools

# Program::destroy_snode_tree of Taichi 1.7.4 asserts LLVM, Vulkan or DirectX: on Metal a tree lives until the end.
SCRIPT = """
import taichi as ti
from taichi._snode.snode_tree import SNodeTree
from tests.metal import package
from tmla.fields import FieldPool

def refuse(tree):
    raise RuntimeError("Metal cannot destroy a tree of fields")

SNodeTree.destroy = refuse
package.start_taichi()
pool = FieldPool()
pool.field(ti.f32, (3,))
pool.destroy()
"""


def test_no_tree_is_destroyed_on_metal():
    tools.require_all()
    environment = dict(os.environ, VK_DRIVER_FILES=tools.llvmpipe_icd(), PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
