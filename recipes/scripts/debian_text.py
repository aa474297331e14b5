"""Real text from Debian packages: a toy corpus that a laptop can download in seconds.

    man_de: {role: adaptation, kind: "recipe/scripts/debian_text.py:read_packages", files: [...]}

The source names packages in `files`. They are downloaded once into a cache with
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
from nemo_rod.lab.text import user_cache

PYTHON = "python-stdlib"
_INSTEAD = "use recipe=toy_synthetic, which needs no packages"
_MAX_FILE_BYTES = 64_000  # a toy source of 0.7 MB should not be one file
_MIN_DOCUMENT_BYTES = 200  # anything shorter is a stub


@takes("files", "max_bytes")
def read_packages(spec: SourceSpec) -> list[Input]:
    """Returns the packages of a source as one input."""
    return [debian_input(spec.files)]


def debian_input(packages: Sequence[str], cache_dir: Path | None = None) -> TextList:
    """Returns the documents of packages as one input.

    Raises:
        ValueError: the packages cannot be downloaded.
    """
    names = [name for name in packages if name != PYTHON]
    trees = fetch_debian_texts(cache_dir or user_cache() / "debian", names)
    labels = [json.loads((tree / "package.json").read_text()) for tree in trees]
    name = " ".join(label["file"] for label in labels)
    if PYTHON in packages:
        name = f"{name} {PYTHON}-{sysconfig.get_python_version()}".strip()
    return TextList(name, sum(label["bytes"] for label in labels), lambda: _texts(packages, trees))


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


# Manual pages as prose: roff markup is stripped, words, paragraphs and examples stay. This is not a
# typesetter; it interprets the `man` macros that real pages use. What needs one (tables, macro
# definitions, conditionals) is omitted, and pages in the other dialect (`mdoc`) yield no text.
# Terminal sessions are omitted, too: they are the same on the pages of every language.

# Sections that are identical on every page of a language and teach a model only themselves.
_BOILERPLATE = {
    *("ÜBERSETZUNG", "TRADUCTION", "TRADUCCIÓN", "TŁUMACZENIE"),
    *("COPYRIGHT", "PRAWA AUTORSKIE", "DERECHOS DE AUTOR", "COLOPHON"),
    *("FEHLER MELDEN", "SIGNALER DES BOGUES", "ZGŁASZANIE BŁĘDÓW", "INFORMAR DE ERRORES"),
    *("REPORTING BUGS", "VERFÜGBARKEIT", "DISPONIBILITÉ", "DOSTĘPNOŚĆ", "DISPONIBILIDAD"),
    "AVAILABILITY",
}
_SPECIAL = {
    "aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "bu": "•", "en": "–",
    "em": "—", "hy": "-", "mi": "-", "ha": "^", "ti": "~", "rs": "\\", "at": "@", "co": "©",
    "rg": "®", "tm": "™", "ga": "`", "aa": "´", "sl": "/", "bv": "|", "or": "|", "ba": "|",
    "de": "°", "+-": "±", "mu": "×", ">=": "≥", "<=": "≤", "!=": "≠", "->": "→", "<-": "←",
    "ra": "⟩", "la": "⟨", "sc": "§", "mc": "µ", "*m": "μ", "*p": "π", "if": "∞", "is": "∫",
    "pd": "∂", "Fo": "«", "Fc": "»", "S1": "¹", "S2": "²", "12": "½", "14": "¼", "34": "¾",
    "lB": "[", "rB": "]", "lC": "{", "rC": "}", "sh": "#", "Do": "$", "eq": "=", "pl": "+",
    "*W": "Ω", "*b": "β", "*a": "α", "dg": "†", "fm": "′", "sd": "″", ":a": "ä", ":o": "ö",
    ":u": "ü", ":A": "Ä", ":O": "Ö", ":U": "Ü", "ss": "ß", "'e": "é", "'a": "á", "`a": "à",
}  # fmt: skip
_ESCAPE = re.compile(
    r"\\(?:"
    r"[fFmMg](?:\[[^]]*\]|\(..|.)"  # fonts and colours
    r"|s[+-]?(?:\[[^]]*\]|'[^']*'|\(?\d{1,2})"  # sizes
    r"|[hvwDLlbxZRHSN]'[^']*'"  # motions and drawings
    r"|[kno][+-]?(?:\[[^]]*\]|\(..|.)"  # registers
    r"|\*(?:\[(?P<string>[^]]*)\]|\((?P<pair>..)|(?P<one>.))"
    r"|\[(?P<long>[^]]*)\]"
    r"|\((?P<short>..)"
    r"|(?P<char>.)"
    r"|$)"
)
_CHAR = {"-": "-", "e": "\\", "\\": "\\", "E": "\\", "~": " ", " ": " ", "0": " ", "'": "'",
         "`": "`", ".": ".", "t": "\t", '"': ""}  # fmt: skip
_WORD = re.compile(r'"((?:[^"]|"")*)"?|((?:\\ |\S)+)')
_JOINED = {"BR", "RB", "BI", "IB", "IR", "RI"}  # alternating fonts: no space between the words
_SPACED = {"B", "I", "SM", "SB", "R", "CW"}
_BREAKS = {"PP", "P", "LP", "IP", "TP", "TQ", "HP", "sp", "Sp", "RS", "RE", "br", "EX", "EE"}
_PROMPT = re.compile(r"^\s*[$#%]\s", flags=re.MULTILINE)
_SKIPPED = {"TS": "TE", "EQ": "EN", "PS": "PE", "de": ".", "am": ".", "ig": ".", "de1": "."}


def strip_roff(source: str) -> str:
    """Returns the text of a manual page in roff.

    It has headings, paragraphs separated by empty lines, and examples with their line breaks; it is
    "" if the page only refers to another one or is written in `mdoc`.
    """
    if re.search(r"^\.(so|Dd|Sh)\b", source, flags=re.MULTILINE):
        return ""
    page, until, depth = _Page(), None, 0
    for line in source.split("\n"):  # outside comments, definitions, tables and conditional blocks
        if until is not None:
            if line.rstrip() in ("." + until, "'" + until):
                until = None
            continue
        if depth or re.match(r"[.']\s*(do\s+)?(if|ie|el|while)\b", line):
            # Drop blocks in braces regardless of their conditions, which test the output device.
            depth = max(0, depth + line.count("\\{") - line.count("\\}"))
            continue
        line = re.sub(r"(?<!\\)((?:\\\\)*)\\[\"#].*", r"\1", line)
        request = re.match(r"[.']\s*(\w+)", line)
        if request and request[1] in _SKIPPED:
            until = _SKIPPED[request[1]]
        elif request or (line.strip() and line[0] not in ".'") or line == "":
            page.add(line)
    return page.text()


class _Page:
    """Collects paragraphs."""

    def __init__(self) -> None:
        self._paragraphs: list[str] = []
        self._lines: list[str] = []
        self._literal = False
        self._skip_section = False
        self._glue = False

    def add(self, line: str) -> None:
        """Adds one visible input line."""
        if line[:1] not in (".", "'"):
            self._add_text(line)
            return
        name, _, rest = line[1:].lstrip().partition(" ")
        arguments = [bare or quoted.replace('""', '"') for quoted, bare in _WORD.findall(rest)]
        if name in ("SH", "SS"):
            self._flush()
            self._literal = False
            heading = " ".join(_plain(argument) for argument in arguments).strip()
            if name == "SH":
                self._skip_section = heading.upper() in _BOILERPLATE
            self._add_text(heading)
            self._flush()
        elif name in ("nf", "EX", "Vb"):
            self._flush()
            self._literal = True
        elif name in ("fi", "EE", "Ve"):
            self._flush()
            self._literal = False
        elif name in _JOINED:
            self._add_text("".join(arguments))
        elif name in _SPACED:
            self._add_text(" ".join(arguments))
        elif name in ("UR", "MT", "URL", "MTO"):
            self._add_text("<" + arguments[0] + ">" if arguments else "")
        elif name in ("UE", "ME"):
            if self._lines and any(arguments):
                self._lines[-1] += _plain("".join(arguments))
        elif name in _BREAKS:
            self._flush()
            # An item's label (a bullet, a term) begins its paragraph.
            if name in ("IP", "HP") and arguments:
                self._add_text(arguments[0])

    def text(self) -> str:
        """Returns the text so far."""
        self._flush()
        return "\n\n".join(self._paragraphs) + "\n" if self._paragraphs else ""

    def _add_text(self, line: str) -> None:
        if self._skip_section:
            return
        glue, self._glue = self._glue, line.endswith("\\c")
        text = _plain(line).rstrip()
        if not self._literal:
            text = re.sub(r"\s+", " ", text).strip()
            if not text:
                self._flush()
                return
        if glue and self._lines:
            self._lines[-1] += text
        else:
            self._lines.append(text)

    def _flush(self) -> None:
        self._glue = False
        if any(self._lines):
            lines = self._lines if self._literal else filter(None, self._lines)
            paragraph = "\n".join(lines)
            if not (self._literal and _PROMPT.search(paragraph)):
                self._paragraphs.append(paragraph.strip("\n"))
        self._lines = []


def _plain(text: str) -> str:
    return _ESCAPE.sub(_unescape, text).replace("\u00a0", " ")


def _unescape(match: re.Match[str]) -> str:
    name = match["long"] or match["short"]
    if name:
        if re.fullmatch(r"u[0-9A-F]{4,6}", name):
            return chr(int(name[1:], 16))
        return _SPECIAL.get(name, "")
    string = match["string"] or match["pair"] or match["one"]
    if string:
        return {"lq": "“", "rq": "”", "R": "®", "Tm": "™"}.get(string, "")
    return _CHAR.get(match["char"] or "", "")
