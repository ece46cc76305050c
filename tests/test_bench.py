"""``tmla bench`` and ``model.profile()``: what they print, that stages one by one are the model, what they refuse."""

import json
import subprocess
import sys

import numpy as np
import pytest

import tmla
from tests.conftest import ROOT, backend
from tests.variants import variant_file
from tmla import bench, bench_env, bench_facts, bench_profile, bench_sampling, cli, runtime
from tmla.bench_result import share_of
from tmla.cli_bench import tests_of as cli_tests_of
from tmla.errors import BackendError, ContextError, ParameterError

ARCH = backend()
N_CTX = 32


def run(capsys, *args):
    assert cli.main(["bench", *map(str, args)]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, arch):
    return variant_file("lite", tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def model(tiny):
    return tmla.load(tiny, arch=ARCH, n_ctx=N_CTX)


@pytest.mark.parametrize("form", [pytest.param("md", marks=pytest.mark.slow), "json"])
def test_bench_prints_every_form(tiny, capsys, form):
    options = ["--arch", ARCH, "--pp", 3, "--tg", 2, "--depth", "5", "--reps", 2, "--output", form]
    out = run(capsys, tiny, *options)
    if form == "md":
        environment, *rest = out.splitlines()
        assert f"arch that ran: {ARCH}" in environment
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in rest if line.startswith("|")]
        names = ["model", "size", "params", "backend", "threads", "fa", "test", "t/s"]
        assert rows[0][: len(names)] == names
        assert [r[rows[0].index("test")] for r in rows[2:]] == ["pp3", "tg2", "tg2 @ d5"]
    else:
        records = json.loads(out)
        assert [(int(r["n_prompt"]), int(r["n_gen"]), int(r["n_depth"])) for r in records] == [
            (3, 0, 0), (0, 2, 0), (0, 2, 5),
        ]  # fmt: skip
        assert all(float(r["avg_ts"]) > 0 for r in records)


def test_what_bench_refuses(tiny, capsys):
    with pytest.raises(ParameterError, match="nothing to measure"):
        cli_tests_of(0, 0, [16])
    assert cli.main(["bench", str(tiny), "--profile", "--output", "csv"]) == 2
    assert "expected --output md or json" in capsys.readouterr().err
    assert [t.n_ctx for t in cli_tests_of(512, 128, [4096])] == [512, 128, 4096 + bench.DEPTH_TOKENS]
    assert [t.n_gen for t in cli_tests_of(0, 3, [7])] == [3, 3]


def stages_are_the_model(model, path):
    """The stages that are timed leave a decoded token's logits, and their bytes are those of the file's tensors."""
    model.reset()
    tokens = np.random.default_rng(1).integers(0, model.config.n_vocab, 9).tolist()
    model.prefill(tokens)
    banks = (model._globals, model.attention_banks, model.ffn_banks)
    model._state.logits.fill(float("nan"))
    stages = []
    for stage in bench_profile.token_stages(model.config, model._steps, banks, model._state, model.n_past):
        stage.launch()
        stages.append(stage)
    got = model._state.logits.to_numpy()[0]
    want = model.decode(0)
    assert want.std() > 0.1
    np.testing.assert_allclose(got, want, atol=1e-4 * want.std())
    n_bytes = sum(s.n_bytes for s in stages)
    assert n_bytes == pytest.approx(bench_facts.file_facts(path).bytes_at(model.n_past - 1, "f16"), rel=0.005)
    assert all(s.n_ops > 0 for s in stages)


def test_stages_one_by_one_are_the_model(model, tiny):
    stages_are_the_model(model, tiny)


@pytest.mark.slow
def test_stages_with_a_query_bottleneck_and_split_kv_b(tmp_path, arch):
    path = variant_file("v3", tmp_path)
    stages_are_the_model(tmla.load(path, arch=ARCH, n_ctx=N_CTX), path)


def test_profile_leaves_the_model_as_it_was(model):
    model.reset()
    model.prefill([3, 1, 4])
    want = model.decode(1)
    model.rewind(3)
    p = model.profile(n_tokens=2)
    assert model.n_past == 3
    np.testing.assert_array_equal(model.decode(1), want)
    assert p.timer == bench_profile.SYNCHRONISED
    assert p.n_rows == 4
    assert p.tasks == ()
    assert p.total_us == pytest.approx(sum(s.us for s in p.stages))
    assert {s.calls for s in p.stages} == {1, model.config.n_layers, model.config.n_moe_layers}
    text = p.text(read_ceiling_gb_s=1e-6)
    assert "(!)" in text, "nobody reads faster than the ceiling without a mark"
    assert all(s.name in text for s in p.stages)
    bench.fill_cache(model, N_CTX)
    with pytest.raises(ContextError, match="room for 0"):
        model.profile()


def test_the_profiler_runs_in_a_process_of_its_own(tiny):
    """It has to be asked for before the backend starts; its records are times of dispatches."""
    if ARCH not in runtime.PROFILED:
        pytest.skip(f"Taichi records nothing on {ARCH}")
    command = [sys.executable, "-m", "tmla", "bench", str(tiny), "--profile", "--arch", ARCH]
    command += ["--reps", "2", "--depth", "7", "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    (p,) = out["profiles"]
    assert p["timer"] == bench_profile.PROFILER
    assert p["n_rows"] == 8
    assert {name.split("_c")[0] for name, _, _ in p["tasks"]} >= {"begin"}
    n_layers = max(s["calls"] for s in p["stages"])
    assert any(n == n_layers for _, n, _ in p["tasks"])
    assert 0 < sum(us for _, _, us in p["tasks"]) < 2 * p["token_us"]
    assert out["sampling_us"].keys() >= {name for name, _ in bench_sampling.SETTINGS}


def test_the_profiler_cannot_come_late(arch):
    with pytest.raises(BackendError, match="without its profiler" if arch in runtime.PROFILED else "records nothing"):
        runtime.init(arch, profiler=True)
    with pytest.raises(BackendError, match="records nothing on 'metal'"):
        runtime.init("metal", profiler=True)


def test_a_filled_cache_is_finite_and_reaches_the_depth(model):
    bench.fill_cache(model, 27)
    assert model.n_past == 27
    rows = model.attention_banks[0].cache_rows(27)
    assert 0.5 < rows.std() < 2
    assert np.isfinite(model.decode(2)).all()


def test_share_of_the_ceiling():
    assert share_of(5.0, 10.0) == "50%"
    assert share_of(15.0, 10.0) == "150% (!)"
    assert share_of(0.0, 10.0) == share_of(5.0, 0.0) == "-"


def test_the_environment_names_no_host_and_no_path(monkeypatch):
    import socket

    line = bench_env.environment("cpu", 2, 0.5).line()
    assert str(ROOT) not in line
    assert "/" not in line.replace("arch that ran", "")
    assert socket.gethostname() not in line.split()
    monkeypatch.setattr(bench_env, "ROOT", ROOT.parent)
    assert bench_env.commit() == ""
    assert "of no checkout" in bench_env.environment("cpu").line()


def test_sampling_times():
    times = bench_sampling.sampling_us(n_vocab=2000, repetitions=3)
    assert all(0 < us < 1e6 for us in times.values())
    p = np.exp(np.sort(bench_sampling.logits_like_text(bench_sampling.N_VOCAB).astype(float))[::-1])
    assert 100 < np.searchsorted(np.cumsum(p / p.sum()), 0.95) < 1000, "some hundred tokens, as the docstring says"


def test_compute_ceiling():
    assert 0.1 < bench_facts.compute_ceiling_gop_s(64, 2) < 1e6
