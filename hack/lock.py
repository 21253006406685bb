"""Writes the lists of exact packages that the image and the Debian package are made of, with the hashes of their files.

Usage: .venv/bin/python hack/lock.py [check]     "check" only reports whether they fit pyproject.toml; needs no network

`deploy/requirements.txt` is what the agent runs on in the image and from the Debian package, and
`deploy/requirements-build.txt` what builds its wheel. Versions that pyproject.toml pins for the tests are taken from
there, so that both have what was tested; pip chooses the rest.
"""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = {"requirements.txt": ".[kubernetes]", "requirements-build.txt": ""}
"""File in deploy/, and what it is made from; empty: `build-system.requires`."""
INDEX = "https://pypi.org/simple/"
# Wheels for the images that people build: Python 3.11 to 3.13 on 64-bit Linux.
_TAG = re.compile(
    r"-(cp311|cp312|cp313|py3|py2\.py3|cp3\d+-abi3)[-.](?!.*(musllinux|macosx|win|ios|android|armv7|i686))"
)
_MACHINE = re.compile(r"any\.whl|x86_64\.whl|aarch64\.whl")
_LINK = re.compile(r'href="(?P<url>[^"#]+)#sha256=(?P<hash>[0-9a-f]{64})"')


def project() -> Mapping[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def canonical(name: str) -> str:
    """Return a name in the form in which PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    return canonical(re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0])


def pinned() -> dict[str, str]:
    """Return the version by name of each package that the tests run with."""
    extras = project()["project"]["optional-dependencies"]  # type: ignore[index] # TOML
    pairs = (each.split("==") for each in extras["dev"] if "==" in each)
    return {canonical(name): version for name, version in pairs}


def required(file: str) -> list[str]:
    """Return the requirements in pyproject.toml for this list."""
    whole = project()
    if not LISTS[file]:
        return list(whole["build-system"]["requires"])  # type: ignore[index] # TOML
    described = whole["project"]
    extras = re.findall(r"\[(\w+)\]", LISTS[file])
    optional = [each for extra in extras for each in described["optional-dependencies"][extra]]  # type: ignore[index] # TOML
    return [*described["dependencies"], *optional]  # type: ignore[index] # TOML


def locked(file: str) -> dict[str, str]:
    """Return the version by name of each package in the list."""
    text = (ROOT / "deploy" / file).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def resolve(file: str) -> dict[str, str]:
    """Return the version by name that pip chooses; nothing is installed."""
    what = [LISTS[file]] if LISTS[file] else required(file)
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pinned().items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--only-binary", ":all:", "--report", str(report), "--constraint", str(constraints), *what]
        subprocess.run(command, cwd=ROOT, check=True)
        found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    versions = {canonical(each["name"]): each["version"] for each in found}
    versions.pop("mig-agent", None)
    return dict(sorted(versions.items()))


def hashes(name: str, version: str) -> list[str]:
    """Return the hashes of the wheels that may be installed."""
    with urllib.request.urlopen(f"{INDEX}{name}/", timeout=60) as answer:  # noqa: S310 -- a fixed https address
        links = _LINK.finditer(html.unescape(answer.read().decode()))
    wanted = re.compile(rf"[^/]+-{re.escape(version)}-[^/]+\.whl")
    files = [(link["url"].rpartition("/")[2], link["hash"]) for link in links]
    return sorted(hash_ for file, hash_ in files if wanted.fullmatch(file) and fits(file))


def fits(file: str) -> bool:
    return bool(_TAG.search(file) and _MACHINE.search(file))


def lines(versions: Mapping[str, str]) -> Iterable[str]:
    yield "# Made by hack/lock.py; do not edit. Exact versions, and the hashes of the files that may be installed."
    for name, version in versions.items():
        found = hashes(name, version)
        if not found:
            raise SystemExit(f"cannot lock {name} {version}: the index has no wheel of it for 64-bit Linux")
        yield " \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{each}" for each in found)])


def wrong(file: str) -> list[str]:
    """Return texts that say what does not fit pyproject.toml; empty if all does."""
    there, pins = locked(file), pinned()
    missing = [f"{file} has no {name}" for name in map(name_of, required(file)) if name not in there]
    other = [
        f"{file} has {name} {there[name]}, the tests run with {version}"
        for name, version in pins.items()
        if there.get(name, version) != version
    ]
    return missing + other


def main() -> None:
    if sys.argv[1:] == ["check"]:
        words = [each for file in LISTS for each in wrong(file)]
        if words:
            raise SystemExit("\n".join([*words, "run hack/lock.py"]))
        return
    if sys.argv[1:]:
        raise SystemExit(__doc__)
    for file in LISTS:
        text = "\n".join(lines(resolve(file)))
        (ROOT / "deploy" / file).write_text(f"{text}\n", encoding="utf-8")
        print(f"wrote deploy/{file}: {len(locked(file))} packages")


if __name__ == "__main__":
    main()
