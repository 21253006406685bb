"""What a scheduler does: asks several agents how they would serve a request, and takes the best of them.

`python examples/choose_node.py --gpu-memory 4G ADDRESS ...` prints the address of the node with the best plan. Only the
gRPC API is used, as from any other language.
"""

from __future__ import annotations

import argparse
import sys

import grpc

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1 import partition_manager_pb2_grpc as rpc


def score_of(address: str, memory: str) -> float | None:
    """How well the node could serve it, lower is better; None where it cannot."""
    request = pb.PlanRequest(requests=[pb.Request(wants=[pb.Want(memory=memory)])])
    with grpc.insecure_channel(address) as channel:
        try:
            answer = rpc.PartitionManagerStub(channel).Plan(request, timeout=10)
        except grpc.RpcError as error:
            print(f"{address}: {error.details()}", file=sys.stderr)
            return None
    outcome = answer.outcomes[0]
    if outcome.HasField("refusal"):
        print(f"{address}: {outcome.refusal.message}", file=sys.stderr)
        return None
    steps = ", ".join(step.message for step in outcome.plan.steps)
    print(f"{address}: {steps} (score {outcome.plan.score:.3g})", file=sys.stderr)
    return float(outcome.plan.score)


def main() -> int:
    """Exit code 1 where no node can."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-memory", default="4G")
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS")
    given = parser.parse_args()
    scores = {address: score_of(address, given.gpu_memory) for address in given.addresses}
    able = {address: score for address, score in scores.items() if score is not None}
    if not able:
        return 1
    print(min(able, key=lambda address: able[address]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
