"""Contents of the key file, and the errors for an invalid file."""

from __future__ import annotations

import hashlib
import json
import time

import pytest

from osd.config import ConfigError
from serving.access.keys import Limits, hash_of
from serving.access.keys_file import load

SECRET = "sk-hush-hush"
ENTRY = f"- {{name: a, key: {SECRET}}}"


@pytest.fixture
def write(tmp_path):
    def write(text, mode=0o600):
        file = tmp_path / "keys.yaml"
        file.write_text(text)
        file.chmod(mode)
        return file

    return write


def test_load_reads_rights_limits_tenant_priority_and_expiry(write):
    hashed = hashlib.sha256(b"the old secret").hexdigest()
    plain, full = load(
        write(f"""
- name: plain
  key: {SECRET}
- name: full
  key: [sk-new-secret, sk-newer-secret]
  key_sha256: {hashed}
  tenant: acme
  may: [generate, watch]
  requests_per_minute: 60
  tokens_per_minute: 1000
  tokens_per_day: 20000
  priority: -2
  expires: 2999-01-31T00:00:00Z
""")
    )
    assert (plain.name, plain.tenant, plain.may, plain.limits, plain.expires) == (
        "plain", "", {"generate"}, Limits(), None,
    )  # fmt: skip
    assert (full.name, full.tenant, full.may, full.limits) == (
        "full",
        "acme",
        {"generate", "watch"},
        Limits(60, 1000, 20000),
    )
    assert (plain.priority, full.priority) == (0, -2)
    for secret in (b"sk-new-secret", b"sk-newer-secret", b"the old secret"):
        assert full.opens(hash_of(secret))
        assert not plain.opens(hash_of(secret))
    assert SECRET not in repr(plain)


def test_load_reads_json_and_accepts_limits_of_one(write):
    limits = {"requests_per_minute": 1, "tokens_per_minute": 1, "tokens_per_day": 1}
    (key,) = load(write(json.dumps([{"name": "a", "key": SECRET, **limits}])))
    assert (key.name, key.limits) == ("a", Limits(1, 1, 1))


def test_expired_key_opens_nothing(write, monkeypatch):
    (key,) = load(write(f"- {{name: a, key: {SECRET}, expires: 2030-01-31T00:00:00+01:00}}"))
    end = 1_896_044_400.0
    monkeypatch.setattr(time, "time", lambda: end - 1)
    assert key.opens(hash_of(SECRET.encode()))
    monkeypatch.setattr(time, "time", lambda: end)
    assert not key.opens(hash_of(SECRET.encode()))


def test_administer_right_includes_watch(write):
    (key,) = load(write(f"- {{name: a, key: {SECRET}, may: [administer]}}"))
    assert [key.allows(right) for right in ("generate", "watch", "administer")] == [False, True, True]


@pytest.mark.parametrize(("text", "reason"), [
    ("", "it must be a list of keys"),
    ("keys: []", "it must be a list of keys"),
    ("[]", "it has no key"),
    ("- [", "is not YAML, see line 1"),
    ("- {key: sk-hush-hush}", "keys[0].name is required"),
    ("- {name: a}", "keys[0] needs key or key_sha256"),
    (f"{ENTRY}\n- {{name: b b, key: sk-hush-too}}", "keys[1].name must match"),
    (f"{ENTRY}\n- {{name: a, key: sk-hush-too}}", "keys[1].name is the name of keys[0] too; to give"),
    (f"{ENTRY}\n- {{name: b, key: [sk-hush-too, {SECRET}]}}", "keys[1] has a secret of keys[0]"),
    ("- {name: a, key: 12345678}", "keys[0].key[0] must be text, in quotes where it looks like a number"),
    ("- {name: a, key: sk-hush}", "keys[0].key[0] must have 8 to 512 characters"),
    (
        "- {name: a, key: [sk-hush-1, sk-hush-2, sk-hush-3, sk-hush-4, sk-hush-5]}",
        "keys[0].key must have at most 4",
    ),
    ("- {name: a, key_sha256: 1f}", "keys[0].key_sha256[0] must match"),
    (f"- {{name: a, key: {SECRET}, tenant: A.b}}", "keys[0].tenant must match"),
    (f"- {{name: a, key: {SECRET}, may: []}}", "keys[0].may must have at least 1 entry"),
    (f"- {{name: a, key: {SECRET}, may: [rule]}}", "keys[0].may[0] must be 'generate', 'watch' or 'administer'"),
    (f"- {{name: a, key: {SECRET}, requests_per_minute: 0}}", "keys[0].requests_per_minute must be at least 1"),
    (f"- {{name: a, key: {SECRET}, tokens_per_minute: 0}}", "keys[0].tokens_per_minute must be at least 1"),
    (f"- {{name: a, key: {SECRET}, tokens_per_day: 0}}", "keys[0].tokens_per_day must be at least 1"),
    (f"- {{name: a, key: {SECRET}, priority: -1001}}", "keys[0].priority must be at least -1000"),
    (f"- {{name: a, key: {SECRET}, priority: 1001}}", "keys[0].priority must be at most 1000"),
    (f"- {{name: a, key: {SECRET}, expires: 2030-01-31T00:00:00}}", "keys[0].expires needs a time zone, as in 20"),
    (f"- {{name: a, key: {SECRET}, tokens: 1}}", "keys[0].tokens is not known; a key has name, key, key_sha256"),
])  # fmt: skip
def test_load_error_names_the_field_and_hides_secrets(write, text, reason):
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    message = str(caught.value)
    assert message.startswith("serving.keys_file /")
    assert reason in message
    assert "\n" not in message
    assert "hush" not in message


def test_load_of_a_missing_file_raises_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"serving\.keys_file .* cannot be read: No such file"):
        load(tmp_path / "nowhere")


def test_load_warns_of_a_file_other_users_can_read(write, caplog):
    load(write(ENTRY))
    assert not caplog.records
    load(write(ENTRY, 0o640))
    assert "can be read by other users: run chmod 600" in caplog.text
