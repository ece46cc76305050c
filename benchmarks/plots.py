"""The two plots of `docs/benchmarks.md`: a roofline of the stages, and a token's cost over the context."""

import pathlib

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

GREY, BLUE, ORANGE = "#767676", "#0b5fa5", "#c4540a"
SIZE = (7.5, 4.6)


def roofline(path, profiles, read_gb_s: float, gop_s: float, env) -> None:
    """Operations a second over operations a byte: stages of each profile, under the ceilings of their run.

    Parameters
    ----------
    path : str or os.PathLike
        .svg or .png.
    profiles : sequence of tmla.bench_profile.Profile
    read_gb_s, gop_s : float
        Ceilings; 0 draws none.
    env : tmla.bench_env.Environment
    """
    figure, axes = plt.subplots(figsize=SIZE)
    dots = [(s, p) for p in profiles for s in p.stages if s.n_bytes > 1e5 and s.n_ops]
    x = np.geomspace(0.1, 100, 200)
    if read_gb_s:
        roof = np.minimum(x * read_gb_s, gop_s) if gop_s else x * read_gb_s
        axes.plot(x, roof, color=GREY, lw=1.5)
        axes.annotate(f"read ceiling {read_gb_s:.1f} GB/s", (0.12, 0.14 * read_gb_s), color=GREY, fontsize=8)
    if gop_s:
        axes.annotate(f"f32 matrix product {gop_s:.0f} Gop/s", (100, gop_s * 1.06), ha="right", color=GREY, fontsize=8)
    below: dict[float, float] = {}  # where the last label stands, by intensity
    for stage, p in sorted(dots, key=lambda dot: dot[0].gop_s):
        is_attention = stage.name.startswith("attention")
        axes.plot(stage.n_ops / stage.n_bytes, stage.gop_s, "o", ms=5, color=ORANGE if is_attention else BLUE)
        if p is profiles[-1] or is_attention:
            text = f"{stage.name} @ {p.n_rows:,}" if is_attention else stage.name
            intensity = stage.n_ops / stage.n_bytes
            y = max(stage.gop_s, 1.1 * below.get(round(intensity, 1), 0.0))  # labels do not cover each other
            below[round(intensity, 1)] = y
            axes.text(1.06 * intensity, y, text, va="center", fontsize=7)
    axes.set(xscale="log", yscale="log", xlim=(0.1, 110), xlabel="operations a byte", ylabel="1e9 operations a second")
    axes.set_title(f"Stages of a decoded token: {env.gpu or env.cpu}, {env.arch}, {env.date[:10]}", fontsize=9)
    _save(figure, axes, path)


def context_scaling(path, points, slope, env) -> None:
    """A token's cost over the cached tokens: measured, the line through it, and what the rows' bytes alone would take.

    Parameters
    ----------
    points : sequence of benchmarks.bench_scaling.Point
    slope : benchmarks.bench_scaling.Slope
    """
    figure, axes = plt.subplots(figsize=SIZE)
    x = np.linspace(0, points[-1].x, 50)
    axes.errorbar(
        [p.x for p in points], [p.us / 1e3 for p in points], [p.spread_us / 2e3 for p in points], fmt="o", ms=5, lw=1,
        color=BLUE, label="measured (median, quartiles)",
    )  # fmt: skip
    axes.plot(
        x, (slope.base_us + slope.us_per_row * x) / 1e3, color=BLUE, lw=1,
        label=f"line: {slope.base_us / 1e3:.1f} ms + {1e3 * slope.us_per_row:.0f} ns a cached token",
    )  # fmt: skip
    floors = [("bytes", slope.bytes_per_row / slope.read_ceiling_gb_s, "--", "read ceiling")]
    if slope.compute_ceiling_gop_s:
        floors.append(("operations", slope.ops_per_row / slope.compute_ceiling_gop_s, ":", "speed of a matrix product"))
    for what, ns, style, at in floors:
        axes.plot(
            x, (slope.base_us + ns * x / 1e3) / 1e3, style, color=GREY, lw=1.2,
            label=f"its {what} alone at the {at}: {ns:.0f} ns",
        )  # fmt: skip
    axes.set(xlabel="cached tokens", ylabel="ms a decoded token", ylim=(0, None), xlim=(0, None))
    axes.set_title(f"Cost of a token over its context: {env.gpu or env.cpu}, {env.arch}, {env.date[:10]}", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    _save(figure, axes, path)


def _save(figure, axes, path) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, lw=0.5)
    figure.tight_layout()
    path = pathlib.Path(path)
    mpl.rcParams["svg.hashsalt"] = path.stem  # the same numbers give the same file
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=150)
    plt.close(figure)
