"""One URL that says everything about an existing Redis, whichever settings say it."""

from __future__ import annotations

from urllib.parse import quote, urlencode, urlsplit

from osd.addresses import CA, PREFIX
from osd.config.base import ConfigError
from osd.config.secrets import secret
from osd.config.settings import Settings


def with_redis_address(settings: Settings) -> Settings:
    """The settings with ``redis_prefix``, ``redis.password_file`` and ``redis.ca_file`` as parts of ``redis_url``.

    Raises:
        ConfigError: there is no ``redis_url`` for them, or it does not go with them.
    """
    redis = settings.redis
    given = {"redis_prefix": settings.redis_prefix, "redis.password_file": redis.password_file}
    given = {name: value for name, value in {**given, "redis.ca_file": redis.ca_file}.items() if value}
    if not given:
        return settings
    if settings.redis_url is None:
        raise ConfigError(f"{next(iter(given))} is for an existing Redis: set redis_url too")
    try:
        parts = urlsplit(settings.redis_url)
        password = parts.password
    except ValueError:
        raise ConfigError("redis_url is not a URL") from None
    query: dict[str, str] = {}
    if redis.password_file is not None:
        if password is not None:
            raise ConfigError("redis_url has a password, and redis.password_file another: leave one out")
        user, _, place = parts.netloc.rpartition("@")
        secured = f"{user}:{quote(secret('redis.password_file', redis.password_file), safe='')}@{place}"
        parts = parts._replace(netloc=secured)
    if redis.ca_file is not None:
        file = redis.ca_file.expanduser().absolute()
        if parts.scheme not in ("rediss", "rediss+sentinel"):
            raise ConfigError("redis.ca_file is for TLS: redis_url must begin with rediss:// or rediss+sentinel://")
        if not file.is_file():
            raise ConfigError(f"redis.ca_file: there is no file {file}")
        query[CA] = str(file)
    if settings.redis_prefix:
        query[PREFIX] = settings.redis_prefix
    url = parts._replace(query="&".join(filter(None, (parts.query, urlencode(query))))).geturl()
    plain = redis.model_copy(update={"password_file": None, "ca_file": None})
    return settings.model_copy(update={"redis_url": url, "redis_prefix": "", "redis": plain})
