"""All CPU tables and both plots of the documentation, measured anew.

    python -m benchmarks.report --out docs/

Makes the two model files, runs the benchmark programs one after another, and replaces what stands between the marks of
`benchmarks.md` in the output folder. Takes under ten minutes on two quiet cores; nothing else should run.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.make_model import write_model
from benchmarks.shapes import SHAPES

BEGIN, END = "<!-- measured by benchmarks.report: begin -->", "<!-- measured by benchmarks.report: end -->"
ROOT = pathlib.Path(__file__).resolve().parent.parent
UNSPLIT, SPLIT = "mid.gguf", "mid-split.gguf"
DEPTHS = "pp512,tg128,tg64@d4096,tg64@d16384,tg32@d65536"


@dataclasses.dataclass(frozen=True)
class Section:
    """One table: its title, the program and its arguments, what can be read from it."""

    key: str
    title: str
    args: tuple[str, ...]
    text: str = ""
    plot: str = ""
    codes: tuple[int, ...] = (0,)  # exit codes that leave a table

    @property
    def command(self) -> str:
        """As a reader would type it."""
        return "python -m " + " ".join([*self.args, *(["--plot", f"docs/{self.plot}"] if self.plot else [])])


SECTIONS = (
    Section("decode", "Prefill and decoding", ("benchmarks.bench_decode", UNSPLIT, "-r", "3", "--tests", DEPTHS)),
    Section("split", "The same with split `kv_b`", ("benchmarks.bench_decode", SPLIT, "-r", "3", "--tests", "tg128")),
    Section(
        "stages", "Stages", ("benchmarks.bench_stages", UNSPLIT, "--depths", "64,4096"), plot="roofline.svg",
        text="A stage's *calls* are those of a whole token. Sampling is measured among 102,400 logits; *of a token* is "
        "against this file's token, four layers of DeepSeek-V2-Lite's 27.",
    ),
    Section(
        "scaling", "Scaling", ("benchmarks.bench_scaling", UNSPLIT), plot="scaling.svg",
        text="Depths are visited in turn, so that a slow minute hits all alike.",
    ),
    Section("load", "Load", ("benchmarks.bench_load", UNSPLIT)),
    Section(
        "peers", "Beside llama.cpp",
        ("benchmarks.bench_peers", UNSPLIT, SPLIT, "-r", "3", "--tests", "pp128,tg32@d128,tg16@d2048"),
        text="Ratios are against the better of llama.cpp's settings of flash attention and of both layouts of `kv_b`.",
    ),
    Section("endurance", "Endurance", ("benchmarks.bench_endurance",), "The demo model.", codes=(0, 1)),
)  # fmt: skip


def run_section(section: Section, files: pathlib.Path, out: pathlib.Path, scratch: pathlib.Path) -> str:
    """Run one program; its title, command and table in Markdown.

    Raises
    ------
    RuntimeError
        The program failed.
    """
    table = scratch / f"{section.key}.md"
    args = [str(files / a) if a in (UNSPLIT, SPLIT) else a for a in section.args]
    args += ["--plot", str(out / section.plot)] if section.plot else []
    command = [sys.executable, "-W", "ignore", "-m", *args, "--to", str(table)]
    code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    if code not in section.codes or not table.exists():
        raise RuntimeError(f"{section.command} ended with {code}; what it said stands above")
    parts = [f"### {section.title}", f"```sh\n{section.command}\n```", section.text, table.read_text().strip()]
    parts += [f"![{section.title}]({section.plot})"] if section.plot else []
    return "\n\n".join(p for p in parts if p)


def between_marks(document: str, body: str) -> str:
    """The document with what stands between the marks replaced.

    Raises
    ------
    ValueError
        The marks are not there, once each and in order.
    """
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ValueError(f"expected {BEGIN} and then {END} in the document, once each")
    return f"{head}{BEGIN}\n\n{body}\n\n{END}{tail}"


def main(argv=None) -> int:
    """Command line; returns the exit status."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, default=ROOT / "docs", help="folder with benchmarks.md (docs)")
    p.add_argument("--files", type=pathlib.Path, help="folder where the model files are, or will be (a temporary one)")
    keys = [s.key for s in SECTIONS]
    p.add_argument("--only", choices=keys, action="append", help="may be repeated; the others are left out (all)")
    args = p.parse_args(argv)
    page = args.out / "benchmarks.md"
    document, start = page.read_text(encoding="utf-8"), time.perf_counter()
    between_marks(document, "")  # before the work
    wanted = [s for s in SECTIONS if s.key in (args.only or keys)]
    if importlib.util.find_spec("llama_cpp") is None and any(s.key == "peers" for s in wanted):
        p.error("llama-cpp-python is not installed; pip install 'tmla[bench]', or name sections with --only")
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        files = args.files or scratch
        for name, split in ((UNSPLIT, False), (SPLIT, True)):
            if not (files / name).exists():
                write_model(files / name, SHAPES["mid"].replace(split=split))
        tables = []
        for section in wanted:
            began = time.perf_counter()
            tables.append(run_section(section, files.resolve(), args.out.resolve(), scratch))
            print(f"{section.key}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    page.write_text(between_marks(document, "\n\n".join(tables)), encoding="utf-8")
    print(f"{page.name}: {len(tables)} tables in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
