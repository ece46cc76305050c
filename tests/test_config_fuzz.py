"""Mutated metadata and tensor tables: each gives a configuration and a plan, or GGUFError or BackendError, no more.

What the header's own checks let through is mutated, not the bytes: keys, values, shapes, types, names. The mutations
run in a child process whose address space is bounded (where the system can do that), so that a size that slips through
ends that process and not the machine. A few hundred by default; ``TMLA_FUZZ=20000`` sets the number. Mutation ``i``
depends on its number alone.
"""

import copy
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.variants import variant_file
from tmla.errors import BackendError, GGUFError
from tmla.gguf_file import TensorInfo, open_gguf
from tmla.tensor_check import REQUANTIZE_TYPES

N_MUTATIONS = int(os.environ.get("TMLA_FUZZ", "400"))
BASES = ["lite", "lite_split", "q_lora_groups", "v3", "v3_fused", "glm", "glm_unsplit_two_nextn", "mistral", "dense",
         "minicpm3", "minicpm3_orig_ctx", "plm_untied", "lite_layer_arrays"]  # fmt: skip
MAX_MEMORY = 1 << 30  # resident, beyond what the process had before the first mutation
MAX_ADDRESS_SPACE = 2 << 30  # beyond the same; the imports alone take several GB of it
MAX_SECONDS = 1.0  # of processor time, each
LONG = {"minicpm3": (1 << 30) + (1 << 20)}  # bytes that a file is extended to, so that huge rope factors lie within it
MAX_MESSAGE = 6000  # up to 64 tensor names

SEARCHED = [  # keys that are read where they exist
    "attention.key_length_mla", "attention.value_length_mla", "attention.value_length", "attention.q_lora_rank",
    "attention.temperature_scale", "attention.temperature_length", "embedding_scale", "residual_scale",
    "expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_weights_norm",
    "expert_weights_scale", "nextn_predict_layers", "rope.freq_base", "rope.scale_linear",
    "rope.scaling.attn_factor", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier", "vocab_size",
]  # fmt: skip
INTEGERS = [0, 1, 2, 3, 15, 16, 31, 32, 33, 48, 64, 96, 127, 128, 255, 1024, 65536, 2**20, 2**24, 2**31 - 33]
INTEGERS += [2**31 - 32, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, -1, -32, -(2**31), -(2**63)]
FLOATS = [0.0, -0.0, 0.5, 1.0, 1.0 + 2**-52, 1.5, 32.0, 1e-300, 1e-45, 1e-12, 1e4, 1e12, 1e13, 1e38, 1e300, -1.0]
FLOATS += [math.nan, math.inf, -math.inf]
OTHERS = [True, False, "", "yarn", "longrope", "linear", "none", "deepseek2", "x\n\x1b" * 50, [], ["a", "b"]]
OTHERS += [[np.array([1, 2]), ["x"]], [np.array([1, 2]), np.array([1, 2])]]
TYPES = ["Q8_0", "F32", "F16", "BF16", "F64", "I32", "Q4_0", "Q4_K", "IQ2_XXS"]


def well_formed(info, size):
    """What opening a file has made sure of: a mutation that breaks it is none of the configuration's business."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[info.type]]
    if not 1 <= len(info.shape) <= 4 or min(info.shape) < 1 or info.shape[-1] % block or info.n_elements >= 2**63:
        return None
    info = dataclasses.replace(info, n_bytes=info.n_elements // block * block_bytes)
    if info.name.startswith("rope_factors") and info.offset + info.n_bytes > size:  # these are read
        info = dataclasses.replace(info, offset=0)
        return info if info.n_bytes <= size else None
    return info if info.n_bytes < 2**63 else None


class Mutant:
    """A file whose metadata and tensor table can be changed; the data stays."""

    def __init__(self, gf, rng):
        self.gf, self.rng = copy.copy(gf), rng
        self.gf.metadata, self.gf.tensors = dict(gf.metadata), dict(gf.tensors)
        self.arch = gf.metadata["general.architecture"]

    def pick(self, values):
        return values[int(self.rng.integers(len(values)))]

    def value(self, old):
        """Another value: near the old one, or none that any model has."""
        number = isinstance(old, (int, float)) and not isinstance(old, bool) and math.isfinite(old)
        match int(self.rng.integers(7)) if number else 3 + int(self.rng.integers(4)):
            case 0:
                return old + self.pick([-32, -2, -1, 1, 2, 32])
            case 1:
                return old * self.pick([2, 3, 4, 1024, -1])
            case 2:  # the same number, otherwise stored
                entries = self.pick([1, 2, 3, 4, 300])
                return self.pick([float(old), str(old), np.full(entries, float(old)), [np.array([old])] * entries])
            case 3:
                return self.pick(INTEGERS)
            case 4:
                return self.pick(FLOATS)
            case 5:
                return self.pick(OTHERS)
        return np.array([self.pick(INTEGERS[:20]) for _ in range(self.pick([0, 1, 3, 4, 70]))])

    def change_key(self):
        keys = [k for k in self.gf.metadata if k.startswith(self.arch)]
        key = self.pick([*keys, *keys, *(f"{self.arch}.{k}" for k in SEARCHED), "tokenizer.ggml.tokens"])
        if self.rng.random() < 0.15:
            self.gf.metadata.pop(key, None)
        else:
            self.gf.metadata[key] = self.value(self.gf.metadata.get(key))

    def swap_keys(self):
        keys = [k for k in self.gf.metadata if k.startswith(self.arch)]
        a, b = self.pick(keys), self.pick(keys)
        self.gf.metadata[a], self.gf.metadata[b] = self.gf.metadata[b], self.gf.metadata[a]

    def change_arch(self):
        """Another architecture's name on the same keys."""
        arch = self.pick(["deepseek2", "minicpm3", "plm", "llama", "", 7, "deepseek2\n"])
        for key in [k for k in self.gf.metadata if k.startswith(self.arch + ".")]:
            self.gf.metadata[f"{arch}{key.removeprefix(self.arch)}"] = self.gf.metadata[key]
        self.gf.metadata["general.architecture"] = arch

    def put(self, info):
        info = well_formed(info, self.gf.n_bytes)
        if info is not None:
            self.gf.tensors[info.name] = info

    def change_shape(self):
        info = self.gf.tensors[self.pick(list(self.gf.tensors))]
        shape = list(info.shape)
        at = int(self.rng.integers(len(shape)))
        match int(self.rng.integers(7)):
            case 0:
                shape[at] += self.pick([-32, -1, 1, 32])
            case 1:
                shape[at] = self.pick([n for n in INTEGERS if n > 0])
            case 2:
                shape.insert(at, self.pick([1, 2, 32]))
            case 3:
                del shape[at]
            case 4:
                shape.reverse()
            case 5:
                shape = [math.prod(shape)]
            case 6:
                shape[at] *= self.pick([2, 32, 2**20, 2**31])
        if shape:
            self.put(dataclasses.replace(info, shape=tuple(shape)))

    def change_type(self):
        info = self.gf.tensors[self.pick(list(self.gf.tensors))]
        self.put(dataclasses.replace(info, type=self.pick(TYPES)))

    def remove_tensors(self):
        """One tensor, one block, or one role of all blocks."""
        name = self.pick(list(self.gf.tensors))
        first, _, rest = name.partition(".")
        number, _, role = rest.partition(".")
        mode = int(self.rng.integers(3)) if first == "blk" else 0
        for other in list(self.gf.tensors):
            block = mode == 1 and other.startswith(f"blk.{number}.")
            if other == name or block or (mode == 2 and other.endswith("." + role)):
                del self.gf.tensors[other]

    def rename(self):
        name = self.pick(list(self.gf.tensors))
        role = name.rpartition(".")[0]
        new = self.pick(
            [self.pick(list(self.gf.tensors)), f"{role}.bias", f"{role}.scale", name.replace("blk.1.", "blk.99."),
             name.replace("blk.2.", "blk.2000000000."), f"blk.{2**70}.nextn.x", "blk..nextn.", "blk.x\n.nextn.y",
             "rope_factors_long.weight", "rope_factors_short.weight", "blk.0.attn_q_a.weight", "blk.1.exp_probs_b.bias",
             "blk.0.attn_kv_b.weight", "blk.0.attn_k_b.weight", "blk.0.ffn_gate_up_exps.weight"]
        )  # fmt: skip
        info = self.gf.tensors[name]
        if self.rng.random() < 0.5:
            del self.gf.tensors[name]
        self.put(dataclasses.replace(info, name=new))

    def swap_tensors(self):
        a, b = (self.gf.tensors[self.pick(list(self.gf.tensors))] for _ in range(2))
        self.put(dataclasses.replace(a, name=b.name))
        self.put(dataclasses.replace(b, name=a.name))

    def add_blocks(self):
        """Hundreds of small tensors with block numbers, near or far."""
        start, role = self.pick([0, 3, 10**6]), self.pick(["attn_norm.weight", "nextn.enorm.weight", "x"])
        for i in range(start, start + self.pick([10, 500])):
            self.put(TensorInfo(f"blk.{i}.{role}", (32,), "F32", 128, 0))

    def mutate(self):
        ways = [self.change_key] * 6 + [self.change_shape] * 3 + [self.change_type, self.remove_tensors, self.rename]
        ways += [self.swap_keys, self.change_arch, self.swap_tensors, self.add_blocks]
        for _ in range(int(self.rng.integers(1, 4))):
            if self.gf.tensors:
                self.pick(ways)()
        return self.gf


def absurd(gf):
    """Name -> a file with one number that no machine could hold, the tensors following where they can."""
    arch = gf.metadata["general.architecture"]

    def with_keys(extra=(), **keys):
        out = Mutant(gf, None).gf
        out.metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
        out.tensors |= {t.name: t for t in extra}
        return out

    most = 2**31 - 1
    long = np.full(1 << 22, 3)  # as many elements as a header may have
    many = [TensorInfo(f"blk.{i}.attn_norm.weight", (32,), "F32", 128, 0) for i in range(20_000)]
    huge = TensorInfo("token_embd.weight", (2**50, 64), "Q8_0", 2**56, 0)
    factors = [TensorInfo(f"rope_factors_{w}.weight", (1 << 28,), "F32", 1 << 30, 0) for w in ("long", "short")]
    kv_a = dataclasses.replace(gf.tensors["blk.0.attn_kv_a_mqa.weight"], shape=(64 + (1 << 29), 192))
    out = {
        "blocks": with_keys(block_count=most),
        "blocks as tensors": with_keys(block_count=len(gf.tensors)),
        "nextn": with_keys(nextn_predict_layers=most),
        "heads": with_keys(attention__head_count=most),
        "widths": with_keys(embedding_length=most, feed_forward_length=most, attention__key_length=most),
        "context": with_keys(context_length=most, rope__scaling__original_context_length=most),
        "experts": with_keys(expert_count=most, expert_used_count=most, expert_feed_forward_length=most),
        "vocabulary": with_keys([huge], vocab_size=most),
        "arrays": with_keys(block_count=long, feed_forward_length=long, attention__head_count=long),
        "array of floats": with_keys(attention__head_count=long.astype(np.float64)),
        "many tensors": with_keys(many),
        "many blocks": with_keys(many, block_count=20_000),
        "blocks of little": with_keys(many, block_count=3_000),
        "many nextn blocks": with_keys(many, block_count=3_000, nextn_predict_layers=2_990),
        "rope factors": with_keys(factors, rope__dimension_count=1 << 29, attention__key_length=(1 << 29) + 64),
        "rope factors and kv_a": with_keys(
            [*factors, kv_a], rope__dimension_count=1 << 29, attention__key_length=(1 << 29) + 64
        ),
    }
    return out


def use(gf, n_ctx, cache_dtype, layout, matrix_types):
    """Do what loading does before it allocates; returns the error message, or nothing if the file passed."""
    from tmla.config import MLAConfig, check_tensors  # here, so that collecting tests does not import a backend
    from tmla.plan import make_plan

    try:
        cfg = MLAConfig.from_gguf(gf)
        check_tensors(gf, cfg, matrix_types=matrix_types)
        plan = make_plan(cfg, n_ctx, cache_dtype, layout)
    except (GGUFError, BackendError) as error:
        return str(error)
    assert plan.weight_bytes > 0
    assert plan.cache_bytes >= cfg.n_layers * n_ctx * cfg.cache_row_bytes(cache_dtype)
    assert np.isfinite(cfg.rope_table(40)).all()
    assert np.isfinite(cfg.temperature_table(40)).all()
    assert 0 < cfg.softmax_scale < math.inf
    return ""


def cases(files, seed, n):
    """Yield what to try: a name and a file; the absurd ones if `n` is 0."""
    for i in range(n):
        gf = files[i % len(files)]
        yield f"mutation {i} of {gf.name}, seed {seed}", Mutant(gf, np.random.default_rng([seed, i])).mutate()
    if not n:
        for gf in (f for f in files if f.name.split("-")[0] in ("lite", "v3", "minicpm3")):
            yield from ((f"{what} of {gf.name}", case) for what, case in absurd(gf).items())


def worker(folder, seed, n):
    """Try the cases and print what they came to, as JSON. Stops at the first fault."""
    from tmla import weights  # noqa: F401 - before memory is measured and bounded

    files = []
    for name in BASES:
        path = variant_file(name, folder)
        os.truncate(path, LONG.get(name, path.stat().st_size))  # sparse
        files.append(open_gguf(path))
    limit_memory()
    before, tried, passed, slowest, fault = peak_bytes(), 0, [], (0.0, ""), ""
    rng = np.random.default_rng(seed)
    for what, gf in cases(files, seed, n):
        n_ctx, dtype = (1, 4096, 1 << 20, 2**31 - 1)[int(rng.integers(4))], ("f16", "f32")[int(rng.integers(2))]
        types = ("Q8_0", *REQUANTIZE_TYPES)[: 1 if rng.random() < 0.7 else None]
        start = time.process_time()
        try:
            message = use(gf, n_ctx, dtype, "bytes", types)
        except Exception as error:
            message, fault = "", f"{what}: {error!r}"
        if not message.isprintable() or len(message) > MAX_MESSAGE:
            fault = f"{what}: no short line: {message!r}"
        if fault:
            break
        tried += 1
        slowest = max(slowest, (time.process_time() - start, what))
        if not message:
            passed.append(what)
    out = {"tried": tried, "passed": passed, "slowest": slowest, "memory": peak_bytes() - before, "fault": fault}
    print(json.dumps(out))


def limit_memory():
    try:
        import resource

        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MAX_ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, OSError):
        pass  # not Linux: the peak is looked at afterwards all the same


def peak_bytes():
    """The most resident memory this process ever had."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(folder, seed, n):
    root = pathlib.Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_config_fuzz", str(folder), str(seed), str(n)],
        cwd=root, capture_output=True, text=True, timeout=120 + n * 2 * MAX_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["fault"], result["fault"]
    assert result["slowest"][0] < MAX_SECONDS, result["slowest"]
    assert result["memory"] < MAX_MEMORY, result["memory"]
    return result


@pytest.mark.parametrize("seed", [1, 2])
def test_mutations(tmp_path, seed):
    n = N_MUTATIONS // 2
    result = run(tmp_path, seed, n)
    assert result["tried"] == n
    assert n // 50 < len(result["passed"]) < n  # some changes do no harm, most do


def test_absurd_counts(tmp_path):
    result = run(tmp_path, 0, 0)
    assert result["tried"] == 48
    passed = {what.rsplit(" of ", 1)[0] for what in result["passed"]}
    assert passed <= {"context", "array of floats", "experts"}  # no limit, equal to the file's 3 heads, and no router


if __name__ == "__main__":
    worker(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
