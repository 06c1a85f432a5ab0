"""HTTP transport: request bodies, errors, event streams, the proxy's protocol, and routing to a replica."""
