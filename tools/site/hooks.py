"""Hooks of the documentation site: the documents are written for GitHub, and read as well here.

- A link out of `docs/` (``../tmla/layer.py``) leads to a page that shows that file or lists that folder: the site is
  whole by itself, and a link to what does not exist fails the build.
- ``<!-- api: tmla.load tmla.chat=tmla.chat.chat -->`` becomes what mkdocstrings makes of these names, under the name
  before the equals sign; on GitHub it is invisible.
- ``:func:`load` `` in a docstring loses its role, which Markdown does not know.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SOURCE = "source"  # folder of the generated pages
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)(?=[)#])")
API = re.compile(r"^<!-- api: (.*?) -->$", re.M)
ROLE = re.compile(r":(?:func|class|meth|mod|attr):(?=<code>)")
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", "": "sh"}


def on_files(files: Files, config: Any) -> Files:
    """Make a page of every file and folder of the repository that a document links to."""
    pages = files.documentation_pages()
    for target in sorted({_resolve(p.src_uri, link) for p in pages for link in LINK.findall(p.content_string)}):
        if (ROOT / target).exists():
            files.append(File.generated(config, _uri(target), content=_page(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links out of the documents, and the lists of names of the API."""
    here = page.file.src_uri
    if not here.startswith(SOURCE + "/"):
        markdown = LINK.sub(lambda m: _relative(here, _resolve(here, m[1])), markdown)
    return API.sub(lambda m: "\n\n".join(_documented(*name.split("=")) for name in m[1].split()), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Take the roles out of the docstrings."""
    return ROLE.sub("", html)


def _documented(shown: str, path: str | None = None) -> str:
    return f"::: {path or shown}\n    options:\n      heading: {shown}"


def _resolve(here: str, link: str) -> str:
    """Path in the repository of a link in ``docs/HERE``."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(here), link))


def _relative(here: str, target: str) -> str:
    return posixpath.relpath(_uri(target), posixpath.dirname(here) or ".")


def _uri(target: str) -> str:
    return f"{SOURCE}/{target}.md"


def _page(target: str) -> str:
    """A page that shows a file of the repository, or lists a folder."""
    path = ROOT / target
    if path.is_dir():
        names = sorted(p.name + "/" * p.is_dir() for p in path.iterdir() if not p.name.startswith(("_", ".")))
        return f"# {target}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = LANGUAGES.get(path.suffix, "text")
    return f"# {target}\n\n`````{language}\n{path.read_text(encoding='utf-8')}`````\n"
