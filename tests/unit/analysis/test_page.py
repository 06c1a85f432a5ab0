from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from osd.analysis.tokenizer.findings import Setting, conclusions, figures, findings, tables
from osd.analysis.tokenizer.page import page
from osd.analysis.tokenizer.passages import Passage
from osd.target.vocabulary import Vocabulary
from tests.unit.analysis.tokenizers_of import byte_level

LETTERS = [chr(97 + number) for number in range(26)]


@pytest.fixture
def target() -> Vocabulary:
    return Vocabulary.of("target", byte_level([*LETTERS, " ", "ö", "їх"], added=["<s>"]))


@pytest.fixture
def draft() -> Vocabulary:
    return Vocabulary.of("<draft>", byte_level([*LETTERS, "ж"]))


def passages(target: Vocabulary) -> list[Passage]:
    texts = ["ab cd", "cab"]
    return [
        Passage("d", text, ids, ids, np.ones(len(ids))) for text, ids in zip(texts, target.encode(texts), strict=True)
    ]


def test_single_vocabulary_has_no_overlap_and_no_traffic(target):
    results = findings([target])
    titles = [table.title for table in tables(results)]
    assert titles == ["Vocabularies", "Categories", "Scripts", "Cyrillic languages"]
    assert conclusions(results, None) == []
    assert "core tokens" not in str(tables(results)[0].rows)


def test_every_row_has_a_cell_per_column(target, draft):
    results = findings([target, draft], passages(target), "somewhere")
    for table in tables(results):
        assert {len(row) for row in table.rows} == {len(table.head)}, table.title
    assert [table.title for table in tables(results)][-3:] == ["Overlap", "Fertility", "Draft vocabulary"]


def test_shares_of_scripts_and_languages_sum_to_one(target, draft):
    made = {table.title: table for table in tables(findings([target, draft]))}
    for title in ("Scripts", "Cyrillic languages"):
        rows = [row for row in made[title].rows if row[0] not in ("distinctive tokens", "written in no language")]
        assert sum(float(row[1].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.05)


def test_conclusions_use_the_setting_of_the_service(target, draft):
    results = findings([target, draft], passages(target), "somewhere")
    fits, suggestion = conclusions(results, Setting("drafter.vocabulary", 8192))
    assert fits == (
        "<draft> can draft the common tokens: 26 of the target's 30 tokens, which are 87.50% of the traffic."
    )
    assert suggestion.startswith("Only the whole vocabulary covers 99% of held-out tokens; it is 8192")
    same, _ = conclusions(findings([target, target], passages(target), "somewhere"), None)
    assert same == "target has the target's ids, and can draft all of them."


def test_smaller_vocabulary_is_suggested_with_the_setting():
    wide = Vocabulary.of("wide", byte_level([chr(0x4E00 + number) for number in range(600)]))
    ids = np.arange(3)
    results = findings([wide], [Passage("d", "一", ids, ids, np.ones(3))] * 2, "somewhere")
    (sentence,) = conclusions(results, Setting("drafter.vocabulary", 512))
    assert sentence.startswith("drafter.vocabulary=256 covers 100.00% of held-out tokens; it is 512 now")
    (sentence,) = conclusions(results, Setting("drafter.vocabulary", 256))
    assert sentence == "drafter.vocabulary=256 covers 100.00% of held-out tokens, and is the current value."
    assert conclusions(results, None) == ["a draft vocabulary of 256 ids covers 100.00% of held-out tokens."]


def test_figures_are_json_with_every_category(target, draft):
    results = findings([target, draft], passages(target), "somewhere")
    read = json.loads(json.dumps(figures(results, Setting("drafter.vocabulary", 8192))))
    assert [tokenizer["label"] for tokenizer in read["tokenizers"]] == ["target", "<draft>"]
    assert sum(read["tokenizers"][0]["categories"].values()) == 30
    assert read["tokenizers"][0]["scripts"]["CYRILLIC inner_alpha"] == 1
    assert read["overlap"][0]["tokens"] == 26
    assert read["coverage"]["tokens"] == 8
    assert read["fertility"][0]["per_word"] == pytest.approx(8 / 3)


def test_page_is_self_contained_and_has_plots(target, draft):
    text = page(findings([target, draft], passages(target), "somewhere"), None)
    assert "&lt;draft&gt;" in text
    assert "<draft>" not in text
    for outside in ("src=", "href=", "@import", "url("):
        assert outside not in text
    pictures = [part.split("</svg>")[0] + "</svg>" for part in text.split("<section>") if part.startswith("<svg")]
    assert len(pictures) == 3
    for picture in pictures:
        ElementTree.fromstring(picture)  # noqa: S314 - our own


def test_page_without_traffic_has_only_the_categories_plot(target):
    assert page(findings([target]), None).count("<svg") == 1
