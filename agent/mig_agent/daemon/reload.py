"""Reads the configuration again while the agent runs (SIGHUP): what can change does, what cannot is named.

A configuration that cannot be used changes nothing: all that can fail is done before the first change, or undone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import structlog

from mig_agent.adapters.threads import CallThread
from mig_agent.config.changes import SettingChange, SettingChanges, compare
from mig_agent.config.load import Reading
from mig_agent.config.problems import InvalidConfigError
from mig_agent.core.errors import ConfigError
from mig_agent.core.quantities import counted
from mig_agent.daemon.agent import Agent, changed_engine_settings
from mig_agent.daemon.logs import Log
from mig_agent.daemon.roles import configured_roles, takes_away

_READING_SECONDS = 30.0
"""Time limit for reading the file and looking up users: a file server or a directory service may not answer."""
_PART = "configuration"
"""What status calls it where something is wrong."""
_MOST_MESSAGES = 5
_SOCKETS = frozenset({"socket_mode", "socket_group"})

_log = structlog.get_logger(__name__)


class Reloader:
    """Takes up changes of the configuration. Not thread-safe; use from the event loop, one reload at a time."""

    def __init__(self, agent: Agent, read: Callable[[], Reading], log: Log) -> None:
        """`read` reads the sources that the agent was started with; it blocks."""
        self._agent = agent
        self._read = read
        self._log = log
        self._roles = agent.roles
        self._thread = CallThread("configuration")

    async def reload(self) -> None:
        """Read the configuration and take it up as far as possible; the result is recorded as an event."""
        try:
            changes = await asyncio.wait_for(self._take_up(), _READING_SECONDS)
        except TimeoutError:
            self._thread = CallThread("configuration")  # the other one may wait for that file for ever
            self._refused((f"it could not be read in {_READING_SECONDS:g} s",))
        except InvalidConfigError as error:
            self._refused(tuple(each.message for each in error.problems))
        except ConfigError as error:
            self._refused((error.message,))
        except Exception:  # a fault of the agent itself must not be taken for a configuration in use
            self._refused(("the agent failed in a way that it did not expect; its log tells more",))
            raise
        else:
            self._taken(changes)
        await self._agent.servers.check_certificates()

    async def _take_up(self) -> SettingChanges:
        """Make all changes that are possible. Raises ConfigError, and then none was made."""
        agent = self._agent
        reading = await self._thread.run(self._read)
        if reading.settings is None:
            raise InvalidConfigError(reading.problems)
        changes = compare(agent.settings, reading.settings)
        settings, names = changes.settings, {each.name for each in changes.live}
        roles = await self._thread.run(lambda: configured_roles(settings, agent.servers.user_names))
        if names & _SOCKETS:
            agent.servers.change_access(settings.socket_mode, settings.socket_group)
        # Nothing fails from here on, and nothing waits.
        agent.settings = settings
        agent.manager.reconfigure(changed_engine_settings(agent.manager.settings, settings))
        for servicer in agent.servicers:
            servicer.use_roles(roles)
        former, self._roles = self._roles, roles
        if takes_away(former, roles):
            agent.servers.drop_remote()
        self._log.set_level(settings.log_level)
        if "metrics" in names:
            agent.metrics.change_address(settings.metrics)
        if names & {"web", *_SOCKETS}:  # the tokens are for those who may open the sockets
            agent.web.settings = settings
            agent.web.change_address(settings.web)
        return changes

    def _taken(self, changes: SettingChanges) -> None:
        words, waiting = [*map(str, changes.live)], _names(changes.at_restart)
        if waiting:
            self._agent.manager.report_problem(_PART, f"a restart is needed to change {waiting}")
            _log.warning(
                f"cannot change {waiting} while the agent runs", hint="restart it: systemctl restart mig-agent"
            )
            words.append(f"only a restart changes {waiting}")
        else:
            self._agent.manager.report_problem(_PART, "")
        self._agent.manager.record_reload(
            f"the configuration was read again: {', '.join(words) or 'nothing changed'}",
            changed=",".join(each.name for each in changes.live),
            at_restart=",".join(each.name for each in changes.at_restart),
        )

    def _refused(self, messages: tuple[str, ...]) -> None:
        shown = "; ".join(messages[:_MOST_MESSAGES])
        more = len(messages) - _MOST_MESSAGES
        shown += f"; and {counted(more, 'more mistake')}" if more > 0 else ""
        self._agent.manager.report_problem(_PART, f"the former one stays in use: {shown}")
        self._agent.manager.record_failed_reload(
            f"the configuration cannot be used, and the former one stays in use: {shown}"
        )


def _names(changes: Iterable[SettingChange]) -> str:
    *others, last = [each.name for each in changes] or [""]
    return f"{', '.join(others)} and {last}" if others else last
