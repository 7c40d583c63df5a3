"""The front end: command line, configuration, sockets, HTTP, protocols, metrics."""
