"""The benchmark programs: what is timed, the statistics, the tables, and one run of each on a tiny file."""

import csv
import dataclasses
import io
import json
import math
import statistics
import types

import numpy as np
import pytest

from benchmarks import (
    bench_decode,
    bench_endurance,
    bench_load,
    bench_peers,
    bench_scaling,
    bench_stages,
    device_read,
    report,
)
from benchmarks.make_model import write_model
from benchmarks.shapes import SHAPES
from tests.variants import VARIANTS, variant_file
from tmla import bench_facts, runtime
from tmla.bench import Runner, Test, parse_tests
from tmla.bench_env import environment
from tmla.bench_facts import FileFacts, file_facts, read_ceiling_gb_s
from tmla.bench_profile import Profile, StageTime
from tmla.bench_result import Result, results_markdown, write_results

FACTS = FileFacts("m.gguf", "deepseek2 1M Q8_0", 1_111_520, 1_003_904, 300, "deepseek2", 5000, 640)


class RecordingEngine:
    """Counts what it is asked to do; `n_past` moves as a cache would."""

    backend, n_threads, type_kv, flash_attn = "cpu", 2, "f16", None

    def __init__(self, name="tmla"):
        self.name, self.n_past, self.calls = name, 0, []

    def prefill(self, tokens):
        self.calls.append(("prefill", self.n_past, len(tokens)))
        self.n_past += len(tokens)
        return np.arange(8.0)

    def decode(self, token):
        self.calls.append(("decode", self.n_past, token))
        self.n_past += 1
        return np.arange(8.0)

    def fill(self, tokens):
        self.calls.append(("fill", self.n_past, len(tokens)))
        self.n_past += len(tokens)

    def rewind(self, n_past):
        assert 0 <= n_past <= self.n_past
        self.n_past = n_past


def result(**changes):
    values = dict(
        engine="tmla", model_filename="m.gguf", model_type="deepseek2 1M Q8_0", model_size=1_111_520,
        model_n_params=1_003_904, backend="cpu", n_threads=2, type_kv="f16", flash_attn=None, n_prompt=0, n_gen=4,
        n_depth=0, samples_ns=(1_000_000, 2_000_000, 4_000_000), bytes_per_token=10_000,
    )  # fmt: skip
    return Result(**(values | changes))


def test_tests_are_parsed_and_sorted_by_depth():
    assert parse_tests("tg64@d4096, pp512,tg128 @ d16") == [Test(512, 0, 0), Test(0, 128, 16), Test(0, 64, 4096)]
    for bad in ("pp", "tg0", "512", "pp512@4096", ""):
        with pytest.raises(ValueError, match="expected ppN or tgN"):
            parse_tests(bad)


def test_only_the_missing_part_of_the_depth_is_filled():
    engine, runner = RecordingEngine(), Runner(FACTS, 40)
    runner.time_ns(engine, Test(0, 3, 10))
    runner.time_ns(engine, Test(0, 3, 10))
    runner.time_ns(engine, Test(5, 0, 16))
    assert [c[:2] for c in engine.calls] == [
        ("fill", 0), *[("decode", 10 + i) for i in range(3)], *[("decode", 10 + i) for i in range(3)],
        ("fill", 10), ("prefill", 16),
    ]  # fmt: skip
    assert engine.calls[-1] == ("prefill", 16, 5)
    assert engine.n_past == 16
    assert [c[2] for c in engine.calls[1:4]] == runner.tokens[10:13]


def test_statistics():
    r = result()
    assert r.samples_ts == pytest.approx((4000, 2000, 1000))
    assert r.avg_ts == pytest.approx(7000 / 3)
    assert r.stddev_ts == pytest.approx(statistics.stdev([4000, 2000, 1000]))
    assert r.read_gb_s == pytest.approx(10_000 * 2000 / 1e9)
    assert result(samples_ns=(5,)).stddev_ts == 0
    assert result(n_prompt=4, n_gen=0).read_gb_s == 0
    assert result(n_depth=7).test == "tg4 @ d7"


def test_markdown_has_the_columns_of_llama_bench():
    env = environment("cpu", 2, 0.25)
    out = io.StringIO()
    write_results(out, [result(), result(n_prompt=512, n_gen=0)], env, "md")
    line, _, header, rule, *rows = out.getvalue().splitlines()
    assert "arch that ran: cpu, 2 threads" in line
    assert "load average before: 0.2" in line
    names = [c.strip() for c in header.strip("|").split("|")]
    assert names == ["model", "size", "params", "backend", "threads", "fa", "test", "t/s"]
    assert len({len(x) for x in (header, rule, *rows)}) == 1
    assert "2333.33 ± 1527.53" in rows[0]
    assert "| 1.06 MiB |" in rows[0]
    assert "pp512" in rows[1]
    with_ceiling = results_markdown([result()], read_ceiling_gb_s=0.04)
    assert "50%" in with_ceiling
    assert "(!)" not in with_ceiling
    above = results_markdown([result()], read_ceiling_gb_s=0.01)
    assert "200% (!)" in above
    assert "not a bandwidth of memory" in above


def test_csv_and_json_carry_the_same_numbers():
    env = environment("cpu", 2)
    text, doc = io.StringIO(), io.StringIO()
    write_results(text, [result()], env, "csv")
    write_results(doc, [result()], env, "json")
    (row,) = csv.DictReader(io.StringIO(text.getvalue()))
    (record,) = json.loads(doc.getvalue())
    assert float(row["avg_ts"]) == record["avg_ts"] == pytest.approx(7000 / 3)
    assert record["samples_ns"] == [1_000_000, 2_000_000, 4_000_000]
    assert {"build_commit", "model_n_params", "n_depth", "stddev_ns", "type_k"} <= set(row)


def test_engines_alternate_and_ratios_are_against_the_better_peer():
    order, runner = [], Runner(FACTS, 8)
    engines = [RecordingEngine("tmla"), RecordingEngine("a"), RecordingEngine("b"), RecordingEngine("tmla")]
    for i, engine in enumerate(engines):
        engine.rewind = lambda n, i=i, e=engine: (order.append(i), setattr(e, "n_past", n))
    made = bench_peers.compare([(runner, e) for e in engines], Test(0, 2), 3)
    assert order == [0, 1, 2, 3, 0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1], "the warm-up, then another one begins each time"
    assert [len(r.samples_ns) for c in made for r in (c.tmla, *c.peers)] == [3] * 6
    assert [c.tmla.engine for c in made] == ["tmla"] * 2
    peers = (result(flash_attn=False, samples_ns=(8_000_000,) * 3), result(flash_attn=True, model_type="x split"))
    comparison = bench_peers.Comparison(result(), peers)
    assert comparison.best_peer.flash_attn is True
    assert comparison.ratio == pytest.approx(1)
    assert comparison.paired == pytest.approx((1, 1, 1))
    table = bench_peers.ratios_markdown([comparison])
    assert "x split, fa=1" in table
    assert "1.00 (1.00..1.00)" in table


@pytest.mark.parametrize("name", ["lite", "v3", "dense", "glm", "plm"])
def test_bytes_of_a_token_are_what_it_reads(tmp_path, name):
    s, facts = VARIANTS[name], file_facts(variant_file(name, tmp_path))

    def q8(*shape):
        return math.prod(shape) * 34 // 32

    d, c, h = s.dim, s.kv_lora_rank, s.n_heads
    attention = q8(c + s.qk_rope_head_dim, d) + q8(h * (s.qk_nope_head_dim + s.v_head_dim), c)
    attention += q8(d, h * s.v_head_dim) + 4 * (2 * d + c)
    if s.q_lora_rank:
        attention += q8(s.q_lora_rank, d) + q8(h * s.qk_head_dim, s.q_lora_rank) + 4 * s.q_lora_rank
    else:
        attention += q8(h * s.qk_head_dim, d)
    n_mats = 2 if s.arch == "plm" else 3
    moe = 3 * (s.n_experts_used * q8(s.expert_ffn_dim, d) + q8(s.shared_ffn_dim, d))
    moe += 4 * s.n_experts * (d + s.expert_bias)
    total = s.n_layers * attention + s.n_dense * n_mats * q8(s.ffn_dim, d) + (s.n_layers - s.n_dense) * moe
    total += q8(s.n_vocab, d) + 4 * d + (0 if s.tied_head else q8(d))
    assert facts.token_weight_bytes == total
    assert facts.bytes_at(9, "f16") - facts.bytes_at(8, "f16") == 2 * s.n_layers * (c + s.qk_rope_head_dim)


def test_read_ceiling_is_a_bandwidth():
    assert 0.1 < read_ceiling_gb_s(1 << 26, 2, repetitions=2) < 2000


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch):
    """Programs that run in this process measure the ceilings on little memory."""
    monkeypatch.setattr(bench_facts, "MIN_READ_BYTES", 1 << 22)
    for module in (bench_stages, bench_scaling):
        monkeypatch.setattr(module, "compute_ceiling_gop_s", lambda: bench_facts.compute_ceiling_gop_s(64, 1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    (path,) = write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", SHAPES["tiny"])
    return path


def test_bench_decode_runs(tiny, tmp_path, capsys):
    options = ["--arch", "cpu", "--tests", "pp5,tg3@d4", "-r", "2", "-o", "json", "--no-ceiling"]
    assert bench_decode.main([str(tiny), *options, "--to", str(tmp_path / "out.json")]) == 0
    records = json.loads((tmp_path / "out.json").read_text())
    assert '"n_depth": 4' in capsys.readouterr().out
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in records] == [(5, 0, 0), (0, 3, 4)]
    assert all(r["avg_ts"] > 0 and len(r["samples_ns"]) == 2 for r in records)


@pytest.mark.slow
def test_bench_load_runs(tiny, capsys):
    assert bench_load.main([str(tiny), "--arch", "cpu", "-r", "0", "--ctx", "64", "-o", "json"]) == 0
    out = json.loads(capsys.readouterr().out)
    (run,) = out["runs"]
    assert run["load_s"] > 0
    assert run["to_first_token_s"] > run["load_s"] + run["first_token_s"]
    assert run["peak_bytes"] > run["planned_bytes"] > out["file_bytes"] / 2
    assert run["import_s"] > 0.05, "the import is timed in a process that has not done it yet"
    assert run["copy_gb_s"] > 0
    table = bench_load.table([run, run | {"load_s": 2.0}, run | {"load_s": 4.0}, run | {"load_s": 3.0}], 6_000_000_000)
    header, _, compiled, cached = ([c.strip() for c in line.strip("|").split("|")] for line in table.splitlines())
    assert compiled[0] == "compiled"
    assert cached[header.index("load s")] == "3.000"
    assert cached[header.index("load GB/s")] == "2.000"


def test_bench_peers_runs(tiny, tmp_path):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python (the bench extra) is not installed")
    (split,) = write_model(tmp_path / "split.gguf", SHAPES["tiny"].replace(split=True))
    options = ["--arch", "cpu", "--threads", "1", "--tests", "tg3@d2", "-r", "2", "-o", "json", "--no-ceiling"]
    assert bench_peers.main([str(tiny), str(split), *options, "--to", str(tmp_path / "out.json")]) == 0
    out = json.loads((tmp_path / "out.json").read_text())
    assert [r["flash_attn"] for r in out["results"]] == [None, None, False, True, False, True]
    assert [r["model_type"].split()[-1] for r in out["results"]] == [
        "unsplit", "split", "unsplit", "unsplit", "split", "split",
    ]  # fmt: skip
    assert len(out["correlations"]) == 4
    assert min(out["correlations"]) > 0.98
    assert [r["test"] for r in out["ratios"]] == ["tg3 @ d2"] * 2
    assert all(r["ratio"] > 0 for r in out["ratios"])


@pytest.mark.slow
def test_bench_stages_runs(tiny, tmp_path, monkeypatch, arch):
    """Without the profiler, which a process must start with: tests/test_bench.py has it."""
    monkeypatch.setattr(runtime, "PROFILED", ())
    options = ["--arch", arch, "--depths", "3,20", "-n", "2", "--vocab", "1000", "-o", "json"]
    assert bench_stages.main([str(tiny), *options, "--to", str(tmp_path / "out.json")]) == 0
    out = json.loads((tmp_path / "out.json").read_text())
    assert [p["n_rows"] for p in out["profiles"]] == [4, 21]
    assert out["read_ceiling_gb_s"] > 0
    attention = [s for p in out["profiles"] for s in p["stages"] if s["name"].startswith("attention")]
    assert attention[1]["n_bytes"] * 4 == attention[0]["n_bytes"] * 21


@pytest.mark.slow
def test_bench_scaling_runs(tiny, tmp_path, arch):
    options = ["--contexts", "4,64", "--prompts", "1,5", "--layers", "2", "--experts", "1", "--rounds", "1"]
    options += ["--arch", arch, "-o", "json", "--to", str(tmp_path / "out.json")]
    assert bench_scaling.main([str(tiny), *options]) == 0
    out = json.loads((tmp_path / "out.json").read_text())
    xs = {name: [p["x"] for p in points] for name, points in out["curves"].items()}
    assert xs == {"context": [4, 64], "prompt length": [1, 5], "layers": [2, 4], "experts used": [1]}
    assert all(p["us"] > 0 for points in out["curves"].values() for p in points)
    assert out["slope"]["bytes_per_row"] == file_facts(tiny).cache_row_bytes


def test_the_slope_is_that_of_the_points():
    cfg = types.SimpleNamespace(
        n_layers=2, n_heads=3, kv_lora_rank=64, cache_row_width=80, cache_row_bytes=lambda dtype: 160
    )
    points = [bench_scaling.Point(x, 1000 + 0.05 * x, 1.0) for x in (10, 1000, 5000)]
    slope = bench_scaling.line(points, cfg, "f16", read_gb_s=16.0, gop_s=35.0)
    assert slope.us_per_row == pytest.approx(0.05)
    assert slope.base_us == pytest.approx(1000)
    assert slope.max_deviation < 1e-6
    assert slope.over_bytes == pytest.approx(2.5)  # 320 bytes at 16 GB/s take 0.02 us
    assert slope.over_ops == pytest.approx(0.05 / (2 * 2 * 3 * 144 / 35e3))
    assert "ABOVE" in slope.verdict()
    assert "within" in dataclasses.replace(slope, read_ceiling_gb_s=6.5).verdict()
    bent = [*points, bench_scaling.Point(9000, 2900.0, 1.0)]
    assert bench_scaling.line(bent, cfg, "f16", 16.0, 0.0).max_deviation > 0.1


@pytest.mark.slow
def test_bench_endurance_runs_and_judges(tiny, capsys):
    options = ["--arch", "cpu", "--tokens", "60", "--window", "20", "--ctx", "32", "-o", "json"]
    bench_endurance.main([str(tiny), *options])  # its verdict on so few tokens is chance
    out = json.loads(capsys.readouterr().out)
    assert [w["last"] for w in out["windows"]] == [20, 40, 60]
    assert [w["position"] for w in out["windows"]] == [19, 7, 27], "where the context is full it begins anew"
    assert len(out["verdicts"]) == 2
    w = bench_endurance.Window(1000, 999, 100.0, 90.0, 10 << 20)
    fine = dataclasses.replace(w, anon_bytes=13 << 20)
    assert [ok for _, ok in bench_endurance.judge([w, fine], w)] == [True, True]
    grown, slow = dataclasses.replace(w, anon_bytes=15 << 20), dataclasses.replace(w, best_us=110.0)
    assert [ok for _, ok in bench_endurance.judge([w, grown], slow)] == [False, False]


def test_report_replaces_what_stands_between_the_marks():
    page = (report.ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    new = report.between_marks(page, "TABLES")
    assert new.count("TABLES") == 1
    assert report.between_marks(new, "TABLES") == new
    assert new.split(report.BEGIN)[0] == page.split(report.BEGIN)[0]
    assert new.split(report.END)[1] == page.split(report.END)[1]
    for bad in ("", report.END + report.BEGIN, page + report.BEGIN):
        with pytest.raises(ValueError, match="once each"):
            report.between_marks(bad, "")
    known = {s.args[0] for s in report.SECTIONS}
    assert known == {f"benchmarks.bench_{n}" for n in ("decode", "stages", "scaling", "load", "peers", "endurance")}


@pytest.mark.slow
def test_report_runs_a_section(tiny, tmp_path):
    section = report.Section("load", "Load", ("benchmarks.bench_load", str(tiny), "-r", "0", "--ctx", "16"))
    text = report.run_section(section, tmp_path, tmp_path, tmp_path)
    assert text.startswith(f"### Load\n\n```sh\npython -m benchmarks.bench_load {tiny}")
    assert "| compiled |" in text
    with pytest.raises(RuntimeError, match="ended with 2"):
        report.run_section(
            dataclasses.replace(section, args=(*section.args, "--nonsense")), tmp_path, tmp_path, tmp_path
        )


def test_plots(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (the bench extra) is not installed")
    from benchmarks import plots

    env = environment("cpu", 2)
    stages = (
        StageTime("FFN", 2, 100.0, 400_000, 900_000),
        StageTime("attention over the rows", 2, 50.0, 300_000, 10**7),
    )
    profiles = [Profile("cpu", "wall", n, stages, 200.0, ()) for n in (65, 4097)]
    plots.roofline(tmp_path / "r.svg", profiles, 20.0, 100.0, env)
    points = [bench_scaling.Point(x, 1000 + 0.05 * x, 9.0) for x in (64, 1000, 5000)]
    slope = bench_scaling.Slope(0.05, 1000.0, 0.0, 4608, 139_264, 20.0, 100.0)
    for name in ("a.svg", "b.svg", "c.png"):
        plots.context_scaling(tmp_path / name, points, slope, env)
    text = (tmp_path / "r.svg").read_text()
    assert text.count("attention over the rows @") == 2
    assert "50 ns a cached token" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_the_device_is_read_whole(arch):
    assert device_read.device_read_gb_s(3 * device_read.THREADS, repetitions=1) > 0


def test_a_bad_test_name_is_a_usage_error(tiny, capsys):
    with pytest.raises(SystemExit) as exit_info:
        bench_decode.main([str(tiny), "--tests", "fast"])
    assert exit_info.value.code == 2
    assert "expected ppN or tgN" in capsys.readouterr().err
