"""A callback for Lightning: on a notice it saves, and the program ends with code 75.

Lightning has its own accumulation and its own checkpoints:

    job = elastic.init(256, {"10G": 8, "40G": 40}, devices=1)
    trainer = Trainer(..., accumulate_grad_batches=job.steps, callbacks=[Yield(job, "last.ckpt")])
    trainer.fit(model, DataLoader(data, batch_size=job.batch_size), ckpt_path=Yield.last("last.ckpt"))

Sizes must divide the global batch here: Lightning counts all micro-batches alike. It also counts them to know where in
the epoch it is: where the size has changed, some samples of that one epoch are skipped or come twice.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from mig_agent import elastic


class Yield(Callback):
    """Saves a checkpoint and ends the program, between two steps of the optimizer."""

    def __init__(self, job: elastic.Job, path: str) -> None:
        if job.batch_size * job.steps != job.global_batch:
            raise elastic.UsageError(
                f"cannot spread {job.global_batch} samples over {job.steps} equal micro-batches",
                "choose a maximum that divides the global batch",
            )
        self.job = job
        self.path = Path(path)

    def on_train_batch_end(self, trainer: Any, _module: Any, _outputs: Any, _batch: Any, batch_idx: int) -> None:
        """Save and end the program if there is a notice; called after each micro-batch."""
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and self.job.should_yield():
            unfinished = self.path.with_suffix(".unfinished")
            trainer.save_checkpoint(unfinished)
            if trainer.is_global_zero:
                unfinished.replace(self.path)
            sys.exit(elastic.YIELD_CODE)

    @staticmethod
    def last(path: str) -> str | None:
        """Return the checkpoint to go on from, if there is one."""
        return path if Path(path).exists() else None
