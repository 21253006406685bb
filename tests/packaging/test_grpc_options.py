"""gRPC ignores an option that it does not know, in silence."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from mig_agent.client import channels
from mig_agent.daemon import servers


@pytest.mark.parametrize("name", sorted({name for name, _ in (*servers._OPTIONS, *channels._OPTIONS)}))
def test_grpc_knows_the_option(name: str) -> None:
    library = importlib.import_module("grpc._cython.cygrpc").__file__
    assert library is not None
    assert name.encode() + b"\0" in Path(library).read_bytes()
