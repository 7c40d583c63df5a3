"""Models as handlers see them, over a service that is none or a stand-in."""

from types import SimpleNamespace
from typing import Any, cast

from umbel.daemon.config import ModelSettings
from umbel.daemon.lifecycle.display import Display
from umbel.daemon.lifecycle.service_manager import ServiceManager, StartUp
from umbel.daemon.models.pool import ModelPool
from umbel.daemon.models.slot import ModelSlot, Resident
from umbel.daemon.requests.service import Service
from umbel.daemon.requests.workers import Workers
from umbel.scheduler.tenants import TenantUse


def serving(service: Service | None = None) -> ModelPool:
    """Make the models of a daemon that has started; nothing can be loaded."""
    slot = ModelSlot("tiny", ModelSettings())
    if service is not None:
        slot.resident = Resident(service, cast("Any", None), cast("Any", None))
    workers = Workers(1, 1.0, TenantUse())
    told = StartUp(ServiceManager(None), 1.0, Display())
    loader = cast("Any", SimpleNamespace(bound_tenants=lambda: None))  # nothing is loaded
    pool = ModelPool([slot], loader, workers, told, TenantUse(), most_waiting=1, timeout=1.0)
    pool.started = True
    return pool
