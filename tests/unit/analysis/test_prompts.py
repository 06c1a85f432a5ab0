from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from osd.analysis.refusals import RefusalsError
from osd.analysis.refusals.prompts import Group, read
from tests import harmless

ONE = harmless.prompts(1)[0]


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_prompts_are_read_in_their_order_and_other_fields_are_not(tmp_path: Path):
    more = {"level description": "x", "malicious functionality": "y", "jid": 3}
    prompts = read(written(tmp_path, [one | more for one in harmless.prompts(240)]))
    assert [one.pid for one in prompts] == list(range(1, 241))
    assert len({one.prompt for one in prompts}) == 240
    assert {one.task for one in prompts} == {"text-to-code generation", "code completion", "code translation"}
    assert list(prompts[2].groups()) == [
        Group("all", ""),
        Group("category", "code-to-code"),
        Group("task", "code completion"),
        Group("level", "code-to-code 2"),
        Group("language", "python"),
    ]
    assert Group("language", "python") not in prompts[0].groups()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("[{", "is not JSON: EOF"),
        ("\xff", "is not JSON"),
        ({"prompts": []}, "must hold a JSON list of prompts"),
        ([], "holds no prompt"),
        ([ONE, 7], "prompt 1 counted from 0: Input should be an object, not 7"),
        ([{name: ONE[name] for name in ONE if name != "level"}], "prompt 0 counted from 0, field level: Field req"),
        ([ONE | {"task": "code poetry"}], "field task: Input should be 'text-to-code generation', 'code completion'"),
        ([ONE | {"category": "text"}], "field category: Input should be 'text-to-code' or 'code-to-code', not 'text'"),
        ([ONE | {"level": 4}], "field level: Input should be less than or equal to 3, not 4"),
        ([ONE | {"level": "1"}], "field level: Input should be a valid integer, not '1'"),
        ([ONE | {"pid": True}], "field pid: Input should be a valid integer"),
        ([ONE | {"prompt": " \n"}], "field prompt: String should match pattern"),
        ([ONE | {"language": ""}], "field language: String should match pattern"),
        ([ONE, ONE | {"prompt": "Another."}], "2 prompts have the pid 1, and each needs one of its own"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_of_that_shape_is_one_sentence(tmp_path: Path, content: Any, told: str):
    path = tmp_path / "prompts.json"
    path.write_text(content, encoding="latin-1") if isinstance(content, str) else written(tmp_path, content)
    with pytest.raises(RefusalsError) as refused:
        read(path)
    assert told in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path):
    with pytest.raises(RefusalsError, match=r"cannot read .*nowhere: No such file"):
        read(tmp_path / "nowhere")
