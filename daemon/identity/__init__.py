"""The sender of a request: tenant, key, operator, priority, conversation."""
