"""`migctl request`: takes a lease that lasts until it is released."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from mig_agent.migctl.commands.plan import check_explain, print_plan
from mig_agent.migctl.gpu_names import of_model
from mig_agent.migctl.options import Common, asking_of, asking_options, verb
from mig_agent.migctl.printing import check_stdout, device_words, print_json, print_whole, until
from mig_agent.migctl.progress import Progress

if TYPE_CHECKING:
    from mig_agent.client.types import Device, Grant


@verb()
@asking_options
def request(common: Common, *, dry_run: bool, explain: bool, **parameters: Any) -> int:  # noqa: ANN401 -- what asking_options made
    """Take devices, and keep them until `migctl release`.

    \b
      migctl request --gpu-memory 4G
      eval "$(migctl request --mig-profile 1g.10gb -o env)"
      migctl request --device 1g.10gb --device 4G --wait 10m

    -o takes env too: lines for a shell's `eval`.
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    output = common.wants("env")
    check_explain(dry_run=dry_run, explain=explain)
    asking = asking_of(parameters)
    with common.client() as client:
        asking = of_model(client, asking, parameters["gpu_model"])
        if dry_run:
            return print_plan(client, asking, output, explain=explain)
        check_stdout()
        progress = Progress()
        try:
            lease = client.acquire(on_queued=progress, on_away=progress.away, confirm=False, **asking)
        except KeyboardInterrupt:
            raise progress.interrupted() from None
        finally:
            progress.clear()
        try:
            _remember(lease.id, lease.token, str(client.address), asking.get("name") or "")
            _print(lease.grant, output)
        except BaseException:
            # The lease was not shown, so the user could not release it.
            lease.release()
            raise
        # Only after the lease was printed: the agent ends a lease that was not confirmed.
        lease.confirm()
    return 0


def _remember(lease: str, token: str, address: str, name: str) -> None:
    from mig_agent.client.tokens import RememberedTokens  # noqa: PLC0415 -- only where it is needed
    from mig_agent.migctl.failures import report_message  # noqa: PLC0415 -- the same

    try:
        RememberedTokens.of_this_person().remember(lease, token, address, name)
    except (OSError, RuntimeError) as error:  # RuntimeError: a person without a home folder
        report_message(
            f"cannot remember the token of lease {lease}: {error}",
            f"to release it: migctl release {lease} --token {token}",
            code=0,
        )


def _print(grant: Grant, output: str) -> None:
    if output == "json":
        from mig_agent.client import to_json  # noqa: PLC0415 -- only where it is needed

        print_json(to_json.encode(grant))
        return
    if output == "env":
        from mig_agent.client.leases import environment_of  # noqa: PLC0415 -- only where it is needed

        print_whole("\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment_of(grant).items()))
        return
    lines = [f"lease {grant.id}" + (f", for {until(grant.expires_at)}" if grant.expires_at is not None else "")]
    for each in grant.devices:
        lines.append(f"  {_device(each)}")
        # Of a single device it is in the environment below.
        lines += [f"    {each.uuid}"] if len(grant.devices) > 1 else []
    lines += [f"note: {each}" for each in grant.notes]
    lines += [f"  {name}={shlex.quote(value)}" for name, value in grant.env.items()]
    lines.append(f"give it back with: migctl release {grant.id}")
    print_whole("\n".join(lines))


def _device(each: Device) -> str:
    if each.is_share:
        return device_words(each)
    return f"{device_words(each)}, {'reused' if each.reused else 'created' if each.is_mig else 'whole'}"
