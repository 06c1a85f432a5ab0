"""Names of domains, with and without a tenant."""

from __future__ import annotations

import pytest

from osd.config import ConfigError, check_domain, in_tenant, load_settings, tenant_of


@pytest.mark.parametrize("name", ["code", "0-_", "acme.code", "a" * 64 + "." + "b" * 64])
def test_domain_may_have_a_tenant_prefix(name):
    assert check_domain(name) == name


@pytest.mark.parametrize("name", ["", ".", "code.", ".code", "a.b.c", "../etc", "A", "a/b", "a" * 65, "code\n"])
def test_invalid_domain_names_are_refused(name):
    with pytest.raises(ValueError, match="domain"):
        check_domain(name)


def test_in_tenant_adds_a_missing_tenant():
    assert [tenant_of(name) for name in ("code", "acme.code")] == ["", "acme"]
    assert [in_tenant("acme", name) for name in ("code", "acme.code")] == ["acme.code", "acme.code"]
    assert in_tenant("", "code") == "code"


def test_tenant_domain_may_be_trained_and_served():
    settings = load_settings(None, ["trainer.extra_domains=acme.code,sql", "domain=acme.code"], {})
    assert settings.trainer.extra_domains == ("acme.code", "sql")
    assert settings.domain == "acme.code"
    with pytest.raises(ConfigError, match="domain"):
        load_settings(None, ["domain=a.b.c"], {})
