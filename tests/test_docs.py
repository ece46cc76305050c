"""The documents: links and files exist, code runs, commands and options are those of the package."""

import ast
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import tmla
from tmla import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
README = TEXTS["README.md"]
TESTS = "pip install '.[dev]' && python -m pytest"
PAGES = [
    "index",
    "mla",
    "stages",
    "gguf",
    "backends",
    "log",
    "benchmarks",
    "api",
    "commands",
    "examples",
    "numerics",
    "troubleshooting",
    "porting",
    "saved_state",
    "comparing",
]
COMMANDS = ("run", "chat", "info", "check", "template", "perplexity", "compare", "doctor", "completion", "bench")
FOLDERS = "tmla|tests|benchmarks|docs|tools|\\.ci|\\.github"


def blocks(text, language):
    """Fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def outside_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def test_the_documents_are_there():
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= set(NAMES)
    assert {f"docs/{name}.md" for name in PAGES} <= set(NAMES)
    assert "MIT License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_links(name):
    links = re.findall(r"\]\(([^)\s]+)\)", outside_blocks(TEXTS[name]))
    for link in links:
        if link.startswith(("https://", "#")):
            continue
        assert "://" not in link, link
        target = (ROOT / name).parent / link.partition("#")[0]
        assert target.exists(), f"{name} links to {link}"
        assert target.resolve().is_relative_to(ROOT), f"{link} leaves the repository"


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_named_exist(name):
    for path in re.findall(rf"`((?:{FOLDERS})/[\w./*-]+)`", TEXTS[name]):
        assert list(ROOT.glob(path.rstrip("/"))), f"{name} names {path}"
    for path in re.findall(r"(?<=[| ])`(\w+\.py)`", TEXTS[name]):
        assert list((ROOT / "tmla").rglob(path)), f"{name} names {path}"


def test_every_stage_is_in_its_document():
    shared = {"__init__"}
    stages = {path.stem for path in (ROOT / "tmla" / "stages").glob("*.py")} - shared
    missing = {s for s in stages if not any(f"{stem}.py" in TEXTS["docs/stages.md"] for stem in (s, s.split("_")[0]))}
    assert not missing, f"docs/stages.md does not mention {sorted(missing)}"


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_compile(name):
    for code in blocks(TEXTS[name], "python"):
        ast.parse(code)


def test_the_readme_example_runs(tmp_path):
    code = "\n".join(blocks(README, "python"))
    assert "tmla.load(" in code
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error::SyntaxWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 20


def test_the_two_commands():
    shell = [line for block in blocks(README, "sh") for line in block.splitlines() if line.startswith("pip install")]
    assert len(shell) == 2, "one that installs and runs the main job, one that installs and runs the tests"
    assert "tmla run " in shell[0]
    assert shell[1] == TESTS
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(part in ci for part in ("pip install -qq '.[dev]'", "python -m pytest"))
    assert f"- run: {TESTS}\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_modules_that_are_run_exist(name):
    for module in re.findall(r"python -m ([\w.]+)", TEXTS[name]):
        assert importlib.util.find_spec(module.rstrip(".")), f"{name} runs {module}"


def _options(capsys, command):
    assert cli.main([command, "--help"]) == 0
    return set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", capsys.readouterr().out))


@pytest.mark.parametrize("name", NAMES)
def test_options_exist(name, capsys):
    """Options in `tmla COMMAND ...`, and in the README's table of commands."""
    known = {command: _options(capsys, command) for command in COMMANDS}
    for command, rest in re.findall(r"tmla (\w+) ([^`\n&]*)", TEXTS[name]):
        if command in known:
            assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)) <= known[command], f"tmla {command} {rest}"
    for command, row in re.findall(r"^\| `tmla (\w+) .*?` \| (.*) \|$", TEXTS[name], re.M):
        assert set(re.findall(r"`(--?[a-z][\w-]*)", row)) <= known[command]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_page_of_commands(command, capsys):
    page = TEXTS["docs/commands.md"]
    assert f"](#tmla-{command})" in page or f"| [`tmla {command}`](#" in page, "a row in the table, a section for it"
    missing = {o for o in _options(capsys, command) - {"--help", "-h"} if not re.search(rf"`{o}[ `]", page)}
    assert not missing, f"docs/commands.md lacks {sorted(missing)} of tmla {command}"


def test_exit_codes_and_variables_are_in_the_page_of_commands():
    page = TEXTS["docs/commands.md"]
    codes = re.findall(r"^  (\d+) ", cli._EXIT_CODES, re.M)
    assert codes == re.findall(r"^\| (\d+) \|", page, re.M)
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tmla").rglob("*.py"))
    for variable in set(re.findall(r"[\"'](TMLA_[A-Z_]+)[\"']", sources)):
        assert f"`{variable}" in page, f"docs/commands.md does not say what {variable} does"


def test_every_command_is_in_the_readme(capsys):
    assert cli.main(["--help"]) == 0
    commands = re.findall(r"^    (\w+)(?: |$)", capsys.readouterr().out, re.M)
    assert set(COMMANDS) == set(commands)
    for command in commands:
        assert f"`tmla {command} " in README, f"the README's table lacks tmla {command}"


@pytest.mark.parametrize("name", NAMES)
def test_names_of_the_public_api_exist(name):
    for dotted in re.findall(r"`tmla\.([\w.]+?)(?:\(.*?\))?`", TEXTS[name]):
        assert _exists(dotted.split(".")), f"{name} names tmla.{dotted}"


def _exists(parts):
    """A name of the package, or of one of its modules, also where a function has the module's name (``tmla.chat``)."""
    for n in range(len(parts), -1, -1):
        module = sys.modules.get(".".join(["tmla", *parts[:n]]))
        target = module
        for part in parts[n:]:
            target = getattr(target, part, None)
        if module is not None and target is not None:
            return True
    return False


def test_a_name_that_is_not_there_is_noticed():
    assert _exists(["chat", "Session"])
    assert _exists(["Model", "decode"])
    assert not _exists(["chat", "Seance"])
    assert not _exists(["forward"])


def test_version_and_dependencies():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == tmla.__version__
    assert f"## {tmla.__version__}" in TEXTS["CHANGELOG.md"]
    declared = set()
    for entry in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        declared.add(re.match(r"[\w-]+", entry)[0])
    own = {"tmla", "tests", "benchmarks", "tools"}
    optional = {"llama_cpp", "matplotlib", "transformers", "torch", "rich", "tomllib"}  # skipped where they are absent
    for path in [*(ROOT / "tmla").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {name.split(".")[0] for name in names} - own - optional - set(sys.stdlib_module_names):
                assert top in declared, f"{path.relative_to(ROOT)} imports {top}, which pyproject.toml does not declare"
