"""Secrets from files, and the parts of the Redis URL."""

from __future__ import annotations

import pytest

from osd.config import ConfigError, Settings, load_settings


@pytest.mark.parametrize(("overrides", "reason"), [
    (["redis_prefix=a:"], "redis_prefix is for an existing Redis: set redis_url too"),
    (
        ["redis.password_file=/nowhere", "redis_url=redis://h"],
        "redis.password_file /nowhere cannot be read",
    ),
    (
        ["redis.password_file=/nowhere", "redis_url=redis://:p@h"],
        "redis_url has a password, and",
    ),
    (
        ["redis.ca_file=/nowhere", "redis_url=redis://h"],
        "redis.ca_file is for TLS: redis_url must begin",
    ),
    (["redis.ca_file=/nowhere", "redis_url=rediss://h"], "redis.ca_file: there is no file /nowhere"),
    (["redis_prefix=a*", "redis_url=redis://h"], "redis_prefix (--set) must match"),
    (["serving.api_key_file=/nowhere"], "serving.api_key_file /nowhere cannot be read: No such file"),
    (["serving.api_key_file=/dev/null"], "serving.api_key_file /dev/null is empty"),
    (
        ["serving.api_key_file=/dev/null", "serving.api_key=k"],
        "serving.api_key and serving.api_key_file are both",
    ),
    (["serving.admin_key_file=/dev/null"], "serving.admin_key_file /dev/null is empty"),
    (["serving.api_key=k", "serving.admin_key=k"], "serving.admin_key and serving.api_key are the same"),
    (["serving.keys_file=/k", "serving.api_key=k"], "serving.keys_file holds all keys: leave serving.api_key out"),
    (["serving.keys_file=/k", "serving.admin_key=k"], "serving.keys_file holds all keys: leave serving.admin_key"),
])  # fmt: skip
def test_conflicting_settings_give_one_line(overrides, reason):
    with pytest.raises(ConfigError) as caught:
        load_settings(None, overrides, {})
    assert str(caught.value).startswith(reason)


def test_secret_files_are_read_and_never_shown(tmp_path):
    key, password = tmp_path / "key", tmp_path / "password"
    key.write_text("hush-key\n")
    password.write_text("hush/password\n")
    overrides = [f"serving.api_key_file={key}", f"redis.password_file={password}", "redis_url=redis://me@h:1/0"]
    settings = load_settings(None, overrides, {})
    assert settings.serving.api_key is not None
    assert settings.serving.api_key.get_secret_value() == "hush-key"
    assert settings.redis_url == "redis://me:hush%2Fpassword@h:1/0"
    assert "hush" not in repr(settings)
    assert Settings.model_validate(settings.model_dump()) == settings
