"""The nearest valid name, for messages about a name that is not one."""

from collections.abc import Iterable
from difflib import get_close_matches

# How other trainers call the same thing.
SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "batch_size": "batch",
    "global_batch_size": "batch",
    "train_batch_size": "batch",
    "per_device_train_batch_size": "micro_batch",
    "micro_batch_size": "micro_batch",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "num_steps": "steps",
    "gradient_clipping": "clip",
    "max_grad_norm": "clip",
    "grad_clip": "clip",
    "num_workers": "workers",
    "output_dir": "run",
    "run_dir": "run",
    "model": "task",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "random_seed": "seed",
    "mixed_precision": "precision",
    "dtype": "precision",
    "gpus": "devices",
    "num_gpus": "devices",
    "dataset": "data",
    "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "save_total_limit": "keep",
    "sync_bn": "sync_batchnorm",
    "sync_batch_norm": "sync_batchnorm",
}


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` most likely meant, or None. Case does not count; names of other tools are known."""
    known = {candidate.lower(): candidate for candidate in candidates}
    wanted = name.lower()[:200]  # matching is quadratic in the length
    spellings = {**{other: known[ours] for other, ours in SYNONYMS.items() if ours in known}, **known}
    if wanted in spellings:
        return spellings[wanted]
    close = get_close_matches(wanted, spellings, n=1, cutoff=0.65)
    return spellings[close[0]] if close else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean lr?`, or nothing where no candidate is near."""
    found = nearest(name, candidates)
    return f"; did you mean {found}?" if found is not None else ""
