"""Two devices: steps per second of rung's strategies against hand-written loops on raw DDP and raw DeepSpeed.

    python -m benchmarks.strategies

Both train the same model on the same batches in the same two processes, in turns of a few steps, so that a machine
that is busy is busy for both. Prints the ratio rung / raw of steps per second: the median over pairs of turns.
"""

import contextlib
import io
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore, TCPStore

from rung.strategies.base import Strategy
from rung.strategies.make import make_strategy
from rung.strategies.plan import Plan

WORLD, BATCH, WIDTH, DEPTH = 2, 32, 768, 8
TURNS, STEPS = 15, 6


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(10, (BATCH,), generator=generator)


def rung_step(strategy: Strategy) -> Callable[[], None]:
    x, y = (tensor.to(strategy.device) for tensor in batch(strategy.rank))

    def step() -> None:
        with strategy.micro(last=True):
            strategy.backward(nn.functional.cross_entropy(strategy.model(x), y))
        strategy.step(1.0)

    return step


def raw_ddp_step(rank: int) -> Callable[[], None]:
    model = nn.parallel.DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = make_optimizer(model)
    x, y = batch(rank)

    def step() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def raw_deepspeed_step(rank: int, stage: int) -> Callable[[], None]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    with contextlib.redirect_stdout(io.StringIO()):
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
            model = make_model()
        engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)
    x, y = batch(rank)

    def step() -> None:
        engine.backward(nn.functional.cross_entropy(engine(x), y))
        engine.step()

    return step


def work(rank: int, port: int, names: list[str], pipe: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=5))
    for name in names:
        plan = Plan(strategy=name, device="cpu", devices=WORLD, global_batch=BATCH * WORLD, micro_batch=BATCH)  # type: ignore[arg-type]
        strategy = make_strategy(plan, rank, PrefixStore(name, store))
        strategy.build(make_model, make_optimizer)
        raw = raw_deepspeed_step(rank, plan.zero_stage) if plan.zero_stage else raw_ddp_step(rank)
        pair = (rung_step(strategy), raw)
        for step in pair:
            for _ in range(3):
                step()
        ratios = []
        for turn in range(TURNS):
            took = [math.nan, math.nan]
            for which in ((0, 1), (1, 0))[turn % 2]:  # neither is always the first
                torch.distributed.barrier()
                began = time.perf_counter()
                for _ in range(STEPS):
                    pair[which]()
                torch.distributed.barrier()
                took[which] = time.perf_counter() - began
            ratios.append((took[1] / took[0], took[0] / STEPS))
        if rank == 0:
            pipe.send((name, statistics.median(r for r, _ in ratios), statistics.median(s for _, s in ratios)))
        strategy.close()


def main() -> None:
    """Prints one line for each strategy."""
    names = sys.argv[1:] or ["ddp", "zero1", "zero2", "zero3"]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    workers = [context.Process(target=work, args=(r, store.port, names, theirs), daemon=True) for r in range(WORLD)]
    for worker in workers:
        worker.start()
    for _ in names:
        if not ours.poll(600):
            sys.exit("a worker gave no result within ten minutes")
        name, ratio, step_s = ours.recv()
        print(f"{name}: {ratio:.3f} of raw steps per second, {step_s * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()
