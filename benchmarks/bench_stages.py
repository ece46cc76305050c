"""Time of every stage of a decoded token: us, bytes, GB/s, share of the read ceiling, operations a second; sampling.

    python -m benchmarks.bench_stages MODEL.gguf --depths 64,4096 --plot docs/roofline.svg

Each stage is launched by itself, in a token's order through all layers, so that weights come from memory as they do in
decoding. Times are of Taichi's kernel profiler (on Metal, where it records nothing, of synchronised launches). The
ceilings, a plain read of memory and on CPU a matrix product of NumPy's BLAS, are measured in the same run.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import tmla
from benchmarks import common
from tmla import runtime
from tmla.bench import ModelEngine, fill_cache
from tmla.bench_env import environment, load_average
from tmla.bench_facts import compute_ceiling_gop_s, file_facts
from tmla.bench_sampling import N_VOCAB, sampling_us
from tmla.cli_bench import profile_text


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.bench_stages", description=__doc__.split("\n")[0])
    p.add_argument("model", type=pathlib.Path, help="GGUF file")
    p.add_argument("--depths", default="64", help="cached tokens, comma-separated (default: 64)")
    p.add_argument("-n", "--tokens", type=int, default=20, help="tokens to take medians of (default: 20)")
    p.add_argument("--vocab", type=int, default=N_VOCAB, help=f"logits that are sampled from (default: {N_VOCAB})")
    p.add_argument("--plot", type=pathlib.Path, help="roofline plot: .svg or .png (needs matplotlib)")
    common.add_backend(p)
    common.add_output(p, ("md", "json"))
    args = p.parse_args(argv)
    depths = sorted(int(d) for d in args.depths.split(","))
    arch, load = args.arch or runtime.default_arch(), load_average()
    runtime.init(arch, threads=args.threads, profiler=arch in runtime.PROFILED)
    model = tmla.load(args.model, arch=arch, n_ctx=depths[-1] + 1, cache_dtype=args.cache)
    facts = file_facts(args.model)
    ceiling = common.Ceiling(arch, facts.token_weight_bytes, args.threads)
    profiles = []
    for depth in depths:
        fill_cache(model, depth)
        profiles.append(model.profile(args.tokens))
    ceiling.measure()
    compute = compute_ceiling_gop_s() if arch == "cpu" else 0.0
    sampling = sampling_us(args.vocab)
    env = environment(arch, ModelEngine.threads_of(arch, args.threads), load)
    document = {
        "environment": dataclasses.asdict(env),
        "model_type": facts.model_type,
        "read_ceiling_gb_s": ceiling.gb_s,
        "compute_ceiling_gop_s": compute or None,
        "profiles": [dataclasses.asdict(p) for p in profiles],
        "sampling_us": sampling,
        "sampling_vocab": args.vocab,
    }

    def write(stream) -> None:
        if args.output == "json":
            json.dump(document, stream, indent=2)
            stream.write("\n")
        else:
            stream.write(profile_text(env, facts.model_type, profiles, sampling, ceiling.gb_s, args.vocab))
            if compute:
                stream.write(f"\nf32 matrix product of NumPy's BLAS in the same run: {compute:.0f} Gop/s\n")

    common.emit(args, write)
    if args.plot is not None:
        from benchmarks.plots import roofline

        roofline(args.plot, profiles, ceiling.gb_s, compute, env)
    return 0


if __name__ == "__main__":
    sys.exit(main())
