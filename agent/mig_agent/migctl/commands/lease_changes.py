"""`migctl release`, `migctl renew` and `migctl recover`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import counted, parse_duration
from mig_agent.migctl import failures
from mig_agent.migctl.lease_names import check_name, describe, find_lease, find_remembered, own_leases
from mig_agent.migctl.options import Common, completer_of, verb
from mig_agent.migctl.printing import print_json, until

if TYPE_CHECKING:
    from mig_agent.client import Client, Refused
    from mig_agent.client.to_json import Json
    from mig_agent.client.tokens import RememberedTokens
    from mig_agent.client.types import Recovered

_NO_DEADLINE = "none"


@verb()
@click.argument("leases", metavar="LEASE...", nargs=-1, shell_complete=completer_of("own_lease"))
@click.option(
    "--mine",
    is_flag=True,
    help="All of your own leases, those of a running `migctl run` too. Asks nothing, and says what it released.",
)
@click.option("--token", metavar="TOKEN", help="The lease's token. Default: the one that migctl remembers.")
@click.option(
    "--force",
    is_flag=True,
    help="As an administrator, also the lease of a pod that has come for it and does not use it. Refused while a "
    "process is on its devices, and where the kubelet gave it to the pod. Better delete the pod: one that was told of "
    "the devices may open them later all the same.",
)
def release(common: Common, *, leases: tuple[str, ...], mine: bool, token: str | None, force: bool) -> int:
    """Give the devices of a lease back.

    LEASE is an id, the beginning of one, or the name that it was requested under. The devices stay as idle instances,
    and the next request that they fit gets them at once.
    """
    output = common.wants()
    _check_named(leases, token, mine=mine)
    from mig_agent.client import Refused  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.client.tokens import RememberedTokens  # noqa: PLC0415 -- the same

    remembered = RememberedTokens.of_this_person()
    with common.client() as client:
        named = _own(client) if mine else _found(client, leases)
        for lease, about in named.items():
            try:
                client.release(lease, token if token is not None else remembered.token(lease), force=force)
            except Refused as error:
                if error.reason in {"lease-ended", "unknown-lease"}:
                    remembered.forget(lease)
                raise
            remembered.forget(lease)
            if output == "text":
                print(failures.one_line(f"released {about or lease}"))
    if output == "json":
        print_json({"released": list(named)})
    elif not named:
        print("you hold no lease here")
    return failures.DONE


def _check_named(leases: tuple[str, ...], token: str | None, *, mine: bool) -> None:
    for lease in leases:
        check_name(lease)
    if mine and (leases or token is not None):
        raise UsageError("cannot release all of yours and only some", "give --mine alone, or name the leases")
    if not leases and not mine:
        raise UsageError("cannot do that without LEASE", "name the leases, or give --mine for all of yours")
    if token is not None and len(leases) > 1:
        raise UsageError("cannot use one token for several leases", "release them one by one, or leave --token out")


def _own(client: Client) -> dict[str, str]:
    """Return this person's leases, each with what it is. What belongs to a pod that has come ends with the pod."""
    return {each.id: describe(each) for each in own_leases(client, client.status()) if not each.arrived}


def _found(client: Client, leases: tuple[str, ...]) -> dict[str, str]:
    """Return the leases that are meant: all are found before the first is released, so that a mistake releases none."""
    return {find_lease(client, each): "" for each in leases}


@verb()
@click.argument("lease", metavar="LEASE", shell_complete=completer_of("own_lease"))
@click.option("--ttl", metavar="TIME", help="Needed: when it ends from now, such as 2h, or none for no deadline.")
@click.option("--token", metavar="TOKEN", help="The lease's token. Default: the one that migctl remembers.")
def renew(common: Common, *, lease: str, ttl: str | None, token: str | None) -> int:
    """Give a lease a new deadline, or remove it.

    \b
      migctl renew train --ttl 2h     it ends two hours from now
      migctl renew train --ttl none   it does not end by itself any more

    LEASE is an id, the beginning of one, or the name that it was requested under.
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    output = common.wants()
    check_name(lease)
    if ttl is None:
        raise UsageError("cannot renew a lease without --ttl", "--ttl 2h sets a deadline, --ttl none removes it")
    if ttl.strip().lower() != _NO_DEADLINE:
        parse_duration(ttl)
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.client.tokens import RememberedTokens  # noqa: PLC0415 -- the same

    with common.client() as client:
        lease = find_lease(client, lease)
        known = token if token is not None else RememberedTokens.of_this_person().token(lease)
        info = client.renew(lease, known, ttl=ttl)
    if output == "json":
        print_json(to_json.encode(info))
    else:
        print(f"{lease} has no deadline" if info.expires_at is None else f"{lease} ends in {until(info.expires_at)}")
    return failures.DONE


@verb()
@click.argument("lease", metavar="[LEASE]", required=False)
@click.option("--token", metavar="TOKEN", help="The lease's token. Default: the one that migctl remembers.")
def recover(common: Common, *, lease: str | None, token: str | None) -> int:
    """Take a lease back whose agent has lost its ledger.

    The holder of the token gets the same devices again under the same lease, unless somebody else has them. LEASE is an
    id, the beginning of one, or the name that it was requested under. Without LEASE: all leases of this agent that
    migctl remembers; exits with 3 if one of them does not come back.
    """
    output = common.wants()
    if lease is not None:
        check_name(lease)
    elif token is not None:
        raise UsageError("cannot use a token without its lease", "name the lease, or leave --token out")
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.client.tokens import RememberedTokens  # noqa: PLC0415 -- the same

    remembered = RememberedTokens.of_this_person()
    with common.client() as client:
        if lease is not None:
            lease = find_remembered(client, remembered, lease)
            done = [client.recover(lease, token if token is not None else remembered.token(lease))]
            refused: list[tuple[str, Refused]] = []
        else:
            done, refused = _recover_all(client, remembered)
    if output == "json":
        failed: list[Json] = [
            {"lease": each, "reason": error.reason, "message": error.message} for each, error in refused
        ]
        print_json({"recovered": [to_json.encode(each) for each in done], "refused": failed})
    else:
        for found in done:
            print(_recovered_line(found))
        if not done and not refused:
            print("migctl remembers no lease of this agent")
    for _, error in refused:
        print(failures.one_line(error.message), file=sys.stderr)
    if refused:
        words = f"cannot recover {len(refused)} of {counted(len(done) + len(refused), 'lease')}"
        return failures.report_message(words, code=failures.REFUSED)
    return failures.DONE


def _recover_all(client: Client, remembered: RememberedTokens) -> tuple[list[Recovered], list[tuple[str, Refused]]]:
    """Recover each remembered lease; return those recovered, and the others with the reason. No refusal ends it.

    Where the ledger has lost nothing, a lease that is not there has ended: it is forgotten, and not returned.
    """
    from mig_agent.client import Refused  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    is_whole = client.status().ledger_doubt is None
    done, refused = [], []
    for lease in remembered.leases(str(client.address)):
        try:
            done.append(client.recover(lease, remembered.token(lease)))
        except Refused as error:
            if is_whole and error.reason == "lease-ended":
                remembered.forget(lease)
            else:
                refused.append((lease, error))
    return done, refused


def _recovered_line(recovered: Recovered) -> str:
    lease = recovered.lease
    devices = counted(sum(bool(each.uuid) for each in lease.devices), "device")
    words = f"has its {devices} again" if recovered.anew else f"is there already, with its {devices}"
    return "\n  ".join((f"lease {lease.id} {words}", *map(failures.one_line, recovered.notes)))
