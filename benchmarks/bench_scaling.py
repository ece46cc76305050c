"""What a token costs against context, prompt length, layers and experts, and the line through it.

    python -m benchmarks.bench_scaling MODEL.gguf --plot docs/scaling.svg

Context: decode steps at several depths in turn (so that a slow minute hits all alike), a straight line through the
medians; its slope against the time that the cached rows' bytes take at the read ceiling of the same run, and against
the time that their operations take at the speed of NumPy's BLAS. Prompt length: us per token of a prefill, which is
computed in batches. Layers and experts: the same file, cut by overriding its metadata.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

import numpy as np

import tmla
from benchmarks import common
from tmla.bench import ModelEngine, fill_cache
from tmla.bench_env import environment, load_average
from tmla.bench_facts import compute_ceiling_gop_s, file_facts
from tmla.bench_result import markdown
from tmla.check_extent import fewer_layers
from tmla.config import open_checked

N_STEPS = 8  # decoded at a point and round
BAR = 1.3  # the slope that is wanted, over the bytes' time


@dataclasses.dataclass(frozen=True)
class Point:
    """Cost of a token at one value of what is varied."""

    x: int
    us: float  # median
    spread_us: float  # between the quartiles


@dataclasses.dataclass(frozen=True)
class Slope:
    """The line through the points of the context, and what it is judged by."""

    us_per_row: float  # all layers of one cached token
    base_us: float
    max_deviation: float  # of a point from the line, relative
    bytes_per_row: int
    ops_per_row: int
    read_ceiling_gb_s: float
    compute_ceiling_gop_s: float

    @property
    def over_bytes(self) -> float:
        """Slope over the time that the row's bytes take at the read ceiling."""
        return self.us_per_row / (self.bytes_per_row / self.read_ceiling_gb_s / 1e3)

    @property
    def over_ops(self) -> float:
        """Slope over the time that the row's operations take at the speed of a matrix product; 0 if not measured."""
        c = self.compute_ceiling_gop_s
        return self.us_per_row / (self.ops_per_row / c / 1e3) if c else 0.0

    def verdict(self) -> str:
        """What the slope says, in words."""
        text = (
            f"slope {1e3 * self.us_per_row:.1f} ns per cached token, all layers ({self.bytes_per_row:,} bytes, "
            f"{self.ops_per_row:,} operations); largest deviation from the line {self.max_deviation:.1%}; "
            f"{self.over_bytes:.2f} times the time of its bytes at {self.read_ceiling_gb_s:.1f} GB/s "
            f"({'within' if self.over_bytes <= BAR else 'ABOVE'} the {BAR} that were wanted)"
        )
        if self.over_ops:
            text += f"; {self.over_ops:.2f} times that of its operations at {self.compute_ceiling_gop_s:.0f} Gop/s"
        return text


def point(x: int, samples_us) -> Point:
    """Median and distance of the quartiles."""
    q1, q3 = np.percentile(samples_us, (25, 75))
    return Point(x, statistics.median(samples_us), float(q3 - q1))


def steps_us(model, depth: int, n: int) -> list[float]:
    """Times of `n` decode steps from `depth` on, the logits read back; the cache is left at `depth`."""
    model.n_past, out = depth, []
    for _ in range(n):
        start = time.perf_counter()
        model.decode(1)
        out.append((time.perf_counter() - start) * 1e6)
    model.rewind(depth)
    return out


def over_context(model, depths: list[int], rounds: int, n_steps: int = N_STEPS) -> list[Point]:
    """Cost of a step behind each number of cached tokens."""
    fill_cache(model, depths[-1])
    samples: dict[int, list[float]] = {d: [] for d in depths}
    steps_us(model, depths[-1], 2)  # compiles what long contexts need
    for turn in range(rounds):
        for depth in depths if turn % 2 else depths[::-1]:
            samples[depth] += steps_us(model, depth, n_steps)
    return [point(d, s) for d, s in samples.items()]


def line(points: list[Point], cfg, cache_dtype: str, read_gb_s: float, gop_s: float) -> Slope:
    """Least squares of relative errors through the points."""
    x, y = np.array([p.x for p in points], float), np.array([p.us for p in points])
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    width = cfg.cache_row_width
    return Slope(
        us_per_row=float(slope),
        base_us=float(base),
        max_deviation=float(np.abs((base + slope * x) / y - 1).max()),
        bytes_per_row=cfg.n_layers * cfg.cache_row_bytes(cache_dtype),
        ops_per_row=cfg.n_layers * 2 * cfg.n_heads * (width + cfg.kv_lora_rank),
        read_ceiling_gb_s=read_gb_s,
        compute_ceiling_gop_s=gop_s,
    )


def over_prompt(model, lengths: list[int], rounds: int) -> list[Point]:
    """Cost of a prompt's token, by the prompt's length."""
    tokens = np.random.default_rng(0).integers(0, model.config.n_vocab, lengths[-1]).tolist()
    samples: dict[int, list[float]] = {n: [] for n in lengths}
    for turn in range(rounds + 1):
        for n in lengths:
            model.reset()
            start = time.perf_counter()
            model.prefill(tokens[:n])
            samples[n] += [(time.perf_counter() - start) * 1e6 / n] * (turn > 0)  # the first compiles
    return [point(n, s) for n, s in samples.items()]


def over_overrides(args, variants: dict[int, dict], rounds: int) -> list[Point]:
    """Cost of a step of the file with each set of overridden keys, the models in turn."""
    models = {
        x: tmla.load(args.model, arch=args.arch, n_ctx=64, cache_dtype=args.cache, threads=args.threads, overrides=o)
        for x, o in variants.items()
    }
    samples: dict[int, list[float]] = {x: [] for x in models}
    for model in models.values():
        steps_us(model, 0, 4)
    for turn in range(rounds):
        for x in list(models)[:: 1 if turn % 2 else -1]:
            samples[x] += steps_us(models[x], 0, N_STEPS)
    return [point(x, s) for x, s in samples.items()]


def points_markdown(name: str, points: list[Point]) -> str:
    """One line a point."""
    rows = [[f"{p.x:,}", f"{p.us:.0f}", f"{p.spread_us:.0f}"] for p in points]
    header = [name, "us per token", "quartiles apart by"]
    return markdown(header, rows, header)


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.bench_scaling", description=__doc__.split("\n")[0])
    p.add_argument("model", type=pathlib.Path, help="GGUF file of at least two layers")
    p.add_argument("--contexts", default="64,1024,2048,4096,8192,16384", help="cached tokens")
    p.add_argument("--prompts", default="1,4,16,64,256", help="prompt lengths")
    p.add_argument("--layers", help="numbers of layers (default: a quarter, half, all)")
    p.add_argument("--experts", help="experts used (default: 1, the file's, twice as many)")
    p.add_argument("--rounds", type=int, default=4, help="times that every point is visited (default: 4)")
    p.add_argument("--plot", type=pathlib.Path, help="context plot: .svg or .png (needs matplotlib)")
    common.add_backend(p)
    common.add_output(p, ("md", "json"))
    args = p.parse_args(argv)
    contexts, prompts = (sorted(int(x) for x in text.split(",")) for text in (args.contexts, args.prompts))
    load, facts = load_average(), file_facts(args.model)
    n_ctx = max(contexts[-1] + N_STEPS, prompts[-1])
    model = tmla.load(args.model, arch=args.arch, n_ctx=n_ctx, cache_dtype=args.cache, threads=args.threads)
    cfg, arch = model.config, model.arch
    ceiling = common.Ceiling(arch, facts.token_weight_bytes, args.threads)
    curves = {"context": over_context(model, contexts, args.rounds)}
    ceiling.measure()
    compute = compute_ceiling_gop_s() if arch == "cpu" else 0.0
    slope = line(curves["context"], cfg, args.cache, ceiling.gb_s, compute)
    curves["prompt length"] = over_prompt(model, prompts, args.rounds)
    del model
    layers = [int(x) for x in args.layers.split(",")] if args.layers else [cfg.n_layers // 4, cfg.n_layers // 2]
    with open_checked(args.model)[0] as gf:
        cuts = {n: fewer_layers(gf, cfg, n) for n in sorted({*layers, cfg.n_layers} - {0})}
    curves["layers"] = over_overrides(args, cuts, args.rounds)
    if cfg.n_experts:
        used = cfg.n_experts_used
        numbers = [int(x) for x in args.experts.split(",")] if args.experts else [1, used, 2 * used]
        key = f"{cfg.arch}.expert_used_count"
        cuts = {n: {key: n} for n in sorted(set(numbers)) if n <= cfg.n_experts}
        curves["experts used"] = over_overrides(args, cuts, args.rounds)
    env = environment(arch, ModelEngine.threads_of(arch, args.threads), load)

    def write(stream) -> None:
        if args.output == "json":
            document = {"environment": dataclasses.asdict(env), "model_type": facts.model_type}
            document |= {"slope": dataclasses.asdict(slope), "over_bytes": slope.over_bytes, "over_ops": slope.over_ops}
            document["curves"] = {name: [dataclasses.asdict(p) for p in points] for name, points in curves.items()}
            json.dump(document, stream, indent=2)
            stream.write("\n")
        else:
            tables = [points_markdown(name, points) for name, points in curves.items()]
            stream.write("\n\n".join([env.line(), facts.model_type, tables[0], slope.verdict(), *tables[1:]]) + "\n")

    common.emit(args, write)
    if args.plot is not None:
        from benchmarks.plots import context_scaling

        context_scaling(args.plot, curves["context"], slope, env)
    return 0


if __name__ == "__main__":
    sys.exit(main())
