"""The tables of docs/reference/reliability.md that follow from those of the tests.

`PYTHONPATH=agent:tests .venv/bin/python tests/support/reliability.py` puts them into the page.
"""

from __future__ import annotations

from pathlib import Path

from support.nvmlfaults import ANY, COUNTERS, HANGING, LISTED, ON_ITS_FACE, SERVING, SHARES, STARTING, pairs
from support.reached import KILLS, REACHED

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/reliability.md"


def crash_table() -> list[str]:
    """Return a row for each kind with the failpoints that it reaches."""
    names = frozenset[str]().union(*REACHED.values())
    size = f"**{len(names)} failpoints, before and after each** x **{len(REACHED)} kinds**"
    rows = [f"| {kind} | {', '.join(f'`{each}`' for each in sorted(through))} |" for kind, through in REACHED.items()]
    return [
        f"{size}: {KILLS} of these combinations occur, and the agent, or a training, is killed in each of them.",
        "",
        "| kind | failpoints that it reaches |",
        "|---|---|",
        *rows,
    ]


def fault_table() -> list[str]:
    """Return a row for each call with the codes that it is made to answer."""
    size = f"**{len(LISTED)} calls, {pairs(LISTED)} calls x codes**"
    rows = [f"| `{call}` | {', '.join(code.name for code in codes) or '-'} |" for call, codes in LISTED.items()]
    any_call = ", ".join(code.name for code in ANY)
    return [
        f"{size}: those listed here, and {any_call} from every call.",
        f"{pairs(SERVING)} strike while it serves, {pairs(STARTING)} while it starts;",
        f"{pairs(ON_ITS_FACE)} concern calls that the engine does not make,",
        f"{pairs(COUNTERS)} calls whose failure leaves a figure unknown,",
        f"{pairs(SHARES)} those without which a GPU is not shared. {len(HANGING)} calls hang.",
        "",
        "| call | codes that nvml.h lists |",
        "|---|---|",
        *rows,
    ]


TABLES = {"failpoints": crash_table, "nvml faults": fault_table}
_END = "<!-- end -->"


def shown(name: str) -> list[str]:
    """Return what the page has between the marks of a table."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    return rest.partition(_END)[0].splitlines()


def write() -> None:
    """Write the tables into the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}{mark}{chr(10).join(table())}\n{_END}{rest.partition(_END)[2]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
