"""The daemon's life: start-up, signals, reload, shutdown, and its service manager."""
