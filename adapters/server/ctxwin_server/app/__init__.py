"""The service of one server, and the gateway that every request passes: keys, accounts, bodies, tenants, chats."""
