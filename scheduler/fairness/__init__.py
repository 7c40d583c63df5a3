"""Who is served next: fair between tenants, and between the conversations of a tenant."""
