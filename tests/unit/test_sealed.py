"""Settings for processes that Ray starts."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from osd.config import ConfigError, load_settings
from osd.sealed import discard_secrets, seal

SENTINELS = "redis+sentinel://h:1/s?sentinel_password=hush"


@pytest.mark.parametrize("url", ["redis://:hush@h:1/0", "redis://me:hush@h:1/0?prefix=a%3A", SENTINELS])
@pytest.mark.parametrize("is_own", [True, False])
def test_sealed_secrets_are_in_a_file_of_the_owner(tmp_path: Path, url: str, is_own: bool):
    environment = {"OSD_HOME": str(tmp_path), "OSD_SERVING__API_KEY": "hush-a", "OSD_SERVING__ADMIN_KEY": "hush-b"}
    settings = load_settings(None, (), environment if is_own else {**environment, "OSD_REDIS_URL": url})
    sealed = pickle.dumps(seal(settings, url))
    assert b"hush" not in sealed
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert pickle.loads(sealed).open() == (settings, url)  # noqa: S301
    discard_secrets(settings)
    assert list(tmp_path.iterdir()) == []


def test_sealed_settings_name_the_files_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("key", "password"):
        Path(name).write_text("hush@/")
    files = {"OSD_SERVING__API_KEY_FILE": "key", "OSD_REDIS__PASSWORD_FILE": "password"}
    settings = load_settings(None, (), {"OSD_HOME": "home", "OSD_REDIS_URL": "redis://me@h:1/0", **files})
    assert settings.redis_url is not None
    sealed = pickle.dumps(seal(settings, settings.redis_url))
    assert b"hush" not in sealed
    assert not Path("home").exists()
    monkeypatch.chdir("/")  # as another process
    assert pickle.loads(sealed).open() == (settings, settings.redis_url)  # noqa: S301


def test_missing_file_of_secrets_names_the_settings_for_files(tmp_path: Path):
    settings = load_settings(None, (), {"OSD_HOME": str(tmp_path)})
    sealed = seal(settings, "redis://:hush@h:1/0")
    discard_secrets(settings)
    with pytest.raises(ConfigError, match=r"cannot be read: No such file .* need serving.api_key_file"):
        sealed.open()
