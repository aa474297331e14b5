"""The toy corpora: manual pages as prose, packages without a network, chains that never change."""

import gzip
import json
import os
from pathlib import Path

import pytest
from corpus_cases import read_documents
from debian_text import PYTHON, debian_input, fetch_debian_texts, strip_roff
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from nemo_rod.corpus import SourceSpec, load_tokenizer, prepare

PAGE = r"""'\" t
.\" a comment
.TH LS 1 "2022" "GNU" "Manual"
.SH ÜBERSICHT
\fBls\fP [\fI\,OPTION\/\fP]… \(em \(lqlist\(rq
.SH "SIEHE AUCH"
.TP 4
\fB\-a\fP, \fB\-\-all\fP
do not ignore
entries starting with\~. \" a note
.IP \(bu 3
an item, see
.BR ls (1),
.BR "dir and" " vdir" (1)
and
.UR https://example.org
the page
.UE .
.PP
A path\c
/name; 100\e% and \[u20AC] and \*(Tm
.nf
  int   x;
\&.y = '\en';
.fi
.EX
$ ls \-l
total 0
.EE
.TS
l l.
a	b
.TE
.de XX
.B gone
..
.if n \{\
gone too
.\}
.SH ÜBERSETZUNG
Die Übersetzung wurde erstellt.
.SH "SEE ALSO"
last
"""

PAGE_OF_HELP = f"""<html><head><title>Menu</title><script>var p = "<p>";</script></head><body>
<nav><a>Contents</a></nav><h1 id="x">Save &amp;
 open</h1><p>A <b>bold</b>
word<ul><li>one<li><p>two</p></ul>tail<pre>
  x = 1
</pre><p>{"words " * 40}</body></html>"""

TEXT = """ÜBERSICHT

ls [OPTION]… — “list”

SIEHE AUCH

-a, --all
do not ignore
entries starting with .

•
an item, see
ls(1),
dir and vdir(1)
and
<https://example.org>
the page.

A path/name; 100\\% and € and ™

  int   x;
.y = '\\n';

SEE ALSO

last
"""


def test_a_manual_page_becomes_prose() -> None:
    assert strip_roff(PAGE) == TEXT


@pytest.mark.parametrize(
    "page", [".so man1/ls.1\n", ".Dd May\n.Dt LS 1\n.Sh NAME\n", "", ".TH X\n"]
)
def test_pages_without_prose_give_nothing(page: str) -> None:
    assert strip_roff(page) == ""


@given(st.text(st.sampled_from("\\.'\"ab fB([-]{}\n~*"), max_size=60))
def test_no_page_is_too_strange(page: str) -> None:
    strip_roff(page)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Packages as they lie in the cache."""
    files = {
        "manpages-xx/tree/usr/share/man/xx/man1/ls.1.gz": gzip.compress(
            (".SH NAME\n" + "words and words\n" * 20).encode()
        ),
        "manpages-xx/tree/usr/share/man/xx/man1/short.1.gz": gzip.compress(b".SH NAME\nshort\n"),
        "manpages-xx/tree/usr/share/doc/manpages-xx/copyright": b"not a document " * 50,
        "dict-xx/tree/usr/share/dictd/xx.dict.dz": gzip.compress(
            b"00-database-info\n   preface\n"
            b"Word \\Word\\, n.\n   1. " + b"a thing; " * 30 + b"\n      [1913 Webster]\n"
            b"Bad \\Bad\\\n   \xff" + b"x" * 300 + b"\n"
        ),
        "libx-dev/tree/usr/include/x.h": b"/* licence */\n// more\n#define X 1\n"
        + b"int x;\n" * 40,
        "help-xx/tree/usr/share/help/a.html": PAGE_OF_HELP.encode(),
        "help-xx/tree/usr/share/doc/help-xx/b.txt": b"plain " * 40,
        "help-xx/tree/usr/share/doc/help-xx/copyright": b"not a document " * 50,
        "help-xx/tree/usr/share/common-licenses/GPL": b"licence " * 40,
        "help-xx/tree/usr/share/games/fortunes/x": b"\n%\n".join(
            [b"a " * 120, b"short", b"b " * 120, b""]
        ),
        "help-xx/tree/usr/share/games/fortunes/x.dat": b"index " * 50,
    }
    for name, data in files.items():
        path = tmp_path / "cache" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for package in ("manpages-xx", "dict-xx", "libx-dev", "help-xx"):
        label = {"file": f"{package}_1.0_all.deb", "bytes": 1000}
        (tmp_path / "cache" / package / "package.json").write_text(json.dumps(label))
    return tmp_path / "cache"


def debian(cache: Path, *packages: str) -> list[str]:
    return [text for text in debian_input(packages, cache).records(None) if text is not None]


def test_help_sayings_and_licences_are_documents(cache: Path) -> None:
    help_text = "Save & open\n\nA bold word\n\none\n\ntwo\n\n  x = 1\n\n" + ("words " * 40).strip()
    assert sorted(debian(cache, "help-xx")) == sorted(
        [help_text, "plain " * 40, "licence " * 40, ("a " * 120), ("b " * 120)]
    )


def test_packages_give_documents(cache: Path) -> None:
    assert debian(cache, "manpages-xx") == ["NAME\n\n" + "words and words\n" * 20]
    assert debian(cache, "dict-xx") == [
        "Word \\Word\\, n.\n   1. " + ("a thing; " * 30).strip() + "\n"
    ]
    assert debian(cache, "libx-dev") == ["#define X 1\n" + "int x;\n" * 40]
    item = debian_input(["manpages-xx", "libx-dev"], cache)
    assert (item.name, item.size) == ("manpages-xx_1.0_all.deb libx-dev_1.0_all.deb", 2000)


def test_python_gives_documents_spread_over_the_library() -> None:
    kind = "recipe/scripts/debian_text.py:read_packages"
    spec = SourceSpec(name="python", role="replay", kind=kind, files=[PYTHON], max_documents=40)
    first, again = list(read_documents(spec)), list(read_documents(spec))
    assert first == again and len(set(first)) == 40
    assert all("def " in text or "import" in text or "=" in text for text in first)


@pytest.mark.parametrize("present", ["none", "failing"])
def test_without_packages_the_other_toy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: str
) -> None:
    if present == "failing":
        for tool in ("apt-get", "dpkg-deb"):
            path = tmp_path / tool
            path.write_text("#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
            path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + (":/bin:/usr/bin" if present == "failing" else ""))
    expected = {"none": "apt-get is missing", "failing": r"cannot fetch .*E: no network"}[present]
    with pytest.raises(ValueError, match=f"{expected}.*: use recipe=toy_synthetic") as error:
        fetch_debian_texts(tmp_path / "cache", ["manpages-de"])
    assert "\n" not in str(error.value)
    assert not [p for p in (tmp_path / "cache").glob("*")]


@pytest.mark.slow
def test_packages_are_fetched_without_touching_the_system(tmp_path: Path) -> None:
    try:
        (tree,) = fetch_debian_texts(tmp_path, ["manpages-es"])
    except ValueError as error:
        pytest.skip(str(error))
    assert tree == tmp_path / "manpages-es"
    documents = debian(tmp_path, "manpages-es")
    text = "".join(documents)
    assert len(documents) > 100 and "DESCRIPCIÓN" in text
    assert os.listdir(tmp_path) == ["manpages-es"]
    assert text.count("\\f") < 20 and "TRADUCCIÓN" not in text and "\0" not in text


def test_the_synthetic_store_is_pinned(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    file = ROOT / "hydra_configs" / "domain" / "synthetic.yaml"
    config = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(file))
    sources = [SourceSpec(name=key, **value) for key, value in config.pop("sources").items()]
    tokenizer = load_tokenizer(config.pop("tokenizer"))
    store = prepare(tmp_path / "blocks", sources, tokenizer=tokenizer, **config)
    assert store.digest == "9b235f16a5c254f0266e879906745e0b"
