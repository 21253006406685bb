"""Checks of elastic training with PyTorch, in a process that has it: `python elastic_torch.py FOLDER` runs them all."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from mig_agent import elastic
from mig_agent.elastic.torch import Optimizer, Scheduler
from support.elastic_checks import run

SAMPLES, GLOBAL_BATCH = 53, 8
STEPS_AN_EPOCH = -(-SAMPLES // GLOBAL_BATCH)
INNER: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def data() -> Any:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, torch.tanh(inputs.sum(1, keepdim=True)))


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def weights_of(model: Any) -> Any:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def plain(kind: str, epochs: int = 2, *, clip: bool = False, halve: bool = False) -> Any:
    """Whole global batches and PyTorch alone, in the order that a job takes."""
    model, dataset = network(), data()
    optimizer = INNER[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5 if halve else 1.0)
    job = elastic.init(GLOBAL_BATCH, GLOBAL_BATCH)
    for _ in job.epochs(epochs):
        for indices in job.batches(range(SAMPLES), shuffle=True):
            optimizer.zero_grad()
            mse_loss(model(dataset.tensors[0][indices]), dataset.tensors[1][indices]).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
    return weights_of(model)


def near(found: Any, expected: Any) -> None:
    difference = (found - expected).abs().max().item()
    assert difference < 1e-12, difference


def check_each_optimizer_in_each_shape(_folder: Path) -> None:
    for kind, inner in INNER.items():
        expected = plain(kind)
        for most in (1, 3, 5, 8):
            for set_to_none in (True, False):
                model = network()
                job = elastic.init(GLOBAL_BATCH, most)
                optimizer = Optimizer(inner(model.parameters()))
                loader = DataLoader(data(), batch_size=999, shuffle=True)
                for _ in job.epochs(2):
                    for inputs, outputs in job.batches(loader):
                        mse_loss(model(inputs), outputs).backward()
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=set_to_none)
                near(weights_of(model), expected)


def check_closures(_folder: Path) -> None:
    model = network()
    job = elastic.init(GLOBAL_BATCH, 3)
    optimizer = Optimizer(INNER["SGD"](model.parameters()))
    for _ in job.epochs(2):
        for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):

            def closure(inputs: Any = inputs, outputs: Any = outputs) -> Any:
                optimizer.zero_grad()
                loss = mse_loss(model(inputs), outputs)
                loss.backward()
                return loss

            assert optimizer.step(closure).item() >= 0
    near(weights_of(model), plain("SGD"))


def check_schedulers_step_once_per_global_step(_folder: Path) -> None:
    for most in (2, 8):
        model = network()
        job = elastic.init(GLOBAL_BATCH, most)
        optimizer = Optimizer(INNER["SGD"](model.parameters()))
        scheduler = Scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5))
        for _ in job.epochs(2):
            for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
                mse_loss(model(inputs), outputs).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert scheduler.last_epoch == 2 * STEPS_AN_EPOCH
        assert scheduler.get_last_lr() == [0.1 * 0.5 ** (2 * STEPS_AN_EPOCH // 3)]
        near(weights_of(model), plain("SGD", halve=True))


def check_clipping_sees_the_whole_gradient(_folder: Path) -> None:
    model = network()
    job = elastic.init(GLOBAL_BATCH, 3)
    optimizer = Optimizer(
        INNER["SGD"](model.parameters()),
        before_step=lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    )
    for _ in job.epochs(2):
        for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
            optimizer.zero_grad()
            mse_loss(model(inputs), outputs).backward()
            optimizer.step()
    near(weights_of(model), plain("SGD", clip=True))


def check_the_loss_may_be_weighted_instead(_folder: Path) -> None:
    model = network()
    job = elastic.init(GLOBAL_BATCH, 3)
    optimizer = Optimizer(INNER["SGD"](model.parameters()), weigh_gradients=False)
    for _ in job.epochs(2):
        for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
            (job.weight * mse_loss(model(inputs), outputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
    near(weights_of(model), plain("SGD"))


class CpuScaler:
    """What GradScaler does to an optimizer; the one of PyTorch 1.13 does nothing without CUDA."""

    def __init__(self) -> None:
        self.scale_by = 2.0**20

    def step(self, optimizer: Any) -> None:
        finite = True
        for group in optimizer.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.grad.div_(self.scale_by)
                    finite = finite and bool(torch.isfinite(each.grad).all())
        if finite:
            optimizer.step()
        self.scale_by *= 2 if finite else 0.5


def check_scaled_gradients(_folder: Path) -> None:
    """Scaled differently in each micro-batch; a global step with one that is not finite is left out as a whole."""
    for broken in (set[int](), {0, 7, 8, 14, 19}):
        model, count = network(), 0
        job = elastic.init(GLOBAL_BATCH, 3)
        optimizer, scaler = Optimizer(INNER["SGD"](model.parameters())), CpuScaler()
        skipped = set[int]()
        for _ in job.epochs(2):
            for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
                optimizer.zero_grad()
                loss = mse_loss(model(inputs), outputs) * scaler.scale_by
                if count in broken:
                    loss = loss * float("inf")
                    skipped.add(job.position.step if not job.is_last else job.position.step - 1)
                loss.backward()
                scaler.step(optimizer)
                count += 1
        if not broken:
            near(weights_of(model), plain("SGD"))
        else:
            # The same by hand.
            expected = network()
            inner, dataset = INNER["SGD"](expected.parameters()), data()
            job = elastic.init(GLOBAL_BATCH, GLOBAL_BATCH)
            number = 0
            for _ in job.epochs(2):
                for indices in job.batches(range(SAMPLES), shuffle=True):
                    inner.zero_grad()
                    mse_loss(expected(dataset.tensors[0][indices]), dataset.tensors[1][indices]).backward()
                    if number not in skipped:
                        inner.step()
                    number += 1
            assert len(skipped) == 4
            near(weights_of(model), weights_of(expected))


def check_the_scaler_of_pytorch_takes_it(_folder: Path) -> None:
    model = network()
    job = elastic.init(GLOBAL_BATCH, 3)
    optimizer = Optimizer(INNER["SGD"](model.parameters()))
    scaler = torch.cuda.amp.GradScaler(enabled=torch.cuda.is_available())
    for _ in job.epochs(2):
        for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
            scaler.scale(mse_loss(model(inputs), outputs)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    near(weights_of(model), plain("SGD"))


def check_parameters_that_are_unfrozen_later(_folder: Path) -> None:
    model = network()
    model[0].requires_grad_(requires_grad=False)
    job = elastic.init(GLOBAL_BATCH, 3)
    optimizer = Optimizer(INNER["SGD"](model.parameters()))
    assert not model[0].weight.requires_grad
    model[0].requires_grad_()
    for _ in job.epochs(2):
        for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
            mse_loss(model(inputs), outputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    near(weights_of(model), plain("SGD"))


def check_wrong_uses_are_told(_folder: Path) -> None:
    model = network()
    job = elastic.init(GLOBAL_BATCH, 3)
    optimizer = Optimizer(INNER["SGD"](model.parameters()))

    def told(action: Callable[[], object]) -> str:
        try:
            action()
        except elastic.UsageError as error:
            return str(error)
        return ""

    assert "cannot wrap LBFGS" in told(lambda: Optimizer(torch.optim.LBFGS(model.parameters())))
    assert "no micro-batch is at work" in told(optimizer.step)
    before = weights_of(model)
    heard = io.StringIO()
    with contextlib.redirect_stderr(heard):
        for number, (inputs, outputs) in enumerate(job.batches(DataLoader(data())), 1):
            mse_loss(model(inputs), outputs).backward()
            if number % 3 == 0:  # an accumulation of the program's own
                optimizer.step()
                assert "cannot step twice" in told(optimizer.step)
                optimizer.zero_grad()
    near(weights_of(model), before)
    assert heard.getvalue().count("elastic: step 1 is left out: 1 of its 3 micro-batches were stepped") == 1
    assert heard.getvalue().count("\n") == 1


def check_a_step_that_is_left_is_done_again(_folder: Path) -> None:
    model = network()
    job = elastic.init(GLOBAL_BATCH, 3)
    optimizer = Optimizer(INNER["SGD"](model.parameters()))
    left = iter([0, 1, 5, 11, 17])
    for epoch in range(2):
        while job.position.epoch == epoch:
            leave_at = next(left, -1)
            for number, (inputs, outputs) in enumerate(job.batches(DataLoader(data(), shuffle=True))):
                optimizer.zero_grad()
                mse_loss(model(inputs), outputs).backward()
                optimizer.step()
                if number == leave_at:
                    break
    near(weights_of(model), plain("SGD"))


def check_frozen_and_added_parameters(_folder: Path) -> None:
    model = network()
    first, _, last = model
    elastic.init(GLOBAL_BATCH, 3)
    optimizer = Optimizer(torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9))
    optimizer.add_param_group({"params": last.parameters()})
    job = elastic.current_job()
    for _ in job.epochs(2):
        for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
            mse_loss(model(inputs), outputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    near(weights_of(model), plain("SGD"))
    assert len(optimizer.param_groups) == 2
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "SGD" in repr(optimizer)


def check_it_goes_on_from_a_checkpoint_in_another_shape(folder: Path) -> None:
    os.environ["MIG_AGENT_CHECKPOINTS"] = str(folder / "checkpoints")
    expected = plain("Adam", 3)
    for most, end_after in ((3, 4), (8, 9), (1, 15), (5, None)):
        model = network()
        job = elastic.init(GLOBAL_BATCH, most)
        optimizer = Optimizer(INNER["Adam"](model.parameters()))

        def save(path: Path, model: Any = model, optimizer: Any = optimizer) -> None:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

        def load(path: Path, model: Any = model, optimizer: Any = optimizer) -> None:
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])

        job.checkpoint(save, load)
        try:
            for _ in job.epochs(3):
                for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
                    mse_loss(model(inputs), outputs).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if job.is_last and job.position.step == end_after:
                        os.kill(os.getpid(), signal.SIGTERM)
        except elastic.Yielded:
            assert job.position.step == end_after
        job.close()
        if end_after is None:
            near(weights_of(model), expected)


class Numbers(Dataset[int]):
    """Tells which process loaded it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()


def check_workers_load_ahead_and_survive_a_notice(_folder: Path) -> None:
    """A signal to the whole group of processes reaches them, too, and they go on until the training yields."""
    job = elastic.init(4, 2)
    taken, workers = list[int](), set[int]()
    for indices, loaders in job.batches(DataLoader(Numbers(), num_workers=2)):
        taken += indices.tolist()
        workers |= set(loaders.tolist())
        if len(taken) == 8:
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
    assert taken == list(range(40))
    assert len(workers) == 2
    assert os.getpid() not in workers


def check_orders_that_are_not_known_are_refused(_folder: Path) -> None:
    job = elastic.init(4, 2)
    loader = DataLoader(Numbers(), sampler=WeightedRandomSampler([1.0] * 40, 40))
    for each, words in ((loader, "cannot resume the order of a WeightedRandomSampler"), (stream(), "IterableDataset")):
        try:
            next(job.batches(each))
        except elastic.UsageError as error:
            told = str(error)
        else:
            told = ""
        assert words in told, told
    (first, *_) = job.batches(loader, order=lambda _epoch: range(39, -1, -1))
    assert first[0].tolist() == [39, 38]


def stream() -> Any:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(range(3))

    return DataLoader(Stream())


def check_several_processes_over_gloo(folder: Path) -> None:
    """Three processes and then two, with batches that are uneven between them, and DDP of both kinds."""
    expected = plain("SGD", 3)
    for views in (False, True):
        shared = folder / str(views)
        shared.mkdir()
        for number, (processes, most, ends) in enumerate(((3, 1, True), (2, 3, True), (5, 4, False))):
            context = multiprocessing.get_context("fork")
            started = [
                context.Process(target=rank, args=(shared, number, each, processes, most, ends, views))
                for each in range(processes)
            ]
            for each in started:
                each.start()
            for each in started:
                each.join(60)
            assert [each.exitcode for each in started] == [75 if ends else 0] * processes
        near(torch.load(shared / "weights"), expected)


def rank(folder: Path, run: int, number: int, processes: int, most: int, ends: bool, views: bool) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(processes)}
    os.environ["MIG_AGENT_CHECKPOINTS"] = str(folder / "checkpoints")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{run}", rank=number, world_size=processes
    )
    model = torch.nn.parallel.DistributedDataParallel(network(), gradient_as_bucket_view=views)
    job = elastic.init(GLOBAL_BATCH, most)
    assert (job.devices, job.rank, job.master) == (processes, number, number == 0)
    optimizer = Optimizer(INNER["SGD"](model.parameters()))

    def save(path: Path) -> None:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def load(path: Path) -> None:
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])

    job.checkpoint(save, load)
    for _ in job.epochs(3):
        for inputs, outputs in job.batches(DataLoader(data(), shuffle=True)):
            mse_loss(model(inputs), outputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            if ends and job.is_last and number == processes - 1 and job.position.step == 5 * (run + 1):
                os.kill(os.getpid(), signal.SIGUSR1)  # one of them alone is told
    if job.master:
        torch.save(weights_of(model.module), folder / "weights")


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(globals(), Path(sys.argv[1]))
