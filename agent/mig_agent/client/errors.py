"""What can go wrong for a caller of the agent, as exceptions with words, a hint, and what a program needs to decide."""

from __future__ import annotations

from mig_agent.core.errors import Blocker, MigAgentError


class ClientError(MigAgentError):
    """The base of what a Client raises, beside UsageError for what cannot be meant."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        """Starts with "cannot"."""
        self.hint = hint
        """What would work; may be empty."""

    @property
    def reason(self) -> str:
        """A word for programs."""
        return "failed"

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed at another moment."""
        return False

    @property
    def blockers(self) -> tuple[Blocker, ...]:
        """What stands in the way, where that is known."""
        return ()

    @property
    def explanation(self) -> tuple[str, ...]:
        """What was weighed and what blocks each GPU, in lines for people, where that is known."""
        return ()

    @property
    def revision(self) -> int | None:
        """With `revision-changed`: the node's revision now."""
        return None

    @property
    def changed(self) -> tuple[str, ...]:
        """With `revision-changed`: what has changed of what plans go by, as kinds of events such as `lease-granted`.

        Empty: nothing of it. `unknown`: more has happened than the agent remembers.
        """
        return ()


class NoAgent(ClientError):  # noqa: N818 -- reads as what happened: `except NoAgent`
    """No agent answered: none listens, the socket may not be opened, or the connection broke and stayed so."""

    @property
    def reason(self) -> str:
        """Always `no-agent`."""
        return "no-agent"

    @property
    def retryable(self) -> bool:
        """Always: the agent may be back."""
        return True


class Refused(ClientError):  # noqa: N818 -- reads as what happened: `except Refused`
    """The agent said no, in words."""

    def __init__(
        self,
        *,
        reason: str,
        message: str,
        hint: str = "",
        retryable: bool = False,
        blockers: tuple[Blocker, ...] = (),
        explanation: tuple[str, ...] = (),
        revision: int | None = None,
        changed: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, hint)
        self._reason = reason
        self._retryable = retryable
        self._blockers = blockers
        self._explanation = explanation
        self._revision = revision
        self._changed = changed

    @property
    def reason(self) -> str:
        """A word such as `no-capacity`; the words of `mig_agent.core.errors.Reason`, and any that a newer agent has."""
        return self._reason

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed at another moment."""
        return self._retryable

    @property
    def blockers(self) -> tuple[Blocker, ...]:
        """What stands in the way, and who holds it."""
        return self._blockers

    @property
    def explanation(self) -> tuple[str, ...]:
        """What was weighed and what blocks each GPU; its first lines."""
        return self._explanation

    @property
    def revision(self) -> int | None:
        """As told with `revision-changed`."""
        return self._revision

    @property
    def changed(self) -> tuple[str, ...]:
        """As told with `revision-changed`."""
        return self._changed
