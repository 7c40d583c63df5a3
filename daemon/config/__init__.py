"""Settings: what there are, what is known of each, and where their values come from."""

from .models import ModelSettings
from .setting import ENV_PREFIX, Setting
from .settings import SETTINGS, LogFormat, Settings, default_socket
from .sources import check_key, is_loopback, load

__all__ = [
    "ENV_PREFIX",
    "SETTINGS",
    "LogFormat",
    "ModelSettings",
    "Setting",
    "Settings",
    "check_key",
    "default_socket",
    "is_loopback",
    "load",
]
