"""Transport of requests and answers: bodies, errors, hosts, the proxy's protocol, and routing to a replica."""
