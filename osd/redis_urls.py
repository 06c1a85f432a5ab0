"""What URLs of Redis may say beyond what redis-py knows."""

CA, PREFIX = "ssl_ca_certs", "prefix"
"""Fields of the URL's query: a file of certificates, as redis-py has it, and what every key begins with."""

SENTINEL = "redis+sentinel", "rediss+sentinel"
"""Schemes of URLs that name sentinels: ``redis+sentinel://host:port,host:port/service/db``."""
