"""kube-scheduler's extender: says which nodes have room on their GPUs for a pod, and how well; then binds the pod.

kube-scheduler looks at processors, taints, affinities and all the rest, and asks this program about GPUs. Both are in
one pod, and this one listens on its loopback alone: whoever may call `bind` may put any pod on any node. It remembers
nothing that it cannot find again, so it may be killed at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from cluster import AGENTS_NAME, LOST, Cluster, Rejected, Waiting, read  # examples/scheduler/cluster.py

from mig_agent.client import AsyncFleet, ClientError, Tls, UsageError

PORT = int(os.environ.get("EXTENDER_PORT", "8888"))
ANSWER = float(os.environ.get("SCHEDULER_ANSWER_SECONDS", "5"))
"""Seconds that an agent has for an answer which needs no work."""
FORGETTING = 60
"""Seconds between two looks at which pods wait."""
BEST = 10
"""Of the scores that an extender may give."""
NO_AGENT = "no agent is ready there"
FAILED = (ClientError, UsageError, *LOST)

Json = dict[str, Any]
log = logging.getLogger("extender")


class Extender:
    """Its methods are what kube-scheduler calls; what they take and return is in k8s.io/kube-scheduler/extender/v1."""

    def __init__(self, cluster: Cluster, fleet: AsyncFleet) -> None:
        self.cluster = cluster
        self.fleet = fleet
        self.turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By a pod's UID. kube-scheduler asks again while an earlier call of its, which took too long, goes on."""

    async def filter(self, asked: Json) -> Json:
        """Return the nodes that can serve the pod, and why the others cannot; the pod's owner sees that."""
        scores, words = await self.look(asked)
        # Not "FailedNodes": there kube-scheduler would end other pods to make room, and cannot know which of them.
        failed = {node: words.get(node, NO_AGENT) for node in asked["NodeNames"] if node not in scores}
        return {"NodeNames": [*scores], "FailedAndUnresolvableNodes": failed}

    async def prioritize(self, asked: Json) -> list[Json]:
        """Return 10 for the best node, 0 for the worst, evenly in between. Not called if only one node is left."""
        scores, _ = await self.look(asked)
        order = sorted(set(scores.values()), reverse=True)
        return [
            {"Host": node, "Score": BEST * order.index(score) // (len(order) - 1) if len(order) > 1 else BEST}
            for node, score in scores.items()
        ]

    async def bind(self, asked: Json) -> Json:
        """Lease devices for the pod, confirm the lease, and bind the pod. If that is refused, the lease is released."""
        async with self.turns.setdefault(asked["PodUID"], asyncio.Lock()):
            pod = await self.cluster.pod(asked["PodNamespace"], asked["PodName"])
            if pod is None or pod.uid != asked["PodUID"]:
                return {"Error": "the pod is gone"}
            await self.fleet.update(await self.cluster.agents())
            await self.take_and_bind(pod, asked["Node"])
        return {"Error": ""}

    async def take_and_bind(self, pod: Waiting, node: str) -> None:
        """Lease devices on the node and bind the pod to it. Raises Rejected, or one of FAILED."""
        promise = await self.fleet.acquire(node, pod, devices=pod.devices)
        await promise.commit()
        try:
            # What is not answered may have happened: then the lease stays, and who asks again is given the same one.
            await self.cluster.bind(pod, node, promise.uuids)
        except Rejected:
            await promise.give_back()
            raise
        self.fleet.forget(pod)
        log.info("%s is on %s with %s", pod, node, ",".join(promise.uuids))

    async def forget(self) -> None:
        """For ever: what is known of pods that do not wait any more, which would be all that ever were."""
        while True:
            await asyncio.sleep(FORGETTING)
            with contextlib.suppress(*LOST):
                self.fleet.forget_all_but(await self.cluster.waiting())

    async def look(self, asked: Json) -> tuple[dict[str, float], dict[str, str]]:
        """Of the nodes that kube-scheduler names: the scores of those that can (low is good), and why others cannot."""
        pod, names = read(asked["Pod"]), asked["NodeNames"]
        silent = await self.fleet.update(await self.cluster.agents())
        promised = self.fleet.promised(pod)
        if promised in names:
            return {promised: 0.0}, {}  # an earlier binding was not answered: no second lease elsewhere
        # Containers get no shares of GPUs.
        others = self.fleet.agents.keys() - {*names}
        plans, refusals = await self.fleet.plan(devices=pod.devices, isolation="mig", but=others)
        # A kubelet fails for good a pod that comes while it has no devices to give.
        await self.cluster.see_nodes()
        objections = {node: why for node in plans if (why := self.cluster.objection(node, pod))}
        scores = {node: plans[node].score for node in names if node in plans.keys() - objections.keys()}
        return scores, silent | refusals | objections


def answer(ask: Callable[[Json], Awaitable[object]], loop: asyncio.AbstractEventLoop, asked: Json) -> object:
    """Return the answer of the event loop, or an error. Called in a thread for each call of kube-scheduler."""

    async def answered() -> object:
        try:
            return await ask(asked)
        except (*FAILED, Rejected) as error:
            log.warning("%s", error)
            return {"Error": str(error)}

    return asyncio.run_coroutine_threadsafe(answered(), loop).result()


async def run() -> None:
    """Until it is killed."""
    tls = Tls.in_folder(Path(os.environ.get("SCHEDULER_TLS", "/tls")), server_name=AGENTS_NAME)
    extender = Extender(Cluster(), AsyncFleet(tls=tls, answer=ANSWER))
    verbs = {"/filter": extender.filter, "/prioritize": extender.prioritize, "/bind": extender.bind}
    loop = asyncio.get_running_loop()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(answer(verbs[self.path], loop, asked)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing here: failures are logged by `answer`."""

    server = ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
    log.info("listening on port %s", server.server_port)
    await asyncio.gather(asyncio.to_thread(server.serve_forever), extender.forget())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    asyncio.run(run())
