"""The client for asyncio, with the requests, answers, errors and retry rules of the synchronous one."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 -- the agent needs 3.11, the distribution mig-agent-client does not
    # Only from 3.11 on a task tells whether it was cancelled, or a call of gRPC's inside of it.
    raise ImportError(
        "cannot import the client for asyncio: it needs Python 3.11 or newer. Hint: Client works with 3.10"
    )
