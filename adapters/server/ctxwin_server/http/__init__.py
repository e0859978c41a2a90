"""Our own routes over HTTP and sockets, and the bounds of a connection."""
