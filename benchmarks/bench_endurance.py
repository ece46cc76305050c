"""Many decoded tokens in one process: does memory grow, does a step become slower beyond what its context explains?

    python -m benchmarks.bench_endurance MODEL.gguf --tokens 10000

Prints step time and memory for every thousand tokens. Where the context is full, decoding begins anew. At the end the
first steps are run once more: they must not have become slower, and memory must not have grown. The exit status is 1
if either did.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

import tmla
from benchmarks import common
from benchmarks.load_child import resident_bytes
from tmla.bench import ModelEngine
from tmla.bench_env import environment, load_average
from tmla.bench_facts import file_facts
from tmla.bench_result import markdown

MAX_GROWTH = 4 << 20  # bytes, after the first window
MAX_SLOWDOWN = 1.15  # of the fastest quarter of the first window's steps, run again at the end


@dataclasses.dataclass(frozen=True)
class Window:
    """Consecutive tokens of the run."""

    last: int  # tokens decoded so far
    position: int  # of the last
    step_us: float  # median
    best_us: float  # of the fastest quarter
    anon_bytes: int  # anonymous memory at its end


def window(model, n: int, last: int, feed) -> Window:
    """Decode `n` tokens; `feed` gives the next one."""
    times = []
    for _ in range(n):
        if model.n_past == model.n_ctx:
            model.reset()
        token = feed()
        start = time.perf_counter()
        model.decode(token)
        times.append((time.perf_counter() - start) * 1e6)
    best = sorted(times)[: max(1, n // 4)]
    return Window(last, model.n_past - 1, statistics.median(times), statistics.fmean(best), resident_bytes())


def judge(windows: list[Window], again: Window) -> list[tuple[str, bool]]:
    """What is claimed, with its numbers, and whether it holds."""
    growth = windows[-1].anon_bytes - windows[0].anon_bytes
    slower = again.best_us / windows[0].best_us
    return [
        (f"memory grew by {growth / 1e6:.2f} MB after the first window, at most {MAX_GROWTH / 1e6:.1f}",
         growth <= MAX_GROWTH),
        (f"the first window's steps, once more at the end, took {slower:.2f} times as long, at most {MAX_SLOWDOWN}",
         slower <= MAX_SLOWDOWN),
    ]  # fmt: skip


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.bench_endurance", description=__doc__.split("\n")[0])
    p.add_argument("model", nargs="?", type=pathlib.Path, help="GGUF file (default: the demo model)")
    p.add_argument("--tokens", type=int, default=10_000)
    p.add_argument("--window", type=int, default=1000, help="tokens a line (default: 1000)")
    p.add_argument("--ctx", type=int, default=4096)
    common.add_backend(p)
    common.add_output(p, ("md", "json"))
    args = p.parse_args(argv)
    load, path = load_average(), args.model or tmla.loading.demo_path()
    model = tmla.load(path, arch=args.arch, n_ctx=args.ctx, cache_dtype=args.cache, threads=args.threads)
    n_vocab, state = model.config.n_vocab, [1]

    def feed() -> int:
        state[0] = (state[0] * 75 + 74) % 65537  # the same tokens every time, nothing kept
        return state[0] % n_vocab

    model.decode(0)
    model.reset()
    windows = []
    for last in range(args.window, args.tokens + 1, args.window):
        windows.append(window(model, args.window, last, feed))
        w = windows[-1]
        print(f"{last}: {w.step_us:.0f} us, {w.anon_bytes / 1e6:.2f} MB", file=sys.stderr)
    model.reset()
    again = window(model, args.window, args.tokens + args.window, feed)
    verdicts = judge(windows, again)
    env = environment(model.arch, ModelEngine.threads_of(model.arch, args.threads), load)

    def write(stream) -> None:
        if args.output == "json":
            document = {"environment": dataclasses.asdict(env), "windows": [dataclasses.asdict(w) for w in windows]}
            document |= {"again": dataclasses.asdict(again), "verdicts": verdicts}
            json.dump(document, stream, indent=2)
            stream.write("\n")
            return
        header = ["tokens", "position", "median step us", "fastest quarter us", "anonymous MB"]
        rows = [
            [f"{w.last:,}", f"{w.position:,}", f"{w.step_us:.0f}", f"{w.best_us:.0f}", f"{w.anon_bytes / 1e6:.2f}"]
            for w in [*windows, again]
        ]
        lines = [f"- {'holds' if ok else 'DOES NOT HOLD'}: {text}" for text, ok in verdicts]
        stream.write(f"{env.line()}\n\n{file_facts(path).model_type}\n\n{markdown(header, rows, header)}\n\n")
        stream.write("\n".join(lines) + "\n")

    common.emit(args, write)
    return 0 if all(ok for _, ok in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
