"""Access control: API keys, rights, tenants, rate limits and token quotas."""
