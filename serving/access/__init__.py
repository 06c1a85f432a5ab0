"""Who may ask the service for what, and how much: keys, rights, tenants, rates and quotas."""
