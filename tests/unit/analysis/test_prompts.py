from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from osd.analysis.refusals import RefusalsError
from osd.analysis.refusals.prompts import PromptGroup, read
from tests import harmless

ITEM = harmless.prompts(1)[0]


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_prompts_are_read_in_order_without_other_fields(tmp_path: Path):
    more = {"level description": "x", "malicious functionality": "y", "jid": 3}
    prompts = read(written(tmp_path, [prompt | more for prompt in harmless.prompts(240)]))
    assert [prompt.pid for prompt in prompts] == list(range(1, 241))
    assert len({prompt.prompt for prompt in prompts}) == 240
    assert {prompt.task for prompt in prompts} == {"text-to-code generation", "code completion", "code translation"}
    assert list(prompts[2].groups()) == [
        PromptGroup("all", ""), PromptGroup("category", "code-to-code"), PromptGroup("task", "code completion"),
        PromptGroup("level", "code-to-code 2"), PromptGroup("language", "python"),
    ]  # fmt: skip
    assert PromptGroup("language", "python") not in prompts[0].groups()


@pytest.mark.parametrize(("content", "message"), [
    ("[{", "is not JSON: EOF"),
    ("\xff", "is not JSON"),
    ({"prompts": []}, "must hold a JSON list of prompts"),
    ([], "holds no prompt"),
    ([ITEM, 7], "prompt 1 counted from 0: Input should be an object, not 7"),
    ([{name: ITEM[name] for name in ITEM if name != "level"}], "prompt 0 counted from 0, field level: Field req"),
    ([ITEM | {"task": "code poetry"}], "field task: Input should be 'text-to-code generation', 'code completion'"),
    ([ITEM | {"category": "text"}], "field category: Input should be 'text-to-code' or 'code-to-code', not 'text'"),
    ([ITEM | {"level": 4}], "field level: Input should be less than or equal to 3, not 4"),
    ([ITEM | {"level": "1"}], "field level: Input should be a valid integer, not '1'"),
    ([ITEM | {"pid": True}], "field pid: Input should be a valid integer"),
    ([ITEM | {"prompt": " \n"}], "field prompt: String should match pattern"),
    ([ITEM | {"language": ""}], "field language: String should match pattern"),
    ([ITEM, ITEM | {"prompt": "Another."}], "2 prompts have the pid 1; give each prompt a unique pid"),
])  # fmt: skip
def test_invalid_file_raises_one_line(tmp_path: Path, content: Any, message: str):
    path = tmp_path / "prompts.json"
    path.write_text(content, encoding="latin-1") if isinstance(content, str) else written(tmp_path, content)
    with pytest.raises(RefusalsError) as refused:
        read(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_file_raises_one_line(tmp_path: Path):
    with pytest.raises(RefusalsError, match=r"cannot read .*nowhere: No such file"):
        read(tmp_path / "nowhere")
