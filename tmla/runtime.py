"""The one place that starts Taichi, and what the backend it started can do."""

import dataclasses
import logging
import os
import sys

import taichi as ti

from tmla import vulkan_device
from tmla.errors import BackendError
from tmla.excerpts import quicken
from tmla.quiet import quiet

ARCHS = ("metal", "cuda", "vulkan", "cpu")
PROFILED = ("cuda", "vulkan", "cpu")  # Taichi 1.7.4's kernel profiler records nothing on Metal

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Caps:
    """What the running backend offers; kernels are chosen by this, never by the backend's name alone.

    Attributes
    ----------
    arch : str
        The backend that really runs.
    lane_ops : {"none", "warp", "subgroup"}
        Cross-lane sums: none on CPU (a subgroup call there ends the process), ``ti.simt.warp`` on CUDA,
        ``ti.simt.subgroup`` on Vulkan and Metal.
    lanes : int
        Threads that one cross-lane operation joins, as the device says; 1 on CPU.
    layout : {"bytes", "words"}
        How Q8_0 quants are stored: u8, or u64 of eight quants each. The same bits.
    debug : bool
        Bounds are checked (CPU and CUDA only).
    threads : int
        CPU threads that share a loop; 1 on GPUs.
    max_buffer : int or None
        Bytes of one buffer that the device promises to reach; None where it cannot be asked (all but Vulkan).
    profiler : bool
        Taichi records the device time of every dispatch.
    """

    arch: str
    lane_ops: str
    lanes: int
    layout: str
    debug: bool
    threads: int = 1
    max_buffer: int | None = None
    profiler: bool = False

    @property
    def gpu(self) -> bool:
        """True where kernels run as thread groups with shared memory."""
        return self.arch != "cpu"

    @property
    def fuse(self) -> bool:
        """True where several dispatches belong into one kernel.

        Not on CUDA: Taichi 1.7.4 then compiles the bodies as functions behind pointers, which costs more time on the
        device than the launches saved (measured: docs/log.md).
        """
        return self.arch != "cuda"


@dataclasses.dataclass
class LaunchCounter:
    """Python-side kernel launches and read-backs since the last :meth:`reset`; tests count a token's cost with it."""

    launches: int = 0
    readbacks: int = 0

    def reset(self) -> None:
        """Start counting from zero."""
        self.launches = self.readbacks = 0


_caps: Caps | None = None
counter = LaunchCounter()


class Launch:
    """A kernel bound to template arguments alone: launched without the work Taichi's Python does for every call.

    Measured on an H200: 6 us instead of 20 (docs/log.md). Rests on internals of the pinned Taichi release.
    """

    def __init__(self, kernel, *args) -> None:
        primal = kernel._primal
        self._prog = ti.lang.impl.get_runtime().prog
        taichi_kernel = primal.compiled_kernels[primal.ensure_compiled(*args)]
        self._compiled = self._prog.compile_kernel(self._prog.config(), self._prog.get_device_caps(), taichi_kernel)
        self._context = taichi_kernel.make_launch_context()
        self._kernel = taichi_kernel

    def __call__(self) -> None:
        self._prog.launch_kernel(self._compiled, self._context)
        counter.launches += 1


def default_arch() -> str:
    """Metal on macOS, CPU elsewhere."""
    return "metal" if sys.platform == "darwin" else "cpu"


def init(
    arch: str | None = None, *, threads: int | None = None, debug: bool | None = None, profiler: bool = False
) -> Caps:
    """Start Taichi once per process; a second call with the same backend returns what runs already.

    Parameters
    ----------
    arch : str, optional
        Backend: "metal", "cuda", "vulkan" or "cpu". Default: :func:`default_arch`. Never replaced by another.
    threads : int, optional
        CPU threads; default all cores. Only the first call of a process can set it.
    debug : bool, optional
        Check bounds of field accesses (slow). Default: the environment variable ``TMLA_DEBUG``.
    profiler : bool
        Record the device time of every dispatch, for :meth:`tmla.model.Model.profile`; one of :data:`PROFILED` only.
        Records are kept until they are cleared, so not for long runs.

    Raises
    ------
    BackendError
        The backend is unknown or not available (Taichi itself would run on CPU instead), or another one runs already:
        Taichi has one runtime per process. So is a profiler that is asked for too late, or where there is none.
    """
    global _caps
    arch = arch or default_arch()
    if arch not in ARCHS:
        raise BackendError(f"arch {arch!r} is unknown; expected one of {', '.join(ARCHS)}")
    if profiler and arch not in PROFILED:
        raise BackendError(f"Taichi's kernel profiler records nothing on {arch!r}, only on {', '.join(PROFILED)}")
    if _caps is not None:
        if profiler and not _caps.profiler:
            raise BackendError("the backend runs already, without its profiler; ask for it first in a new process")
        if _caps.arch != arch:
            raise BackendError(
                f"arch {arch!r} was asked for, but this process already runs {_caps.arch!r} and Taichi has one runtime "
                "per process; start a new process for the other backend"
            )
        return _caps
    debug = debug if debug is not None else os.environ.get("TMLA_DEBUG", "0") not in ("", "0")
    options = {"debug": debug, "log_level": ti.ERROR, "kernel_profiler": profiler}
    if profiler:
        options["offline_cache"] = False  # its key does not tell kernels with the profiler's calls from those without
    if arch == "cpu":
        options["advanced_optimization"] = False  # LLVM does that work again: half the time to compile, the same code
    if threads is not None:
        options["cpu_max_num_threads"] = threads
    quicken()
    with quiet():
        ti.init(arch=getattr(ti, arch), enable_fallback=False, **options) if _has(arch) else _unavailable(arch)
    got = ti.lang.impl.current_cfg().arch
    if got != getattr(ti, arch) and not (arch == "cpu" and got in (ti.x64, ti.arm64)):
        ti.reset()
        _unavailable(arch, f" (Taichi ran on {ti._lib.core.arch_name(got)!r} instead)")
    _caps = dataclasses.replace(_probe(arch, debug), profiler=profiler)
    log.info("backend %s: lanes %d (%s), quants in %s", arch, _caps.lanes, _caps.lane_ops, _caps.layout)
    return _caps


def caps() -> Caps:
    """The running backend's capabilities.

    Raises
    ------
    BackendError
        No backend was started yet.
    """
    if _caps is None:
        raise BackendError("no backend runs yet; call tmla.load(...) or tmla.runtime.init(arch) first")
    return _caps


def running() -> Caps | None:
    """As :func:`caps`; None where no backend runs."""
    return _caps


def reset() -> None:
    """Forget the backend and every field: for tests and tools; models loaded before are unusable."""
    global _caps
    ti.reset()
    _caps = None


def sync() -> None:
    """Wait until the device has finished all launched kernels."""
    ti.sync()


def _has(arch: str) -> bool:
    core = ti._lib.core
    return arch == "cpu" or {"metal": core.with_metal, "cuda": core.with_cuda, "vulkan": core.with_vulkan}[arch]()


def _unavailable(arch: str, instead: str = "") -> None:
    hint = {
        "metal": "Metal needs macOS on a Mac with a GPU",
        "cuda": "CUDA needs an NVIDIA GPU and its driver",
        "vulkan": "Vulkan needs a loader (libvulkan) and a driver; VK_DRIVER_FILES names one",
        "cpu": "Taichi's CPU backend did not start",
    }[arch]
    raise BackendError(
        f"arch {arch!r} is not available on this machine{instead}: {hint}; pass arch='cpu' to run without a GPU"
    )


def _probe(arch: str, debug: bool) -> Caps:
    if arch == "cpu":
        return Caps(arch, "none", 1, "bytes", debug, ti.lang.impl.current_cfg().cpu_max_num_threads)
    if arch == "cuda":
        return Caps(arch, "warp", 32, "words", debug)
    device = vulkan_device.chosen(vulkan_device.devices()) if arch == "vulkan" else None
    return Caps(arch, "subgroup", _subgroup_width(), "words", debug, max_buffer=device.max_buffer if device else None)


def _subgroup_width() -> int:
    width, tree = ti.field(ti.i32), ti.FieldsBuilder()
    tree.dense(ti.i, 1).place(width)
    tree.finalize()

    @ti.kernel
    def ask():
        for i in range(32):
            if i == 0:
                width[0] = ti.simt.subgroup.group_size()

    ask()
    return int(width[0])  # the field stays: not every backend can free one
