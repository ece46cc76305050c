"""One load and two decoded tokens in a process of its own, which bench_load starts: tmla is imported by the clock.

python -m benchmarks.load_child MODEL.gguf '{"n_ctx": 4096}'
"""

import json
import pathlib
import sys
import threading
import time


class PeakMemory:
    """Largest anonymous memory of this process while the context is open, in bytes.

    Mapped file pages are not counted where the system tells them apart (Linux, sampled every 5 ms); elsewhere it is the
    largest resident size.
    """

    def __enter__(self):
        self.peak, self._stop = resident_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, resident_bytes())

    def __exit__(self, *exc) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, resident_bytes())


def resident_bytes() -> int:
    """Anonymous memory of this process in bytes; the largest resident size so far where the system tells no more."""
    try:
        status = pathlib.Path("/proc/self/status").read_text()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    values = dict(line.split(":", 1) for line in status.splitlines())
    return int(values["RssAnon"].split()[0]) * 1024


class CopyClock:
    """Progress callback of a load: how fast weights went into fields, from the first tensor's end to the last's."""

    def __init__(self):
        self.marks: list[tuple[float, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.marks.append((time.perf_counter(), done))

    @property
    def gb_s(self) -> float:
        """Bytes of the file copied, over the time; 0 of a single tensor."""
        if len(self.marks) < 2:
            return 0.0
        (start, first), (end, last) = self.marks[0], self.marks[-1]
        return (last - first) / (end - start) / 1e9


def measure(path: str, options: dict) -> dict:
    """Load and decode in this process; times in s, sizes in bytes."""
    clock, start = CopyClock(), time.perf_counter()
    with PeakMemory() as memory:
        import tmla

        imported = time.perf_counter()
        model = tmla.load(path, progress=clock, **options)
        loaded = time.perf_counter()
        model.decode(1)
        first = time.perf_counter()
        model.decode(2)
        second = time.perf_counter()
    return {
        "import_s": imported - start,
        "load_s": loaded - imported,
        "copy_gb_s": clock.gb_s,
        "first_token_s": first - loaded,
        "second_token_s": second - first,
        "to_first_token_s": first - start,
        "planned_bytes": model.memory["total"],
        "peak_bytes": memory.peak,
        "arch": model.arch,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], json.loads(sys.argv[2]))))
