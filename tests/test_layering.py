"""The package's structure: who may import whom, what may print, where kernels live, how long a file may grow."""

import ast
import graphlib
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tmla"
MAX_LINES = 350  # of about 250: above, a file holds two concerns

_FILE = "errors gguf_kind gguf_file"  # what every reader of a model file needs

# Module -> the modules of the package that it may import. "stages.*" are all stages: a stage takes fields and numbers,
# so it knows the backend and other stages, and nothing of files, configurations or models.
TABLE = {
    "errors": "",
    "gguf_kind": "",
    "gguf_cursor": "errors gguf_kind",
    "gguf_override": "errors gguf_kind",
    "gguf_scan": "errors gguf_kind gguf_cursor",
    "gguf_file": "errors gguf_kind gguf_override gguf_scan",
    "keys": "errors gguf_kind",
    "config_ffn": "keys",
    "config_rope": "keys",
    "config_read": "errors gguf_kind keys config_ffn config_rope",
    "rope": "",
    "tensors": "errors gguf_kind",
    "tensor_check": "errors gguf_kind tensors",
    "config": f"{_FILE} config_read rope tensors tensor_check",
    "requantize": f"{_FILE} tensor_check tensors config",
    "requantize_report": f"{_FILE} config requantize",
    "reference_weights": f"{_FILE} requantize",
    "reference": f"{_FILE} config rope requantize reference_weights",
    "memory": "errors",
    "vulkan_device": "",
    "quiet": "",
    "excerpts": "",
    "runtime": "errors vulkan_device quiet excerpts",
    "fields": "errors runtime",
    "stages.*": "runtime stages.*",
    "layer": "runtime stages.*",
    "layer_stages": "runtime stages.*",
    "plan": "errors config runtime fields stages.*",
    "upload": f"{_FILE} runtime stages.*",
    "weights": f"{_FILE} config requantize tensor_check plan upload runtime fields stages.*",
    "state": "config runtime fields stages.* upload",
    "pretokenizers": "errors",
    "text": "",
    "vocabulary": "errors gguf_kind pretokenizers",
    "spm": "vocabulary",
    "tokenizer": "errors text pretokenizers vocabulary spm",
    "chunk_state": "config runtime fields stages.*",
    "limits": "errors config memory runtime fields stages.* plan chunk_state state",
    "prefill": "chunk_state runtime stages.*",
    "bench_env": "",
    "bench_result": "bench_env",
    "bench_facts": "config",
    "bench_profile": "errors config runtime layer_stages stages.* bench_result",
    "atomic": "",
    "state_file": "errors gguf_kind atomic",
    "cache_copy": "runtime upload",
    "saved_state": f"{_FILE} config cache_copy state_file",
    "model": f"{_FILE} config runtime fields stages.* chunk_state layer plan prefill weights upload state tokenizer"
    " saved_state bench_profile",
    "loading": f"{_FILE} config requantize runtime limits model tokenizer",
    "sampling": "errors",
    "bench_sampling": "sampling",
    "bench": "stages.* model bench_facts bench_result",
    "stops": "errors",
    "generate": "errors sampling stops",
    "sandbox": "errors",
    "template": "errors sandbox",
    "chat": "errors text tokenizer template generate",
    "info": f"{_FILE} config memory limits plan",
    "check_weights": f"{_FILE} config plan stages.*",
    "check_layer": f"{_FILE} config runtime stages.* layer weights state check_weights",
    "check_shapes": f"{_FILE} config runtime fields stages.* layer plan weights upload state check_weights check_layer",
    "check_extent": f"{_FILE} config check_weights",
    "check": f"{_FILE} config requantize runtime stages.* layer loading model reference"
    " check_weights check_layer check_shapes check_extent",
    "log_probs": "",
    "logits_file": "errors gguf_kind atomic",
    "perplexity": "errors log_probs logits_file",
    "compare": "errors log_probs logits_file",
    "": "errors reference loading model generate chat perplexity compare",  # `import tmla`: the public names
    "cli_terminal": "",
    "doctor_device": "vulkan_device",
    "doctor_machine": "memory",
    "doctor_kernels": "stages.*",
    "doctor_probe": "errors memory runtime fields stages.* upload doctor_device doctor_kernels",
    "doctor_process": "",
    "doctor": "doctor_process",
    "cli_probe": "errors runtime doctor_probe doctor_process cli_terminal",
    "cli_doctor": "doctor doctor_machine cli_terminal .",
    "cli_completion": "errors cli_terminal",
    "cli_check": "errors check cli_terminal",
    "cli_prompt_cache": f"{_FILE} model generate info state_file cli_terminal",
    "cli_run": f"{_FILE} config requantize requantize_report tokenizer loading model sampling stops generate info"
    " cli_terminal cli_prompt_cache",
    "cli_bench": "errors runtime bench bench_env bench_facts bench_profile bench_result bench_sampling cli_terminal"
    " cli_run",
    "cli_template": f"{_FILE} requantize tokenizer chat cli_terminal",
    "cli_conversation": "state_file",
    "cli_chat": f"{_FILE} requantize tokenizer model sampling stops generate chat info state_file cli_terminal cli_run"
    " cli_template cli_conversation",
    "cli_perplexity": f"{_FILE} requantize tokenizer perplexity cli_terminal cli_run cli_template",
    "cli_compare": "compare logits_file cli_terminal cli_run",
    "cli": f"{_FILE} config runtime limits loading requantize requantize_report info cli_terminal cli_run cli_check"
    " cli_chat cli_template cli_bench cli_completion cli_perplexity cli_compare doctor cli_doctor"
    " .",  # the package itself, for its version
    "__main__": "cli",
}


def _name(path):
    """Module name without the package's: "" for tmla/__init__.py, "stages" for tmla/stages/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}


def imports(name, tree):
    """Modules of the package that a module imports, also those it imports within a function; "." is the package."""
    package = ["tmla", *name.split(".")] if SOURCES[name].name == "__init__.py" else ["tmla", *name.split(".")[:-1]]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            modules = [f"{base}.{alias.name}" for alias in node.names]
            found |= {m if m.removeprefix("tmla.") in SOURCES else base for m in modules}
    return {m.removeprefix("tmla").removeprefix(".") or "." for m in found if m.split(".")[0] == "tmla"}


def is_stage(name):
    return name.split(".")[0] == "stages"


def allowed(name):
    """Modules that a module may import, the wildcard written out."""
    stages = {m for m in SOURCES if is_stage(m)}
    row = TABLE["stages.*" if is_stage(name) else name].split()
    return set().union(*(stages if entry == "stages.*" else {entry} for entry in row))


def test_every_module_is_in_the_table():
    missing = {name for name in SOURCES if not is_stage(name)} - set(TABLE)
    assert not missing, f"add {sorted(missing)} to the table of tests/test_layering.py, below what they import"


def test_the_table_goes_downwards():
    """Each row stands below all that it names, so the table itself shows that there are no circles."""
    above = {".", "stages.*"}
    for name in TABLE:
        assert set(TABLE[name].split()) <= above, f"{name} stands above {sorted(set(TABLE[name].split()) - above)}"
        above.add(name)


def test_there_are_no_circles():
    graph = {name: imports(name, tree) - {"."} for name, tree in TREES.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_imports_only_what_it_may(name):
    extra = imports(name, TREES[name]) - allowed(name)
    assert not extra, f"tmla.{name} imports {sorted(extra)}, which the table does not allow"


def test_imports_are_found():
    """The finder itself: absolute, relative, of names, of modules, inside functions."""
    text = "import tmla\nimport numpy\nfrom tmla import layer, load\nfrom .errors import TmlaError\n"
    text += "def f():\n    from tmla.stages.norm import rms_norm\n    from . import memory\n"
    assert imports("model", ast.parse(text)) == {".", "layer", "errors", "stages.norm", "memory"}
    assert imports("stages.norm", ast.parse("from . import rope\nfrom ..errors import TmlaError")) == {
        "stages.rope",
        "errors",
    }


def _calls(tree):
    return [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("name", [name for name in SOURCES if not name.startswith("cli")])
def test_only_the_command_line_prints(name):
    assert not {"print", "sys.stdout.write", "sys.stderr.write"} & set(_calls(TREES[name]))


@pytest.mark.parametrize("name", SOURCES)
def test_no_error_is_swallowed(name):
    """No `except Exception`; what catches everything must raise it again."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "BaseException"
            assert caught != "Exception", f"line {node.lineno}: except Exception"
            assert caught != "BaseException" or ast.unparse(node.body[-1]) == "raise", f"line {node.lineno}"


def _defines_kernels(tree):
    decorators = [d for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for d in node.decorator_list]
    return any(ast.unparse(d) in ("ti.func", "ti.kernel") for d in decorators)


def test_kernels_live_in_few_places():
    homes = {name for name, tree in TREES.items() if _defines_kernels(tree)}
    others = {name for name in homes if not name.startswith("stages.")}
    assert others <= {"layer", "upload", "cache_copy", "runtime", "doctor_kernels"}, (
        "stages, their composition, copies, questions"
    )
    assert {"stages.norm", "stages.attention", "layer"} <= homes


@pytest.mark.parametrize("name", [name for name, tree in TREES.items() if _defines_kernels(tree)])
def test_no_future_annotations_beside_kernels(name):
    """Taichi reads the annotations as objects, not as text."""
    futures = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    assert not futures


@pytest.mark.parametrize("name", SOURCES)
def test_files_stay_short(name):
    n_lines = len(SOURCES[name].read_text(encoding="utf-8").splitlines())
    assert n_lines <= MAX_LINES, f"{SOURCES[name].name} has {n_lines} lines; split it by concern, not by backend"


def _fresh(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_import_starts_no_backend_and_prints_nothing():
    code = "import tmla\nimport taichi as ti\nassert ti.lang.impl.get_runtime().prog is None, 'Taichi was started'"
    done = _fresh(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_started_backend_is_noticed():
    """The test above can fail."""
    code = "import tmla.runtime\ntmla.runtime.init('cpu')\nimport taichi as ti\n"
    done = _fresh(code + "assert ti.lang.impl.get_runtime().prog is not None")
    assert (done.returncode, done.stdout) == (0, "")
