"""Descriptions of sources: what every key accepts, and one sentence about anything else."""

import dataclasses
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from command_line import composed
from corpus_cases import manifest, run, texts, web, write
from hypothesis import given
from hypothesis import strategies as st

from nemo_rod import parts
from nemo_rod.config import Domain
from nemo_rod.corpus import SourceSpec
from nemo_rod.corpus.adapters.text_list import TextList
from nemo_rod.corpus.documents import open_inputs
from nemo_rod.corpus.formats import Input
from nemo_rod.corpus.sources import takes


def parsed(values: Any, name: Any = "web") -> SourceSpec:
    """The one source of a domain with these keys, besides the required ones."""
    if isinstance(values, dict):
        values = {"role": "replay", "kind": "jsonl", "files": ["x"], **values}
        values = {key: value for key, value in values.items() if value != "absent"}
    (spec,) = Domain(tokenizer="byte", sources={name: values}).specs
    return spec


def read_options(spec: SourceSpec) -> list[Input]:
    return [TextList("made", None, lambda: [str(text) for text in spec.options["texts"]] * 40)]


@pytest.fixture
def registered(monkeypatch):
    """Another package's reader, `mine`, which reads its texts from its options."""
    point = EntryPoint("mine", f"{__name__}:read_options", "nemo_rod.readers")
    others: Callable[[str], dict[str, EntryPoint]]
    others = lambda kind: {"mine": point} if kind == "readers" else {}  # noqa: E731
    monkeypatch.setattr(parts, "other_parts", others)


YAML = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYS = st.sampled_from([field.name for field in dataclasses.fields(SourceSpec)] + ["unknown"])


@given(st.dictionaries(KEYS, YAML, max_size=4), st.sampled_from(["web", False, None, 3, ""]))
def test_any_description_is_parsed_or_one_sentence_refuses_it(values, name):
    try:
        spec = parsed(values, name)
    except ValueError as error:
        message = str(error)
        assert message.startswith(("domain.sources", "source name '' ")) and "\n" not in message
    else:
        assert vars(spec) | values == vars(spec)


def test_valid_keys_are_what_they_were():
    spec = parsed({"subsample": 1, "max_tokens": 3, "filter": None, "dedup": True}, "2024")
    expected = SourceSpec(
        name="2024", role="replay", kind="jsonl", files=["x"], max_tokens=3, dedup=True
    )
    assert spec == expected


def test_sources_are_parsed_once_by_a_command():
    domain = composed("recipe=toy_synthetic").domain
    assert vars(domain)["specs"] is domain.specs  # since the configuration was checked


def test_a_floor_and_whole_documents_exclude_each_other(tmp_path):
    """In a recipe and in Python alike."""
    message = r"^domain\.sources\.web\.document_holdout=true and domain\.holdout_floor=5 [^\n]*$"
    values = {"role": "replay", "kind": "jsonl", "files": ["a"], "document_holdout": True}
    with pytest.raises(ValueError, match=message):
        _ = Domain(tokenizer="byte", holdout_floor=5, sources={"web": values}).specs
    spec = web(write(tmp_path / "a", texts(60, 1)), document_holdout=True)
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "b", [spec], holdout_floor=5)
    assert not (tmp_path / "b").exists()
    run(tmp_path / "b", [spec])


def test_a_reader_of_another_package_declares_its_keys(registered, monkeypatch):
    """As ours do; without a declaration, it takes any."""

    def refuse_beta(spec: SourceSpec) -> None:
        if spec.path == "beta":
            raise ValueError("domain.sources.web.path=beta was withdrawn: take gamma.")

    declared = takes("path", "options", check=refuse_beta, path=str)(lambda spec: [])
    anything = {"kind": "mine", "path": "alpha", "filter": "a == 1", "split": "x"}
    parsed(anything)
    monkeypatch.setattr(sys.modules[__name__], "read_options", declared)
    assert parsed({"kind": "mine", "path": "alpha", "files": [], "options": {"a": 1}}).path
    for values, sentence in (
        ({}, "path=null is not valid: expected a text; remove the key"),
        ({"path": ""}, "path='' is not valid: expected a text that is not empty"),
        ({"path": "alpha", "filter": "a == 1"}, "kind=mine reads path instead; remove filter."),
        ({"path": "beta"}, "path=beta was withdrawn"),
    ):
        with pytest.raises(ValueError, match=sentence):
            parsed({"kind": "mine", "files": [], **values})


def test_options_are_for_readers_of_other_packages(registered, tmp_path):
    options = {"texts": ["one text", "and another"]}
    values = {"kind": "mine", "files": [], "options": options}
    spec = parsed(values)
    assert next(open_inputs(spec)[0].records(None)) == "one text"
    run(tmp_path / "blocks", [spec])
    assert manifest(tmp_path / "blocks")["reading"]["options"] == {
        "texts": ["one text", "and another"]
    }
    for other, now in (({"texts": ["a third"]}, r"\['a third'\]"), ({}, "None")):
        changed = rf"reading\.options\.texts was \['one text', 'and another'\] and is now {now}"
        with pytest.raises(ValueError, match=changed):
            run(tmp_path / "blocks", [parsed({**values, "options": other})])
    run(tmp_path / "plain", [web(write(tmp_path / "a", texts(60, 1)))])
    assert "options" not in manifest(tmp_path / "plain")["reading"]
