"""`umbel keys`: API keys of tenants."""

from typing import Annotated

import typer

from ..config import TENANT_RULE, Settings, is_tenant_name
from ..errors import ConfigError
from .group import Group, fail
from .options import takes_settings

app = typer.Typer(cls=Group, help="Make and revoke API keys of tenants.", no_args_is_help=True)


@app.command("add")
@takes_settings("keys_file", serves=False)
def add(
    tenant: Annotated[str, typer.Argument(help="The tenant whose requests the key makes.")],
    *,
    proxy: Annotated[
        bool,
        typer.Option("--proxy", help="Let the key's owner name other tenants, in X-Umbel-Tenant."),
    ] = False,
    settings: Settings,
) -> None:
    """Make a key and print it, only this time; it works at once."""
    from ..identity.keys import add_key, read_keys  # noqa: PLC0415  (keeps --help quick)

    if not is_tenant_name(tenant):
        message = f"a tenant's name has {TENANT_RULE}"
        raise typer.BadParameter(message, param_hint="TENANT")
    path = settings.keys_path
    try:
        first = not read_keys(path)
        key, text = add_key(path, tenant, proxy=proxy)
    except ConfigError as error:
        fail(error)
    typer.echo(text)
    typer.echo(f"key {key.id} of {tenant}, in {path}; it is not shown again", err=True)
    if first:
        typer.echo("a daemon with this file asks every client on TCP for a key", err=True)


@app.command("list")
@takes_settings("keys_file", serves=False)
def list_(*, settings: Settings) -> None:
    """List the keys: their ids and tenants, but not the keys themselves."""
    from ..identity.keys import read_keys  # noqa: PLC0415  (keeps --help quick)

    try:
        keys = read_keys(settings.keys_path)
    except ConfigError as error:
        fail(error)
    if not keys:
        typer.echo(f"there are no keys in {settings.keys_path}; umbel keys add makes one", err=True)
        return
    width = max(len("tenant"), *(len(key.tenant) for key in keys))
    typer.echo(f"{'id':8}  {'tenant':{width}}  {'created':20}  proxy".rstrip())
    for key in keys:
        created = f"{key.created:%Y-%m-%dT%H:%M:%SZ}"
        typer.echo(
            f"{key.id:8}  {key.tenant:{width}}  {created:20}  {'yes' if key.proxy else ''}".rstrip()
        )


@app.command("revoke")
@takes_settings("keys_file", serves=False)
def revoke(
    key_id: Annotated[str, typer.Argument(help="As umbel keys list has it.")],
    *,
    settings: Settings,
) -> None:
    """Revoke a key; requests with it are refused from now on."""
    from ..identity.keys import revoke_key  # noqa: PLC0415  (keeps --help quick)

    try:
        key = revoke_key(settings.keys_path, key_id)
    except ConfigError as error:
        fail(error)
    typer.echo(f"key {key.id} of {key.tenant} is revoked")
