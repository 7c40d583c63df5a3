"""What ends a command in a sentence; each message says what to change."""


class StartError(Exception):
    """The daemon cannot start."""


class ConfigError(StartError):
    """A setting is unknown, or its value is of no use."""


class FlagError(ConfigError):
    """The command line is wrong: a flag or an argument has a value that is of no use."""


class SocketError(StartError):
    """The socket cannot be had."""


class ClientError(Exception):
    """The daemon cannot be reached, or refused; the message is for the user."""


class ServiceError(Exception):
    """umbel cannot be made a service of this machine, or is none; the message is for the user."""
