"""How rows travel between the roles: one contract (base), several transports."""
