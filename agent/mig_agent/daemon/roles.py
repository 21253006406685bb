"""Roles of callers, from the settings."""

from __future__ import annotations

from mig_agent.adapters.transport.peer_credentials import own_uid
from mig_agent.adapters.users import Users, uid_named
from mig_agent.config import Settings
from mig_agent.core.errors import ConfigError
from mig_agent.frontends.grpc.identity import Roles

_ROOT = 0


def takes_away(before: Roles, after: Roles) -> bool:
    """Return True if a certificate that had a role before has none, or a lesser one, after."""
    if before.admins - after.admins or before.schedulers - after.schedulers:
        return True
    return after.users is not None and (before.users is None or bool(before.users - after.users))


def configured_roles(settings: Settings, users: Users) -> Roles:
    """Return the roles. Raises ConfigError for a user that this machine does not have."""
    local = {_ROOT, own_uid()}  # users who can open the administrators' socket are trusted equally on the other one
    for name in settings.socket_schedulers:
        uid = uid_named(name)
        if uid is None:
            raise ConfigError(
                f"cannot let {name} ask for others: there is no such user", "socket_schedulers takes names and numbers"
            )
        local.add(uid)
    return Roles(
        admins=frozenset(settings.tls_admins),
        schedulers=frozenset(settings.tls_schedulers),
        users=None if settings.tls_users is None else frozenset(settings.tls_users),
        local_schedulers=frozenset(local),
        user_name=users.name,
    )
