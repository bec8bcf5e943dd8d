"""Starts small groups of worker processes, trains contract cases in them, and computes what they should give.

One group runs many cases one after the other, so that a start is paid once for each strategy and world size.
"""

import contextlib
import functools
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from contract_cases import CASES, MOVES_AFTER, Batch, Branching, Case, Normed

from rung.strategies.base import Strategy
from rung.strategies.make import make_strategy
from rung.strategies.plan import Plan, cut

# A group runs some twenty cases, on a machine that may be busy with others.
DEADLINE_S = 270.0

Job = Callable[[int, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """One interval, as a file would hold it."""

    name: str
    shape: tuple[int, ...]
    start: int
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one rank saw of one training."""

    losses: list[float]  # this rank's share of the weighted mean loss of each step
    norms: list[float]
    full: dict[str, np.ndarray]  # empty arrays but on rank 0
    saved: list[Saved]


def plan_of(case: Case, strategy: str, world: int) -> Plan:
    return Plan(
        strategy=strategy,  # type: ignore[arg-type]
        device="cpu",
        devices=world,
        global_batch=case.global_batch,
        micro_batch=case.micro_batch,
        precision=case.precision,  # type: ignore[arg-type]
        activation_checkpointing=case.checkpointed,
        shares=case.shares.get(world, ()),
        sync_batchnorm=case.synchronised,
    )


def part(batch: Batch, start: int, stop: int) -> Batch:
    return tuple(t[start:stop] for t in batch)


def train(strategy: Strategy, case: Case, steps: range) -> tuple[list[float], list[float]]:
    """The trainer's loop, bare: this rank's share of each loss, and each norm."""
    plan, losses, norms = strategy.plan, [], []
    for step in steps:
        batch = case.data(step)
        global_weight = case.weight(batch)
        slices = cut(len(batch[0]), plan).slices[strategy.rank]
        share = 0.0
        for slot, (start, stop) in enumerate(slices):
            micro = part(batch, start, stop) if stop > start else part(batch, 0, 1)
            weight = case.weight(micro) if stop > start else 0.0
            with strategy.micro(last=slot == len(slices) - 1, empty=stop == start):
                loss = case.loss(strategy.model, micro)
                strategy.backward(loss * (weight * plan.devices / global_weight))
            if weight:
                share += float(loss.detach()) * weight / global_weight
        if strategy.paths is not None:
            strategy.paths.hear(strategy.collectives.agree(strategy.paths.tell()), strategy.collectives, step)
        norms.append(strategy.step(case.clip))
        losses.append(share)
    return losses, norms


def reference(
    case: Case, plan: Plan, overflowed: frozenset[int] = frozenset()
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """The same training in plain torch, float64, one process, whole global batches: losses, norms, final state.

    Only batch norm looks at how a batch is cut; its slices are run one by one, with statistics for each rank, or
    those of all ranks as one where it is synchronised.
    `overflowed` are steps that fp16 dropped to find its loss scale; they are dropped here too.
    """
    model = case.make_model().double()
    optimizer = case.optimizer(model)
    ranks = [{n: b.clone() for n, b in model.named_buffers()} for _ in range(plan.devices)]
    losses, norms = [], []
    for step in range(case.steps):
        batch = case.data(step)
        total = case.weight(batch)
        loss_sum = 0.0
        for rank, micros in enumerate(seen_at_once(case, plan, batch)):
            for name, buffer in model.named_buffers():
                buffer.copy_(ranks[rank][name])
            for micro in micros:
                loss = case.loss(model, micro) * (case.weight(micro) / total)
                loss.backward()
                loss_sum += loss.item()
            ranks[rank] = {n: b.clone() for n, b in model.named_buffers()}
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.sqrt(sum(g.square().sum() for g in gradients)).item()
        if math.isfinite(norm) and step not in overflowed:
            if case.clip is not None and norm > case.clip:
                for gradient in gradients:
                    gradient.mul_(case.clip / (norm + 1e-6))  # as torch and DeepSpeed do
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
        norms.append(norm)
    for name, buffer in model.named_buffers():
        buffer.copy_(ranks[0][name])
    state = {name: tensor.detach().numpy() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return losses, norms, state


def seen_at_once(case: Case, plan: Plan, batch: Batch) -> list[list[Batch]]:
    """For each set of statistics, the micro-batches that it sees one after the other."""
    if case.model is not Normed:
        return [[batch]]
    ranks = [
        [part(batch, start, stop) for start, stop in slices if stop > start]
        for slices in cut(len(batch[0]), plan).slices
    ]
    if not case.synchronised:
        return ranks
    slots = zip(*cut(len(batch[0]), plan).slices, strict=True)
    return [[tuple(torch.cat([t[start:stop] for start, stop in slot]) for t in batch) for slot in slots]]


def fill(strategy: Strategy, source: dict[str, np.ndarray]) -> None:
    """What loading a checkpoint does: each destination that the checkpoint has, from the flat array of its name."""
    for interval in strategy.intervals("load"):
        whole = source.get(interval.name)
        if whole is None:
            assert interval.name.startswith("optim."), f"{interval.name} is not in the checkpoint"
            continue
        piece = torch.from_numpy(whole[interval.start : interval.start + interval.length])
        interval.data.copy_(piece)
    strategy.restored()


def take(strategy: Strategy) -> list[Saved]:
    return [
        Saved(name=i.name, shape=i.shape, start=i.start, values=i.data.detach().cpu().to(i.dtype).clone().numpy())
        for i in strategy.intervals("save")
    ]


def assemble(pieces: list[Saved]) -> dict[str, np.ndarray]:
    """Whole flat arrays from the intervals of all ranks; fails unless each element is owned exactly once."""
    by_name: dict[str, list[Saved]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    whole = {}
    for name, parts in by_name.items():
        parts.sort(key=lambda p: p.start)
        end = 0
        for piece in parts:
            assert piece.start == end, f"{name}: element {min(end, piece.start)} is owned twice or by nobody"
            assert piece.shape == parts[0].shape, name
            end += len(piece.values)
        assert end == math.prod(parts[0].shape), f"{name}: {end} of {parts[0].shape} saved"
        whole[name] = np.concatenate([p.values for p in parts])
    return whole


@contextlib.contextmanager
def built(case: Case, plan: Plan, rank: int, store: Any, seed: int = 0) -> Iterator[Strategy]:
    strategy = make_strategy(plan, rank, store)
    try:
        strategy.build(lambda: case.make_model(seed), case.optimizer)
        yield strategy
    finally:
        strategy.close()


def run_case(case: Case, plan: Plan, rank: int, store: Any) -> Result:
    """Trains one case on one rank. Ranks start from different seeds: rank 0's weights count."""
    with built(case, plan, rank, store, seed=rank) as strategy:
        losses, norms = train(strategy, case, range(case.steps))
        full = {name: tensor.numpy().copy() for name, tensor in strategy.full_parameters()}
        return Result(losses=losses, norms=norms, full=full, saved=take(strategy))


def run_and_save(case: Case, plan: Plan, rank: int, store: Any) -> tuple[list[Saved], Result]:
    """What this rank saves after `MOVES_AFTER` steps, and the run that then goes on unchanged."""
    with built(case, plan, rank, store) as strategy:
        losses, norms = train(strategy, case, range(MOVES_AFTER))
        saved = take(strategy)
        more = train(strategy, case, range(MOVES_AFTER, case.steps))
        full = {name: tensor.numpy().copy() for name, tensor in strategy.full_parameters()}
        return saved, Result(losses=losses + more[0], norms=norms + more[1], full=full, saved=take(strategy))


def load_and_run(case: Case, plan: Plan, source: dict[str, np.ndarray], rank: int, store: Any) -> Result:
    """Loads `source` into a model made from another seed, and goes on from there."""
    with built(case, plan, rank, store, seed=99 + rank) as strategy:
        fill(strategy, source)
        losses, norms = train(strategy, case, range(MOVES_AFTER, case.steps))
        full = {name: tensor.numpy().copy() for name, tensor in strategy.full_parameters()}
        return Result(losses=losses, norms=norms, full=full, saved=take(strategy))


GROUPS = [("single", 1), *((name, n) for name in ("ddp", "zero1", "zero2", "zero3") for n in (1, 2, 3, 4))]


def refused(case: Case, strategy: str) -> str:
    """Why a strategy need not run a case; empty if it must."""
    if not case.only or strategy in case.only:
        return ""
    if case.model is Branching:
        return f"{strategy} communicates inside the passes, so all ranks must use the same parameters"
    return f"DeepSpeed holds master weights in one type, float32, so {strategy} does not train this"


@functools.cache
def results(strategy: str, world: int) -> dict[str, list[Any]]:
    """All cases under one strategy and world size, from one group of processes."""
    jobs: dict[str, Job] = {
        case.name: functools.partial(run_case, case, plan_of(case, strategy, world))
        for case in CASES
        if not refused(case, strategy)
    }
    return run_group(world, jobs)


def run_group(world: int, jobs: dict[str, Job], deadline_s: float = DEADLINE_S) -> dict[str, list[Any]]:
    """Runs each job(rank, store) in `world` processes, one after the other; returns, by name, what the ranks gave.

    A job that raises ends the group: its traceback is the result of that name, as text, and the later ones are absent.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "accelerate", "deepspeed"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=deadline_s))
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(rank, store.port, jobs, theirs, deadline_s), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, list(jobs), time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join(timeout=5)


def _collect(pipes: list[Connection], names: list[str], until: float) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {}
    for name in names:
        got: list[Any] = [None] * len(pipes)
        waiting = dict(enumerate(pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(until - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"{name}: ranks {sorted(waiting)} did not answer in time")
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                got[rank] = _receive(waiting.pop(rank), rank)
        results[name] = got
        if any(isinstance(value, str) for value in got):
            break
    return results


def _receive(pipe: Connection, rank: int) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return f"rank {rank} died"


def _worker(rank: int, port: int, jobs: dict[str, Job], pipe: Connection, deadline_s: float) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=deadline_s))
    try:
        for name, job in jobs.items():
            pipe.send(job(rank, dist.PrefixStore(name, store)))
    except Exception:
        pipe.send(traceback.format_exc())
