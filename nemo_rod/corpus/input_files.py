"""The files of a source: those that its patterns match, each once, on any storage.

Patterns without a scheme are of local files; those with one (``s3://``, ``gs://``, ``hf://``, ...)
are resolved by fsspec. A match that cannot be read is an error.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeVar

from nemo_rod.corpus.sources import SourceSpec

T = TypeVar("T")
# what a file begins with that stands for another one, or is a server's answer -> what it is
_ANSWERS = (  # what servers send in place of a file
    rb"([45]\d\d:? (" + "|".join(status.phrase for status in HTTPStatus).encode() + rb")|"
    rb"error( code:)? \d+|302 found|<response \[\d+\]>|(curl|wget|fatal|remote): [^\n]*|"
    rb"(redirecting|loading)\W*|((error|http):? )?(\d{3}\b:? ?)?(\w+ ){0,3}"
    rb"(not found(: \S+)?|(access)?denied( \(publickey\))?|forbidden|unauthorized|expired|"
    rb"bad (credentials|request|gateway)|moved (permanently|temporarily)|request blocked|see other|"
    rb"(login|auth\w+) required|username or password|too many requests\b[^\n]*|rate limited|"
    rb"limit exceeded\b[^\n]*|quota exceeded|(server|proxy) error|(temporary|permanent) redirect|"
    rb"service (temporarily )?unavailable[^\n]*|please log in|invalid rev id: \S+|cannot get /\S*|"
    rb"gateway time-?out|no healthy upstream|upstream (connect error|request timeout)[^\n]*|"
    rb"access to \w+ \S+ is restricted[^\n]*|invalid credentials in authorization header|"
    rb"no ?such ?(key|bucket|file)\b[^\n]*|the requested \w+[^\n]* not found[^\n]*|"
    rb"(moved permanently|found)\. redirecting to \S+|(sorry, )?the \w+ you are looking for [^\n]*|"
    rb"default backend - 404|(you need to|please) enable (javascript|cookies)( to [^\n]*)?|"
    rb"range not satisfiable|invalid (request|link)|expired token|link not available|"
    rb"does not exist|(slowdown: |you have exceeded a |client sent an http request )[^\n]*))"
)
_SAID = rb"(?im)^([45]\d\d\b|\w+(exception|notfound)$|(error|false|failed)$|\[\{'(loc|type)'|"
_SAID += _ANSWERS + rb"\.?$)"
_OF_ERRORS = re.compile(
    r"(?i)\S*(error|exception)\S*|message|detail|code|status(code)?|(__)?type|documentation_url|"
    r"title|instance|path|timestamp|success|ok|reason|description|request\w*|(trace|host)_?id"
)
_NOTHING = re.compile(rb'(?i)(?=.)[\[\s]*(\{\s*\}|""|null|none|nan|nil|undefined|n/a)?[\]\s]*')
_XML = rb"(?i)(<\?xml[^>]*>\s*)?"
# Of a name that may be any text: README.md may begin with <div>, and config.json be {}.
_PLAIN = re.compile(r"(?i)(^[^.]*|\.te?xt)(\.(gz|bz2|xz|zst))?$")
_PIECE = re.compile(rb"(?i)<((script|style|body|div|link|noscript|iframe|form)\b[^>]*>|!--)")
_UNSEEN = re.compile(rb"(?is)<!--.*?(-->|\Z)|<(script|style)\b.*?(</\2>|\Z)|</?[a-z][^>]*(>|\Z)")
# what a server says in place of a file, in a few words
_EXCUSES = re.compile(
    rb"(?i)\b([45]\d\d|error|oops|sorry|not|(does|could)n.t|denied|forbidden|expired|blocked|wait|"
    rb"moment|loading|unavailable|exceeded|javascript|cookies|(log|sign) ?in|redirect\w*)\b"
)
_DIGEST = (  # a line of one
    rb"((#\$# git-fat )?(?=\d*[a-f])[0-9a-f]{32,128}( +\d+| [ *][^\n]+)?|"
    rb"\w+ \([^\n]+\) = [0-9a-f]{32,}|sha\d{3}-\S+)[ \t\r]*(\n\s*|\Z)"
)
_PAGE = "an HTML page, as servers answer: fetch the file again, or name it .html if it is meant"
_PLACEHOLDERS = (
    (rb"version https?://((git-lfs|hawser)\.github\.com|git-media\.io)/|oid sha256:\w+\s+size ",
     "a pointer of Git LFS: run git lfs pull"),
    (rb"(\.\.[/\\])*(\.git)?[/\\]annex[/\\]objects[/\\]",
     "a pointer of git-annex: run git annex get on it"),
    (rb"# xet version \d", "a pointer of Xet: fetch the file again, with the installed hf_xet"),
    (_XML + rb"(<!--((?!-->).)*-->\s*)*(<(!doctype html|html|head|title|meta http-equiv)\b|"
     rb"<(body|center|h\d|p|pre|a)\b[^>]*>\s*(<\w+>\s*)*" + _ANSWERS + rb"\W*<)", _PAGE),
    (_XML + rb"<((\w+:)?Error(Response)?\b[^>]*>\s*<(\w+:exception|(\w+:)?(Error|Code|Message))|"
     rb"(List\w*|Enumeration)Results?\b|soap\w*:Envelope\b|problem xmlns=.urn:ietf:rfc:7807)",
     "a storage's answer in XML: fetch the file again"),
    (rb"((md5|frozen|desc|meta|wdir)\b[^\n]*\n|deps:\s*\n([- ] [^\n]*\n)+)*"
     rb"outs:\s*\n- (md5|etag|hash|size|path)\b", "a pointer of DVC: run dvc pull"),
    (rb"(?i)" + _ANSWERS + rb"\.?\s*\Z|HTTP/[\d.]+ \d{3}\b|--[\d-]{10} [\d:]{8}-- +\w+:/|"
     rb"% Total +% Received|\w+Exception: \d{3} |Repository Not Found for url: |"
     rb"An error occurred \(\w+\) when calling the ",
     "a server's error: fetch the file again"),
    (rb"(\[\{[^\n]*\n[^\n]*\n)?\[InternetShortcut\]\s|\[Desktop Entry\]\s.*^Type=Link\b|"
     rb'\{"":\s*"WARNING! DO NOT EDIT|\{"url":\s*"https://docs\.google|d8:announce|'
     rb"(!<symlink>|XSym\n\d{4}\n)|\.\.?[/\\]\S+\s*\Z|(<\?xml[^>]*>\s*)?<metalink\b|"
     rb"([a-z]\w*:/|magnet:\?)((?!://)\S)+\s*\Z",
     "a link to it: fetch the file that it names"),
    (_XML + rb"(<!doctype plist[^>]*>\s*)?<plist\b.{0,99}<key>URL</key>|bplist\d\d",
     "a property list, as Apple keeps links in: fetch the file that it stands for"),
    (rb"From \S+ +\w{3} \w{3} +\d+ \d\d:\d\d|BEGIN:V(CALENDAR|CARD)\b|begin(-base64)? \d{3} \S+\s|"
     rb"(\([dl]|c[\w.]+\n\w+\n)p\d+\n|(data:[^,\s]*,)?(?=[\w+/-]{60})(?=\S*[a-zA-Z])(?=\S*\d)"
     rb"([\w+/-]{60,}[\r\n]+)*[\w+/-]*={0,2}\s*\Z",
     "a wrapping of other things (mails, cards, bytes as letters): extract their texts"),
    (rb"(%b){20}|(%b)+\Z" % (_DIGEST, _DIGEST), "a digest of it: fetch the file, or leave it out"),
    (rb"-----BEGIN (PGP MESSAGE|AGE ENCRYPTED|PKCS7|CMS)|age-encryption\.org/v|\$ANSIBLE_VAULT;|"
     rb'\0GITCRYPT\0|\{.*"sops":\s*\{', "encrypted: decrypt it, or leave it out"),
)  # fmt: skip
_HTML = re.compile(r"(?i)\.(\w?html?|php\d?|jspx?|aspx?|ftl|erb|ejs|tmpl|vue)(\.\w+)?$")
HEAD = 4096  # bytes of a file that show what it is


class RemoteFile:
    """A file that fsspec reaches, like `Path` for readers; `st_size` is None where unknown."""

    def __init__(self, system: Any, path: str, size: int | None) -> None:
        self.suffix, self._name = os.path.splitext(path)[1], str(system.unstrip_protocol(path))
        self.open: Callable[..., IO[Any]] = partial(system.open, path)
        self.stat = partial(SimpleNamespace, st_size=size)

    def __str__(self) -> str:
        return self._name


File = Path | RemoteFile


def refuse_placeholder(file: File, head: bytes) -> None:
    """Refuses a file that stands for the data, by its first `HEAD` bytes."""
    head, name = head.removeprefix(b"\xef\xbb\xbf").lstrip(), Path(str(file)).name
    if re.search(r"(?i)\.(crdownload|part|download|aria2|incomplete)$", name):
        raise ValueError(f"{file} is not the data, but an unfinished download: fetch it again")
    is_plain = _PLAIN.search(name)
    with suppress(ValueError, RecursionError):
        answer = json.loads(head)
        while isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        keys = answer if isinstance(answer, dict) else {}
        for key, value in [*keys.items()]:
            if value in (None, [], {}) or (key in ("data", "meta") and isinstance(value, dict)):
                del keys[key]  # it says nothing
        said = b"\n".join(str(value).encode() for value in keys.values())
        is_error = any("rror" in key for key in keys) or re.search(_SAID, said)
        if is_error and all(map(_OF_ERRORS.fullmatch, keys)):
            head = b"not found"  # a server's error, as those in plain words
    if is_plain and _NOTHING.fullmatch(head):
        raise ValueError(f"{file} is not the data, but a program's word for none: leave it out")
    if is_plain and _PIECE.match(head):
        shown = _UNSEEN.sub(b" ", head).split()
        if not shown or (len(shown) < 40 and _EXCUSES.search(b" ".join(shown))):
            head = b"<html>"
    for pattern, kind in _PLACEHOLDERS:
        if kind is _PAGE and _HTML.search(name):
            continue
        if re.match(pattern, head, re.DOTALL | re.MULTILINE):
            raise ValueError(f"{file} is not the data, but {kind}")


def matching_files(spec: SourceSpec) -> list[tuple[File, str]]:
    """Returns the files of a source in the order of their paths.

    A file that several patterns, links or hard links lead to is read once, by its own path if that
    matches, and otherwise by the first. A path that exists as written is taken literally.

    Returns:
        The files, with names relative to the fixed part of their pattern, which do not depend on
        the location of the corpus.

    Raises:
        ValueError: a pattern matches nothing or something that is no file, or a name is not UTF-8.
    """
    found: dict[str, tuple[File, str]] = {}
    paths_of: dict[object, list[str]] = {}  # file identity -> its paths
    for pattern in spec.files:
        check_file_name(pattern)
        local = os.path.expanduser(re.sub("^(file|local)://", "", pattern))
        matches: list[tuple[File, str, object]]
        try:
            matches = [*(_remote(local) if "://" in local else _local(local))]
        except Exception as error:  # storages raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"files {pattern!r} cannot be listed: {reason}") from error
        if not matches:
            raise ValueError(
                f"no file matches {pattern!r} in {os.getcwd()}: correct files of the source"
            )
        for file, name, identity in matches:
            check_file_name(name)
            if str(file) not in found:
                found[str(file)] = file, name
                paths_of.setdefault(identity, []).append(str(file))
    chosen = [
        min(paths, key=lambda path: (os.path.realpath(path) != os.path.abspath(path), path))
        for paths in paths_of.values()
    ]
    return [found[path] for path in pick_evenly(sorted(chosen), spec.max_files)]


def pick_evenly(items: Sequence[T], count: int | None) -> list[T]:
    """Returns at most `count` items, evenly spaced, including the first."""
    if count is None or count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def folder_files(folder: Path) -> list[tuple[str, int | None]]:
    """Returns the names and sizes of all files below a folder, in order; hidden ones are left out.

    Raises:
        ValueError: something is neither file nor folder, or a name is not UTF-8.
    """
    files = {name: file.stat().st_size for file, name, _ in _local(f"{folder}/**/*")}
    for name in files:
        check_file_name(name)
    return sorted(files.items())


def check_file_name(name: str) -> None:
    """Refuses a name that manifests, which are UTF-8, cannot hold."""
    if (encoding := sys.getfilesystemencoding()) != "utf-8" and not name.isascii():
        raise ValueError(
            f"file names such as {name!a} are read as {encoding} under this locale: set "
            "PYTHONUTF8=1 in the environment"
        )
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"the file name {name!r} is not UTF-8: rename it") from None


def _local(pattern: str) -> Iterator[tuple[Path, str, object]]:
    """Yields the files that match a pattern, their names and identities."""
    *folders, last = [part for part in pattern.split("/") if part] or [""]
    if last == "**":
        folders, last = [*folders, last], "*"
    paths = [fixed := "/" if pattern.startswith("/") else ""]
    is_fixed = True
    for part in folders:
        is_fixed = is_fixed and (not glob.has_magic(part) or os.path.exists(fixed + part))
        fixed += f"{part}/" if is_fixed else ""
        paths = [f"{path}/" for folder in paths for path in _below(folder, part)]
    for path in (path for folder in paths for path in _below(folder, last)):
        info = _stat(path)
        if stat.S_ISDIR(info.st_mode):
            if [*folders, last][-2:] == ["**", "*"]:  # its files match
                continue
            raise ValueError(
                f"{path} is a folder: name its files, as in {path}/**, or leave it out"
            )
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path} is no regular file: leave it out")
        identity = (info.st_dev, info.st_ino) if info.st_ino else os.path.realpath(path)
        yield Path(path), Path(os.path.relpath(path, fixed or ".")).as_posix(), identity


def _below(folder: str, part: str) -> list[str]:
    """Returns the entries of a folder ("": the current one) that match a part of a pattern."""
    if not os.path.isdir(folder or "."):
        _stat(folder.rstrip("/"))  # a broken link may stand for half of the corpus
        return []
    if part == "**":
        return [path.rstrip("/") for path in _tree(folder)]
    if os.path.lexists(folder + part):
        return [folder + part]
    if not glob.has_magic(part):
        with suppress(FileNotFoundError):
            os.lstat(folder + part)  # raises what lexists takes for absence, as in closed folders
        return []
    if "**" in part:
        raise ValueError(f"{folder}{part}: ** stands for whole folders: write **/, as in **/*.txt")
    names = fnmatch.filter(os.listdir(folder or "."), part)
    return [folder + name for name in names if part[0] == "." or name[0] != "."]


def _tree(top: str) -> Iterator[str]:
    """Yields a folder and all below it but runs, links to folders last and no folder twice."""
    seen, waiting = set(), [top or "."]
    while waiting:
        path = waiting.pop(0)
        info = _stat(path)
        if (info.st_dev, info.st_ino) in seen:
            continue
        seen.add((info.st_dev, info.st_ino))
        if path not in (top, ".") and os.path.isdir(f"{path}/launch/stages"):
            continue  # a run of ours
        yield path
        visible = [entry for entry in os.scandir(path) if entry.name[0] != "."]
        entries = sorted(visible, key=lambda entry: entry.name)
        links = [entry.path for entry in entries if entry.is_symlink()]
        links = [link for link in links if stat.S_ISDIR(_stat(link).st_mode)]
        inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        waiting = [*inner, *waiting, *links]


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        if not os.path.islink(path):
            raise
        raise ValueError(
            f"{path} is a link to {os.readlink(path)!r}, which cannot be reached "
            f"({error.strerror}): restore it, or remove the link"
        ) from None


def _remote(pattern: str) -> Iterator[tuple[RemoteFile, str, object]]:
    """Yields the files that match a pattern of fsspec, their names and identities."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(pattern)
    *folders, last = path.split("/")
    fixed = ""  # a path that exists as written is taken literally
    while folders and (not glob.has_magic(folders[0]) or system.isdir(fixed + folders[0])):
        fixed += f"{folders.pop(0)}/"
    rest = "/".join([*folders, last])
    shown = [".", "..", *(part for part in (*folders, last) if part[:1] == ".")]
    if not folders and system.isfile(path):
        matches = {path: system.info(path)}
    else:
        matches = system.glob(glob.escape(fixed) + rest, detail=True)
    for match, info in matches.items():
        file = RemoteFile(system, match, info.get("size"))
        name = os.path.relpath(match, fixed or "/")
        hidden = {part for part in name.split("/") if part[0] == "."}
        if hidden.difference(shown, *(fnmatch.filter(hidden, part) for part in shown)):
            continue
        if info["type"] == "directory" and rest.endswith(("**", "**/*")):  # its files match
            continue
        if info["type"] != "file":
            raise ValueError(f"{file} is a {info['type']}: name its files, or leave it out")
        yield file, name, str(file)
