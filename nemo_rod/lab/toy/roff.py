"""Manual pages as prose: strips roff markup but keeps words, paragraphs and examples.

This is not a typesetter; it interprets the `man` macros that real pages use. Anything that needs a
typesetter (tables, macro definitions, conditionals) is omitted, and pages in the other dialect
(`mdoc`) yield no text. Terminal sessions are omitted too: they are the same on the pages of every
language.
"""

from __future__ import annotations

import re

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
