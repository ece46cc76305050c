"""Public names: typed, and documented in numpydoc: parameters, what is returned, what is raised."""

import ast
import dataclasses
import inspect
import re
import textwrap

import pytest

import tmla
from tmla import errors, gguf_file, reference, runtime
from tmla.chat import ChatTemplate, Session, stream_chat
from tmla.compare import Comparison
from tmla.config import MLAConfig, open_checked
from tmla.generate import Chunk, Stats
from tmla.loading import demo_path
from tmla.perplexity import Perplexity
from tmla.sampling import Sampler
from tmla.tokenizer import Tokenizer

CLASSES = [
    tmla.Model,
    ChatTemplate,
    Session,
    MLAConfig,
    Chunk,
    Stats,
    Comparison,
    Perplexity,
    gguf_file.GGUFFile,
    reference.Trace,
    runtime.Caps,
    Sampler,
    Tokenizer,
]
FUNCTIONS = [
    *(f for f in (getattr(tmla, name) for name in tmla.__all__) if inspect.isfunction(f)),
    stream_chat,
    open_checked,
    gguf_file.open_gguf,
    reference.logits,
    reference.trace,
    runtime.caps,
    runtime.init,
    demo_path,
]
ERRORS = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, Exception)]


def callables():
    """Every public function and method, with its name; a class stands for its ``__init__``."""
    for f in FUNCTIONS:
        yield f"{f.__module__}.{f.__name__}", f, f.__doc__
    for c in CLASSES:
        if "__init__" in vars(c) and not dataclasses.is_dataclass(c):
            yield f"{c.__module__}.{c.__name__}", c.__init__, c.__doc__
        for name, member in vars(c).items():
            member = getattr(member, "__func__", getattr(member, "fget", member))
            if inspect.isfunction(member) and (not name.startswith("_") or name == "__call__"):
                yield f"{c.__module__}.{c.__name__}.{name}", member, member.__doc__


CALLABLES = {name: (f, inspect.cleandoc(doc or "")) for name, f, doc in callables()}


def section(doc, title):
    """Text of a numpydoc section, or nothing."""
    found = re.search(rf"^{title}\n-+\n(.*?)(?=^\w[\w ]*\n-+$|\Z)", doc, re.M | re.S)
    return found[1] if found else ""


def named(doc, title):
    """Names that a section defines: ``a, b : type`` is two."""
    heads = re.findall(r"^(\S.*)$", section(doc, title), re.M)
    return {name.strip("* ") for head in heads for name in head.partition(" : ")[0].split(",")}


def parameters(f):
    return [p for p in inspect.signature(f).parameters.values() if p.name not in ("self", "cls")]


def raised(f):
    """Names of the errors that the function's own lines raise."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(f)))
    calls = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    return {ast.unparse(call.func) for call in calls}


def test_the_list_is_whole():
    public = {getattr(tmla, name) for name in tmla.__all__ if not name.startswith("__")}
    assert public - set(FUNCTIONS) - set(CLASSES) - set(ERRORS) == {reference}
    assert {e.__name__ for e in ERRORS} <= set(tmla.__all__)
    assert len(CALLABLES) > 60


@pytest.mark.parametrize("name", CALLABLES)
def test_typed(name):
    f, _ = CALLABLES[name]
    missing = [p.name for p in parameters(f) if p.annotation is inspect.Parameter.empty]
    assert not missing, f"{name}: {missing} have no type"
    if f.__name__ != "__init__":
        assert inspect.signature(f).return_annotation is not inspect.Signature.empty, f"{name}: returns what?"


@pytest.mark.parametrize("name", CALLABLES)
def test_documented(name):
    f, doc = CALLABLES[name]
    summary = doc.partition("\n")[0]
    assert summary.endswith("."), f"{name}: the first line is {summary!r}, expected a sentence"
    names = [p.name for p in parameters(f)]
    if re.search("Made by :func:|arameters(?: and errors)? as (?:of|for)|same parameters", doc):
        names = []  # another docstring has them
    if section(doc, "Parameters") or len(names) > 2:
        missing = set(names) - named(doc, "Parameters")
        assert not missing, f"{name}: Parameters lacks {missing}"
        assert named(doc, "Parameters") <= set(names) | _more(f), f"{name}: Parameters has names of no parameter"
    else:  # a sentence may say it all
        missing = {n for n in names if f"`{n}`" not in doc}
        assert not missing, f"{name}: says nothing about {missing}"
    missing = {e for e in raised(f) if e not in doc}
    assert not missing, f"{name}: raises {missing} without saying so"


def _more(f):
    """A function that takes ``**parameters`` may document what goes there."""
    takes = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters(f))
    return {n for n in named(inspect.getdoc(f) or "", "Parameters")} if takes else set()


@pytest.mark.parametrize("name", [name for name in CALLABLES if not isinstance(name, property)])
def test_says_what_is_returned(name):
    f, doc = CALLABLES[name]
    hint = inspect.signature(f).return_annotation
    if f.__name__ == "__init__" or hint in (None, "None") or not section(doc, "Parameters"):
        return
    summary = doc.partition("\n")[0]
    verbs = ("Return", "Say", "Generate", "Answer", "Choose", "Read", "Open", "Template", "Start")
    assert section(doc, "Returns") or section(doc, "Yields") or summary.startswith(verbs), f"{name}: returns what?"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_attributes_of_classes(kind):
    """Fields of a dataclass are explained in the docstring or behind the field; other attributes in Attributes."""
    doc = inspect.cleandoc(kind.__doc__)
    if dataclasses.is_dataclass(kind):
        source = inspect.getsource(kind)
        for f in dataclasses.fields(kind):
            explained = f.name in named(doc, "Attributes") or re.search(rf"^    {f.name}: .*", source, re.M)
            assert explained, f"{kind.__name__}.{f.name} is not explained"
        return
    for attribute in named(doc, "Attributes"):
        assert re.match(r"\w+$", attribute), f"{kind.__name__}: attribute {attribute!r}"


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_errors_say_when(error):
    assert len(error.__doc__) > 40
    assert issubclass(error, tmla.TmlaError)


@pytest.mark.parametrize(
    "doc", ["", "No full stop", "F.\n\nParameters\n----------\na : int\n", "F.\n\nParameters\n----------\nb, a : int\n"]
)
def test_the_rules_can_fail(doc):
    def f(a, b, c):
        raise tmla.ContextError("x")

    CALLABLES["f"] = (f, doc)
    try:
        with pytest.raises(AssertionError):
            test_documented("f")
        with pytest.raises(AssertionError):
            test_typed("f")
    finally:
        del CALLABLES["f"]
