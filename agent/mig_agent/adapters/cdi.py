"""CDI files: what the container runtime reads to put a device into a container.

One file per device that the kubelet counts, in JSON as the Container Device Interface specification defines it
(https://github.com/cncf-tags/container-device-interface). The runtime reads the folder each time it creates a
container, so a file appears whole or not at all: written under another name and renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from mig_agent.adapters.device_backends import DeviceAccess
from mig_agent.adapters.device_nodes import DeviceNode, nodes_of
from mig_agent.adapters.driver_libraries import DriverLibraries, Edits, NotNowError
from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.host import Host
from mig_agent.core.errors import MigAgentError

CDI_KIND = "mig-agent.io/mig"
"""Vendor and class of every device that the agent names to the kubelet."""
_VERSION = "0.5.0"
"""The oldest version with all that is written here: a runtime ignores files of a version that it does not know."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_LONGEST_NAME = 200
"""Limit of a device's name; file names have at most 255 bytes."""
_FILE_MODE = 0o644
_FOLDER_MODE = 0o755


class CdiError(MigAgentError):
    """A CDI file cannot be written or removed; has a message for people."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CdiFolder:
    """The agent's files in the container runtime's CDI folder; other programs' files are not touched.

    Thread-safe. Every call blocks: `write` for a disk's flush, and the first one after the driver changed for as long
    as `nvidia-ctk` takes, at most `driver_libraries.MOST_SECONDS`; so call them in a thread.
    """

    def __init__(
        self, folder: Path, kind: str, host: Host, *, simulated: bool, libraries: DriverLibraries | None = None
    ) -> None:
        """Write into `folder`. `simulated`: device nodes are plain files; without `libraries`: only device nodes."""
        self.folder = folder
        self.kind = kind
        self._host = host
        self._simulated = simulated
        self._libraries = libraries
        self._prefix = f"{kind.replace('/', '-')}_"
        self._mutex = threading.Lock()

    def qualified(self, name: str) -> str:
        """Return the qualified name for kubelet and runtime: `mig-agent.io/mig=mig-1g.10gb-0`."""
        return f"{self.kind}={name}"

    def prepare(self) -> None:
        """Create the folder, so that the runtime watches it before the first file is written. Raises CdiError."""
        self._make_folder()

    def warm_up(self) -> None:
        """Find the driver's libraries now, so that the first pod need not wait. Not while the driver is released."""
        self._find_libraries()

    def write(
        self,
        name: str,
        devices: Sequence[DeviceAccess],
        environment: Mapping[str, str],
        *,
        with_libraries: bool = True,
    ) -> None:
        """Write the file of one Kubernetes device, replacing any there is.

        `name` is the part after `=` of the qualified name. A container with several such devices gets the libraries
        from each of their files; `with_libraries=False` avoids running the same hooks twice. An unchanged file is not
        rewritten. Raises CdiError, and DriverError if the driver does not know an instance.
        """
        self._check(name)
        nodes = [node for device in devices for node in self._nodes(device)]
        libraries = self._find_libraries() if with_libraries else Edits()
        contents = _encode(self.kind, name, list(dict.fromkeys(nodes)), environment, libraries)
        with self._mutex:
            if self._read(name) == contents:
                return
            self._make_folder()
            try:
                with FAILPOINTS.around("cdi-file"):
                    self._replace(name, contents)
            except OSError as error:
                raise CdiError(
                    f"cannot write the CDI file {self._path(name)}: {error.strerror or error}",
                    "the container runtime learns from it which device to give; see that the folder may be written",
                ) from error

    def remove(self, name: str) -> None:
        """Remove the file of a device, if there is one. Raises CdiError."""
        self._check(name)
        with self._mutex:
            for path in (self._path(name), self._temporary(name)):
                if not path.exists():
                    continue
                try:
                    with FAILPOINTS.around("cdi-removal"):
                        path.unlink(missing_ok=True)
                except OSError as error:
                    raise CdiError(f"cannot remove the CDI file {path}: {error.strerror or error}") from error

    def names(self) -> tuple[str, ...]:
        """Return the devices that have a file, damaged and unfinished ones included; sorted. Raises CdiError."""
        try:
            found = [entry.name for entry in os.scandir(self.folder)]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise CdiError(f"cannot read the folder {self.folder}: {error.strerror or error}") from error
        wanted = re.compile(rf"{re.escape(self._prefix)}({_NAME.pattern})\.json|\.{re.escape(self._prefix)}(.+)\.tmp")
        matches = (wanted.fullmatch(name) for name in found)
        return tuple(sorted({match[1] or match[2] for match in matches if match}))

    # Inside

    @staticmethod
    def _check(name: str) -> None:
        if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
            raise CdiError(f"cannot name a CDI device {name!r}", "letters, digits and _ - . : are allowed in it")

    def _path(self, name: str) -> Path:
        return self.folder / f"{self._prefix}{name}.json"

    def _temporary(self, name: str) -> Path:
        # Runtimes read *.json and *.yaml and nothing else. It is in the same folder because a runtime's watch reports a
        # rename as the removal of the old name from a watched folder.
        return self.folder / f".{self._prefix}{name}.tmp"

    def _nodes(self, device: DeviceAccess) -> tuple[DeviceNode, ...]:
        return nodes_of(
            self._host,
            device.gpu_minor,
            device.gpu_instance_id,
            device.compute_instance_id,
            simulated=self._simulated,
        )

    def _find_libraries(self) -> Edits:
        try:
            return self._libraries.find() if self._libraries is not None else Edits()
        except NotNowError as error:
            raise CdiError(
                "cannot give a container the driver's libraries now: the agent is paused and has released the driver",
                "the kubelet tries again by itself; `migctl status` says why it is paused",
            ) from error

    def _make_folder(self) -> None:
        if self.folder.is_dir():
            return
        try:
            with FAILPOINTS.around("cdi-folder"):
                self.folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
                self.folder.chmod(_FOLDER_MODE)  # restore what the umask removed
        except OSError as error:
            raise CdiError(f"cannot make the folder {self.folder}: {error.strerror or error}", "see cdi_dir") from error

    def _read(self, name: str) -> bytes:
        try:
            return self._path(name).read_bytes()
        except OSError:
            return b""

    def _replace(self, name: str, contents: bytes) -> None:
        temporary = self._temporary(name)
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(temporary, flags, _FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, _FILE_MODE)
            file.write(contents)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(self._path(name))
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _encode(
    kind: str, name: str, nodes: Sequence[DeviceNode], environment: Mapping[str, str], libraries: Edits
) -> bytes:
    """Return the file's contents; equal for equal devices."""
    variables = [f"{key}={value}" for key, value in sorted(environment.items())]
    device = {"deviceNodes": [node.as_cdi() for node in nodes]} | ({"env": variables} if variables else {})
    whole = {
        "cdiVersion": _VERSION,
        "kind": kind,
        "devices": [{"name": name, "containerEdits": device}],
        "containerEdits": libraries.as_cdi(),
    }
    return f"{json.dumps(whole, indent=1)}\n".encode()
