"""What a node's kubelet says of its devices, asked as the agent asks it."""

from __future__ import annotations

from collections import Counter

import grpc

from mig_agent.pb.kubelet.podresources.v1 import podresources_pb2 as pb
from support.cluster.cluster import Cluster
from support.cluster.layout import NODE

_METHOD = "/v1.PodResourcesLister/GetAllocatableResources"
_TIMEOUT_SECONDS = 10.0


def healthy(cluster: Cluster, node: str = NODE) -> Counter[str]:
    """How many devices of each resource a pod could be admitted with; nothing while the kubelet does not answer."""
    socket = cluster.layout.of(node).private("/var/lib") / "kubelet/pod-resources/kubelet.sock"
    with grpc.insecure_channel(f"unix://{socket}", options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        call = channel.unary_unary(
            _METHOD,
            request_serializer=pb.AllocatableResourcesRequest.SerializeToString,
            response_deserializer=pb.AllocatableResourcesResponse.FromString,
        )
        try:
            answer = call(pb.AllocatableResourcesRequest(), timeout=_TIMEOUT_SECONDS)
        except grpc.RpcError:
            return Counter()
    found: Counter[str] = Counter()
    for devices in answer.devices:
        found[devices.resource_name] += len(devices.device_ids)
    return found
