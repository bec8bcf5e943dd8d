"""The process that workers are forked from is started before anything else is imported: loading torch is what takes."""

#: What it imports while the launcher reads the job and looks at the hardware.
PRELOAD = ("torch", "rung.launcher.train", "rung.strategies.warm")


def prepare() -> None:
    """Starts it. Returns at once."""
    from rung.cluster.local import warm

    warm(PRELOAD, {})
