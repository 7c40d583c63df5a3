"""The keys of launchd.plist(5), and what a job's plist has that launchd would not understand."""

from collections.abc import Iterator
from typing import Any

_STRINGS = [str]
JOB: dict[str, Any] = {
    "Label": str,
    "Disabled": bool,
    "UserName": str,
    "GroupName": str,
    "inetdCompatibility": {"Wait": bool},
    "LimitLoadToHosts": _STRINGS,
    "LimitLoadFromHosts": _STRINGS,
    "LimitLoadToSessionType": str,
    "LimitLoadToHardware": dict,
    "LimitLoadFromHardware": dict,
    "Program": str,
    "BundleProgram": str,
    "ProgramArguments": _STRINGS,
    "EnableGlobbing": bool,
    "EnableTransactions": bool,
    "EnablePressuredExit": bool,
    "OnDemand": bool,
    "ServiceIPC": bool,
    "KeepAlive": {
        "SuccessfulExit": bool,
        "NetworkState": bool,
        "PathState": dict,
        "OtherJobEnabled": dict,
        "Crashed": bool,
        "AfterInitialDemand": bool,
    },
    "RunAtLoad": bool,
    "RootDirectory": str,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "Umask": int,
    "TimeOut": int,
    "ExitTimeOut": int,
    "ThrottleInterval": int,
    "InitGroups": bool,
    "WatchPaths": _STRINGS,
    "QueueDirectories": _STRINGS,
    "StartOnMount": bool,
    "StartInterval": int,
    "StartCalendarInterval": dict,
    "StandardInPath": str,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "Debug": bool,
    "WaitForDebugger": bool,
    "SoftResourceLimits": dict.fromkeys(
        [
            "Core",
            "CPU",
            "Data",
            "FileSize",
            "MemoryLock",
            "NumberOfFiles",
            "NumberOfProcesses",
            "ResidentSetSize",
            "Stack",
        ],
        int,
    ),
    "HardResourceLimits": dict,
    "Nice": int,
    "ProcessType": ("Background", "Standard", "Adaptive", "Interactive"),
    "AbandonProcessGroup": bool,
    "LowPriorityIO": bool,
    "LowPriorityBackgroundIO": bool,
    "MaterializeDatalessFiles": bool,
    "LaunchOnlyOnce": bool,
    "MachServices": dict,
    "Sockets": {
        "Listeners": {
            "SockType": ("stream", "dgram", "seqpacket"),
            "SockPassive": bool,
            "SockNodeName": str,
            "SockServiceName": str,
            "SockFamily": ("IPv4", "IPv6", "IPv4v6", "Unix"),
            "SockProtocol": ("TCP", "UDP"),
            "SockPathName": str,
            "SecureSocketWithKey": str,
            "SockPathOwner": int,
            "SockPathGroup": int,
            "SockPathMode": int,
            "Bonjour": bool,
            "MulticastGroup": str,
        }
    },
    "LaunchEvents": dict,
    "HopefullyExitsLast": bool,
    "HopefullyExitsFirst": bool,
    "SessionCreate": bool,
    "LegacyTimers": bool,
    "AssociatedBundleIdentifiers": _STRINGS,
}
"""The keys of launchd.plist(5), and what each may be: a type, words, a list of a type, a table."""


def faults(value: Any, kind: Any, where: str = "") -> Iterator[str]:
    """Say which keys and values launchd would not understand."""
    if isinstance(kind, dict):
        if not isinstance(value, dict):
            yield f"{where} is no dictionary"
            return
        for key, part in value.items():
            if key not in kind:
                yield f"{where}/{key} is no key"
            else:
                yield from faults(part, kind[key], f"{where}/{key}")
    elif isinstance(kind, list):
        if type(value) is not list or not all(type(part) is kind[0] for part in value):
            yield f"{where} is no list of {kind[0].__name__}"
    elif isinstance(kind, tuple):
        if value not in kind:
            yield f"{where} is none of {kind}"
    elif type(value) is not kind:  # True is an int, but not for launchd
        yield f"{where} is no {kind.__name__}"
