"""Real text from Debian packages: a toy corpus that a laptop can download in seconds.

A source of kind ``debian`` names packages in `files`. They are downloaded once into a cache with
`apt-get`, which uses its own folders there: nothing is installed, the system's package lists stay
unchanged, and no special permissions are needed. The following contents of a package are used:
manual pages and HTML pages (without markup), dictionary entries, fortunes, licences, C headers, and
plain text of the documentation. ``python-stdlib`` stands for the sources of the running Python.

Documents are ordered by a hash of their names, so that a cap takes a sample of the whole package
rather than its alphabetical beginning.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

from nemo_rod.corpus.adapters.text_list import TextList
from nemo_rod.corpus.formats import Input
from nemo_rod.corpus.sources import SourceSpec, takes
from nemo_rod.lab.toy.roff import strip_roff

PYTHON = "python-stdlib"
_INSTEAD = "use recipe=toy_synthetic, which needs no packages"
_MAX_FILE_BYTES = 64_000  # a toy source of 0.7 MB should not be one file
_MIN_DOCUMENT_BYTES = 200  # anything shorter is a stub


@takes("files", "max_bytes")
def read_packages(spec: SourceSpec) -> list[Input]:
    """Returns the packages of a source of kind ``debian``, as one input."""
    return [debian_input(spec.files)]


def debian_input(packages: Sequence[str], cache_dir: Path | None = None) -> TextList:
    """Returns the documents of packages as one input.

    Raises:
        ValueError: the packages cannot be downloaded.
    """
    trees = fetch_debian_texts(
        cache_dir or default_cache_dir(), [name for name in packages if name != PYTHON]
    )
    labels = [json.loads((tree / "package.json").read_text()) for tree in trees]
    name = " ".join(label["file"] for label in labels)
    if PYTHON in packages:
        name = f"{name} {PYTHON}-{sysconfig.get_python_version()}".strip()
    return TextList(name, sum(label["bytes"] for label in labels), lambda: _texts(packages, trees))


def default_cache_dir() -> Path:
    """Returns ``$XDG_CACHE_HOME/nemo_rod/debian``, with ``~/.cache`` as the default base."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "nemo_rod" / "debian"


def fetch_debian_texts(cache_dir: Path, packages: Sequence[str]) -> list[Path]:
    """Downloads and unpacks the packages that the cache lacks.

    Returns:
        A folder for each package, in order, with its contents in ``tree`` and the name and size of
        the original file in ``package.json``.

    Raises:
        ValueError: a name is none of a package, apt-get or dpkg-deb is missing, or a package cannot
            be downloaded.
    """
    for name in packages:
        if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", name):  # no option, and no path
            raise ValueError(f"{name!r} is no name of a Debian package: correct `files`")
    missing = [name for name in packages if not (cache_dir / name / "package.json").is_file()]
    if not missing:
        return [cache_dir / name for name in packages]
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise ValueError(f"{tool} is missing, the toy texts are Debian packages: {_INSTEAD}")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as scratch:
        for file in _download(Path(scratch), missing):
            name = file.name.partition("_")[0]
            target = Path(scratch) / "unpacked" / name
            target.mkdir(parents=True)
            command = ["dpkg-deb", "-x", str(file), str(target / "tree")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = done.stderr.strip()
                raise ValueError(f"{file.name} cannot be unpacked ({reason}): {_INSTEAD}")
            label = {"file": file.name, "bytes": file.stat().st_size}
            (target / "package.json").write_text(json.dumps(label))
            if not (cache_dir / name).exists():
                target.rename(cache_dir / name)
    for name in missing:
        if not (cache_dir / name / "package.json").is_file():
            raise ValueError(f"apt-get has fetched no package {name!r}: {_INSTEAD}")
    return [cache_dir / name for name in packages]


def _download(scratch: Path, packages: Sequence[str]) -> list[Path]:
    for folder in ("state", "lists/partial", "cache/archives/partial", "debs"):
        (scratch / folder).mkdir(parents=True)
    (scratch / "status").touch()
    options = {
        "Dir::State": scratch / "state",
        "Dir::State::Lists": scratch / "lists",
        "Dir::State::Status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "Acquire::Languages": "none",
        "APT::Sandbox::User": "root",  # do not switch users
        "APT::Update::Post-Invoke": "",
        "APT::Update::Post-Invoke-Success": "",
    }
    arguments = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    for command in (["update"], ["download", "--", *packages]):
        done = subprocess.run(
            ["apt-get", "-qq", *arguments, *command],
            cwd=scratch / "debs",
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        # "update" also fails because of lists that are not needed; only the download matters.
        if done.returncode and command[0] == "download":
            lines = (done.stderr.strip() or "no message").splitlines()
            raise ValueError(f"apt-get cannot fetch the toy texts ({lines[-1]}): {_INSTEAD}")
    return sorted((scratch / "debs").glob("*.deb"))


# at the beginning of C headers, which mostly repeat the same licence
_COMMENTS = re.compile(r"\A(\s*/\*.*?\*/|\s*//[^\n]*\n)+\s*", flags=re.DOTALL)
_Named = tuple[str, Callable[[], str]]  # a document's name, and a function that returns its text


def _texts(packages: Sequence[str], trees: Iterable[Path]) -> Iterator[str]:
    documents: list[_Named] = []
    for tree in trees:
        documents += _package_texts(tree / "tree")
    if PYTHON in packages:
        skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        skipped |= {"encodings", "pydoc_data", "lib2to3", "__phello__"}  # tables, grammars, stubs
        stdlib = Path(sysconfig.get_path("stdlib"))
        for path in sorted(stdlib.rglob("*.py")):
            parts = path.relative_to(stdlib).parts
            if skipped.isdisjoint(parts) and path.stat().st_size <= _MAX_FILE_BYTES:
                documents.append(("/".join(parts), partial(_read, path)))
    documents.sort(key=lambda item: hashlib.blake2b(item[0].encode()).digest())
    for _, read in documents:
        text = read()
        if len(text.encode("utf-8")) >= _MIN_DOCUMENT_BYTES:
            yield text


def _package_texts(tree: Path) -> Iterator[_Named]:
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree).as_posix()
        if path.is_symlink() or not path.is_file():
            continue
        if name.startswith("usr/share/man/"):
            yield name, partial(_text, path, strip_roff)
        elif name.endswith(".dict.dz"):
            # entries: a headword in the first column, followed by indented lines
            entries = re.split(rb"\n(?=[^\s])", gzip.decompress(path.read_bytes()))
            yield from ((f"{n:07d}", partial(_entry, entry)) for n, entry in enumerate(entries))
        elif name.endswith(".h") and path.stat().st_size <= _MAX_FILE_BYTES:
            yield name, partial(_text, path, partial(_COMMENTS.sub, ""))
        elif name.startswith("usr/share/games/fortunes/") and not path.suffix:
            for number, saying in enumerate(_read(path).split("\n%\n")):
                yield f"{name}:{number:05d}", partial(str, saying.strip("%\n"))
        elif name.endswith(".html"):
            yield name, partial(_text, path, _web_page)
        elif name.startswith("usr/share/common-licenses/") or (
            name.startswith("usr/share/doc/") and name.endswith(".txt")
        ):
            yield name, partial(_text, path)


def _entry(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return ""  # a few entries hold stray bytes
    if not re.match(r"[^\n\\]+ \\", text):
        return ""  # no headword with pronunciation: part of the preface
    # Every entry ends with a note on its origin.
    text = re.sub(r"\n *\[[^]\n]*(Webster|WordNet|PJC|Century)[^]\n]*\](?=\n|$)", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _web_page(text: str) -> str:
    """Returns the paragraphs, headings, list items and listings of an HTML page, one a line."""
    page = _Paragraphs()
    page.feed(text)
    page.close()
    return "\n\n".join(page.paragraphs)


class _Paragraphs(HTMLParser):
    """Collects the text of elements that hold prose; menus and scripts hold it in others."""

    _HELD = ("p", "h1", "h2", "h3", "h4", "h5", "li", "dt", "dd", "pre")

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._open: str | None = None
        self._text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Begins a paragraph, which also ends the one around it."""
        if tag in self._HELD:
            self._end()
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        """Ends a paragraph."""
        if tag in self._HELD:
            self._end()

    def handle_data(self, data: str) -> None:
        """Adds text to the open paragraph."""
        if self._open:
            self._text.append(data)

    def close(self) -> None:
        """Ends the last paragraph, which a page may leave open."""
        super().close()
        self._end()

    def _end(self) -> None:
        text = "".join(self._text)
        text = text.strip("\n") if self._open == "pre" else " ".join(text.split())
        if text.strip():
            self.paragraphs.append(text)
        self._open, self._text = None, []


def _text(path: Path, interpret: Callable[[str], str] = str) -> str:
    return interpret(_read(path))[:_MAX_FILE_BYTES]


def _read(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="replace")
