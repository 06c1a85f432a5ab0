"""Secrets on the command line are refused, because all users of the machine can read a command line."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from osd.cli.app import app


@pytest.mark.parametrize(("given", "instead"), [
    ("serving.api_key=hush", "serving.api_key_file or OSD_SERVING__API_KEY"),
    ("serving.admin_key=hush", "serving.admin_key_file or OSD_SERVING__ADMIN_KEY"),
    ("redis_url=redis://:hush@h/0", "redis.password_file or OSD_REDIS_URL"),
    ("redis_url=redis+sentinel://h:1/s?sentinel_password=hush", "redis.password_file or OSD_REDIS_URL"),
])  # fmt: skip
def test_secret_on_the_command_line_is_refused_and_hidden(given, instead):
    result = CliRunner().invoke(app, ["drafters", "list", "--set", given])
    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith(f"use {instead}")
    assert "hush" not in result.output
