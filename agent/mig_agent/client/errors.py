"""Exceptions of the client, with a message, a hint, and what a program needs to decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mig_agent.core.errors import Blocker, MigAgentError

if TYPE_CHECKING:
    from mig_agent.client.types import StartEstimate


class ClientError(MigAgentError):
    """Base of the errors that a Client raises, except UsageError for invalid arguments."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        """Starts with "cannot"."""
        self.hint = hint
        """What would work; may be empty. A traceback shows it below the message."""
        self._show_hint(hint)

    @property
    def reason(self) -> str:
        """A word for programs."""
        return "failed"

    @property
    def retryable(self) -> bool:
        """True if the same call may succeed later."""
        return False

    @property
    def blockers(self) -> tuple[Blocker, ...]:
        """The obstacles, if known."""
        return ()

    @property
    def explanation(self) -> tuple[str, ...]:
        """The plans considered and what blocks each GPU, in lines for people, if known."""
        return ()

    @property
    def revision(self) -> int | None:
        """The node's present revision, with `revision-changed`."""
        return None

    @property
    def changed(self) -> tuple[str, ...]:
        """The changes that matter to plans, with `revision-changed`: as kinds of events such as `lease-granted`.

        Empty: none of them. `unknown`: more has happened than the agent remembers.
        """
        return ()

    @property
    def estimate(self) -> StartEstimate | None:
        """Time at which the request would probably start if it waited; only of a dry run that asked for it."""
        return None


class NoAgent(ClientError):  # noqa: N818 -- reads as what happened: `except NoAgent`
    """Raised when no agent answered: none listens, the socket may not be opened, or the connection broke for good."""

    @property
    def reason(self) -> str:
        """Always `no-agent`."""
        return "no-agent"

    @property
    def retryable(self) -> bool:
        """Always True: the agent may come back."""
        return True


class Refused(ClientError):  # noqa: N818 -- reads as what happened: `except Refused`
    """The agent refused the request; the message says why."""

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
        estimate: StartEstimate | None = None,
        end_reason: str = "",
    ) -> None:
        super().__init__(message, hint)
        self._reason = reason
        self._retryable = retryable
        self._blockers = blockers
        self._explanation = explanation
        self._revision = revision
        self._changed = changed
        self._estimate = estimate
        self.end_reason = end_reason
        """With `lease-ended`: why, a word such as `expired`, `released` or `gpu-lost`; empty if it is not known."""

    @property
    def reason(self) -> str:
        """A word such as `no-capacity`: of `mig_agent.core.errors.Reason`, or one that only a newer agent has."""
        return self._reason

    @property
    def retryable(self) -> bool:
        """True if the same request may succeed later."""
        return self._retryable

    @property
    def blockers(self) -> tuple[Blocker, ...]:
        """The obstacles, and who holds them."""
        return self._blockers

    @property
    def explanation(self) -> tuple[str, ...]:
        """The first lines of what was considered and what blocks each GPU."""
        return self._explanation

    @property
    def revision(self) -> int | None:
        """The node's present revision, with `revision-changed`."""
        return self._revision

    @property
    def changed(self) -> tuple[str, ...]:
        """The changes that matter to plans, with `revision-changed`: as kinds of events."""
        return self._changed

    @property
    def estimate(self) -> StartEstimate | None:
        """Time at which the request would probably start if it waited; only of a dry run that asked for it."""
        return self._estimate
