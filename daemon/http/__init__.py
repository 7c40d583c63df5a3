"""HTTP: sockets, connections, bodies, the application, and its handlers."""
