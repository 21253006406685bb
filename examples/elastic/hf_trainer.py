"""A callback for the Trainer of Hugging Face transformers: on a notice it saves, and the program ends with code 75.

The Trainer has its own accumulation, and skips what its checkpoint has seen of the data:

    job = elastic.init(256, {"10G": 8, "40G": 40}, devices=1)
    arguments = TrainingArguments(..., per_device_train_batch_size=job.batch_size,
                                  gradient_accumulation_steps=job.steps)
    trainer = Trainer(..., args=arguments, callbacks=[Yield(job)])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
    exit_if_yielded(job)

Sizes must divide the global batch here: the Trainer has one size for all micro-batches.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback

from mig_agent import elastic


class Yield(TrainerCallback):
    """Asks for a checkpoint and the end of training, between two steps of the optimizer."""

    def __init__(self, job: elastic.Job) -> None:
        if job.batch_size * job.steps != job.global_batch:
            raise elastic.UsageError(
                f"cannot spread {job.global_batch} samples over {job.steps} equal micro-batches",
                "choose a maximum that divides the global batch",
            )
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **_others: Any) -> Any:
        """Have the Trainer save and stop if there is a notice; called after each step of the optimizer."""
        if self.job.should_yield():
            control.should_save = control.should_training_stop = True
        return control


def exit_if_yielded(job: elastic.Job) -> None:
    """End with exit code 75 if training has stopped for a notice."""
    if job.should_yield():
        sys.exit(elastic.YIELD_CODE)
