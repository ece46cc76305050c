"""The documentation site: it builds without a warning, links and anchors hold, nothing on it comes from elsewhere."""

import html.parser
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from urllib.parse import unquote, urlparse

import pytest

import tmla
from tests.conftest import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the built site: the one that CI has built, or one built here."""
    if built := os.environ.get("TMLA_SITE"):
        return pathlib.Path(built)
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("mkdocs is not installed, expected in CI: pip install '.[docs]'")
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


class Page(html.parser.HTMLParser):
    """What a page defines, links to, and loads."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loads = set(), [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.ids |= {named[key] for key in ("id", "name") if named.get(key)}
        if tag == "a" and named.get("href"):
            self.links.append(named["href"])
        if tag in ("script", "img", "iframe", "source") and named.get("src"):
            self.loads.append(named["src"])
        if tag == "link" and named.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "dns-prefetch"):
            self.loads.append(named["href"])


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_document_is_a_page(site, pages):
    assert {p.stem for p in DOCS.glob("*.md")} <= {p.stem for p in pages if p.parent == site}
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    missing = [p.name for p in DOCS.glob("*.md") if f": {p.name}\n" not in nav]
    assert not missing, f"add {missing} to the nav of mkdocs.yml"


def test_links_and_anchors(site, pages):
    for path, page in pages.items():
        for link in page.links:
            url = urlparse(link)
            if url.scheme in ("https", "mailto"):
                continue
            assert not url.scheme, f"{path.name} links to {link}"
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            assert target.is_relative_to(site.resolve()), f"{path.name} links out of the site: {link}"
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.name} links to {link}"
            if url.fragment and target in pages:
                assert unquote(url.fragment) in pages[target].ids, f"{path.name} links to {link}: no such anchor"


def test_nothing_comes_from_elsewhere(site, pages):
    for path, page in pages.items():
        for source in page.loads:
            assert not urlparse(source).netloc, f"{path.name} loads {source}"
            assert (path.parent / unquote(urlparse(source).path)).exists(), f"{path.name} loads {source}"
    for sheet in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet.name


def test_the_public_names_are_on_it(site, pages):
    api = pages[site / "api.html"]
    for name in tmla.__all__:
        found = {f"tmla.{name}", f"tmla.errors.{name}", f"tmla.{name}.{name}", f"tmla.reference.{name}"}
        assert found & api.ids or name in ("__version__", "reference"), f"the API page lacks tmla.{name}"
    text = (site / "api.html").read_text(encoding="utf-8")
    assert "Metadata keys to replace or add" in text, "parameters of tmla.load"
    assert not re.findall(r":(?:func|class|meth):", text)


def test_pictures_stand_on_their_own():
    """Readable on a light and on a dark page, with nothing fetched."""
    pictures = sorted((DOCS / "img").glob("*.svg"))
    assert [p.name for p in pictures] == ["attention.svg", "data-flow.svg"]
    for picture in pictures:
        text = picture.read_text(encoding="utf-8")
        assert "prefers-color-scheme:dark" in text
        assert not re.findall(r"(?:href|src)=['\"]?(?!#)", text)
        assert picture.stat().st_size < 100_000
