"""``tmla check``: passes where all is right, and misses what is wrong."""

import dataclasses

import numpy as np
import pytest

import tmla
from tests.conftest import backend, oracle_dir
from tests.v2_lite import config as v2_lite_config
from tmla import check, check_extent, cli, cli_check, reference
from tmla.check_layer import LayerCheck, Result, relative_error
from tmla.check_weights import FileWeights
from tmla.config import open_checked
from tmla.errors import ContextError
from tmla.stages import absorb

ARCH = backend()
STAGES = [
    "RMSNorm (attn_norm)",
    "projection to q and kv_a",
    "absorb",
    "rope of the queries",
    "latent norm into the cache",
    "rope into the cache",
    "attention over",
    "output projection",
    "RMSNorm (ffn_norm)",
    "FFN",
]


@pytest.fixture(scope="module")
def mini(oracle):
    return oracle / "dsv2_mini.gguf"


@pytest.fixture(scope="module")
def model(mini):
    return tmla.load(mini, arch=ARCH, n_ctx=check.N_CTX, cache_dtype="f32")


@pytest.fixture(scope="module")
def report(model, mini):
    """The report, through the command's own function; loading and compiling once is enough for this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "load", lambda *args, **kw: model)
        return check.run_check(mini, arch=ARCH)


@pytest.fixture(scope="module")
def trace(mini):
    return reference.trace(mini, TOKENS, check.N_CTX)


TOKENS = [1, 70, 9, 200]


def test_all_within_tolerance(report):
    assert [r for r in report.results if not r.ok] == []
    assert len(report.notes) == 1
    assert report.ok
    assert report.arch == ARCH
    assert "8 tokens through 3 layers" in report.notes[0]


def test_every_stage_of_every_form_and_kind(report):
    by_place = {}
    for r in report.results:
        by_place.setdefault(r.where, []).append(r.what)
    forms = [place for place in by_place if place.startswith(("odd", "layer"))]
    assert forms[3:] == ["layer 0 (dense)", "layer 1 (mixture)"]
    for place in forms:
        for stage in STAGES:
            assert any(what.startswith(stage) for what in by_place[place]), (place, stage)
    assert {"router"} <= set(by_place["layer 1 (mixture)"]) - set(by_place["layer 0 (dense)"])
    for what in ("experts chosen", "logits of prefill", "logits of decode"):
        assert what in by_place["8 tokens"]
    assert {"embedding", "final norm and head", "greedy choice"} <= {r.what for r in report.results}


def test_errors_are_measured(report):
    """f32 arithmetic errs a little everywhere: zeros throughout would mean that nothing was compared."""
    errors = [
        r.error for r in report.results if r.tolerance and not r.what.startswith(("layer in", "embed", "experts"))
    ]
    assert len(errors) > 40
    assert min(errors) > 1e-9


def test_table_and_exit_code(report, monkeypatch, capsys):
    asked = {}
    monkeypatch.setattr(cli_check, "run_check", lambda path, **kw: asked.update(kw, path=path) or report)
    assert cli.main(["check", "some.gguf", "--tokens", "3", "--arch", "cpu", "--override", "a.b=2"]) == 0
    assert (asked["path"], asked["n_tokens"], asked["arch"], asked["overrides"]) == ("some.gguf", 3, "cpu", {"a.b": 2})
    out = capsys.readouterr().out
    assert len(out.splitlines()) == len(report.results) + 4
    assert out.endswith(f"{ARCH}: all {len(report.results)} within tolerance\n")
    assert "MISS" not in out

    bad = dataclasses.replace(report, results=[*report.results, Result("absorb", "layer 9", float("nan"), 1e-4)])
    monkeypatch.setattr(cli_check, "run_check", lambda path, **kw: bad)
    assert cli.main(["check", "some.gguf"]) == 1
    assert f"1 of {len(bad.results)} above tolerance: absorb (layer 9)" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["logits", "hidden", "cache"])
def test_a_wrong_model_is_missed(model, trace, wrong):
    changed = getattr(trace, wrong).copy()
    changed[-1, -1] += 1e-3 * changed.std()
    results = check.compare_model(model, TOKENS, dataclasses.replace(trace, **{wrong: changed}), [])
    rows = {"logits": "logits", "hidden": "residual behind", "cache": "cache rows"}
    assert all(r.what.startswith(rows[wrong]) != r.ok for r in results)


def test_other_experts_are_missed_and_named(model, trace):
    experts = trace.experts.copy()
    position = 2
    experts[1, position, 0] = next(e for e in range(model.config.n_experts) if e not in experts[1, position])
    notes = []
    results = check.compare_model(model, TOKENS, dataclasses.replace(trace, experts=experts), notes)
    assert [r.what for r in results if not r.ok] == ["experts chosen"]
    assert notes[0].startswith("position 2, layer 2: experts [")


def test_a_wrong_stage_is_missed_alone(model, monkeypatch):
    """The error of one stage shows in its row and in no other: each gets what the device computed before it."""
    right = absorb.absorb_ref
    monkeypatch.setattr(absorb, "absorb_ref", lambda *args, **kw: right(*args, **kw) * (1 + 1e-4))
    rng = np.random.default_rng(3)
    cfg, a, f = model.config, model.attention_banks[0], model.ffn_banks[0]
    layer_check = LayerCheck(cfg, a, f, model._state, 0, FileWeights(model.file, cfg, 0), "layer 0")
    rows = rng.standard_normal((40, cfg.cache_row_width), np.float32)
    results = layer_check.run(rng.standard_normal(cfg.dim, np.float32), rows)
    model.reset()
    assert [r.what for r in results if not r.ok] == ["absorb (unsplit)"]


def test_relative_error():
    ref = np.array([1.0, -4.0])
    assert relative_error(np.array([1.0, -4.2]), ref) == pytest.approx(0.05)
    assert relative_error(np.array([1.0, np.nan]), ref) == np.inf
    assert not Result("stage", "layer", float("nan"), 1e-4).ok


def test_fused_experts_of_a_file(oracle):
    """One expert's rows of a fused gate-and-up tensor are those of the whole stack."""
    gf, cfg = open_checked(oracle / "dsv3_fused.gguf")
    with gf:
        number = cfg.is_moe_layer.index(True)
        weights = FileWeights(gf, cfg, number)
        whole = gf.array(f"blk.{number}.ffn_gate_up_exps.weight")  # [E, 2 F, D]
        for name, start in (("gate_exps", 0), ("up_exps", cfg.expert_ffn_dim)):
            quants = weights.blocks(name, 3)
            got = gf.q8_0_blocks(f"blk.{number}.ffn_gate_up_exps.weight").reshape(cfg.n_experts, -1, *quants.shape[1:])
            np.testing.assert_array_equal(quants, got[3, start : start + cfg.expert_ffn_dim])
        assert whole.shape[1] == 2 * cfg.expert_ffn_dim


# how much the reference runs


def test_extent_shrinks_with_speed():
    cfg = v2_lite_config()
    assert check_extent.choose_extent(cfg, 1e12, 60.0).n_tokens == 8
    values = [check_extent.reference_values(cfg, n, 27) for n in (2, 4, 8)]
    assert values == sorted(values)
    assert 1.5e9 < values[0] < 6e9  # 2.4e9 weights act per token
    middle = check_extent.choose_extent(cfg, values[1] / 60.0, 60.0)
    assert (middle.n_tokens, middle.n_layers) == (4, 27)
    few = check_extent.choose_extent(cfg, values[0] / 180.0, 60.0)
    assert few.n_tokens == 2
    assert 5 <= few.n_layers <= 9
    assert few.expected_s <= 60.0
    least = check_extent.choose_extent(cfg, 1.0, 60.0)
    assert (least.n_tokens, least.n_layers) == (2, 2)  # the first mixture layer is always there


@pytest.mark.parametrize("name", ["dsv2_lite", "glm47flash", "minicpm3"])
def test_fewer_layers_is_the_same_model_cut(oracle, name):
    path = oracle / f"{name}.gguf"
    gf, cfg = open_checked(path)
    with gf:
        overrides = check_extent.fewer_layers(gf, cfg, 2)
        assert check_extent.fewer_layers(gf, cfg, cfg.n_layers) == {}
    cut = reference.trace(path, TOKENS, overrides=overrides)
    whole = reference.trace(path, TOKENS)
    assert len(cut.hidden) == 2
    if name == "minicpm3":  # its residual scale depends on the number of layers
        assert np.isfinite(cut.hidden).all()
    else:
        np.testing.assert_array_equal(cut.hidden, whole.hidden[:2])


def test_what_was_left_out_is_said(model, mini, report, monkeypatch):
    monkeypatch.setattr(check, "load", lambda *args, **kw: model)
    monkeypatch.setattr(check, "check_model", lambda *args, **kw: dataclasses.replace(report, notes=[]))
    monkeypatch.setattr(check, "values_per_second", lambda gf: 1.0)
    assert check.run_check(mini).notes == ["the first 2 of 3 layers were loaded and checked"]
    assert check.run_check(mini, n_tokens=2).notes == []  # asked for: all layers


def test_prompt_length_is_bounded(mini):
    with pytest.raises(ContextError, match="1 tokens"):
        check.run_check(mini, arch=ARCH, n_tokens=1)
    with pytest.raises(ContextError, match="1000 tokens"):
        check.run_check(mini, arch=ARCH, n_tokens=1000)


def test_bad_file_is_one_line(capsys):
    path = oracle_dir() / "bad" / "bad_kv_b_q4_0.gguf"
    if not path.exists():
        pytest.skip("the oracle files are not beside this checkout; set TMLA_ORACLE to their folder")
    assert cli.main(["check", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
