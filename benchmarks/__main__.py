"""Every benchmark, one after the other, or those that are named.

    python -m benchmarks [NAME ...]

Each runs in its own process, so that none measures what another left in memory. Ends with the names of those that
failed, as its exit status says too. All of them take an hour or more on two cores; leave the machine alone meanwhile.
"""

import subprocess
import sys
from pathlib import Path


def names() -> list[str]:
    """The modules of this folder that can be run."""
    here = Path(__file__).parent
    return sorted(
        path.stem for path in here.glob("*.py") if path.name != "__main__.py" and "\nif __name__ ==" in path.read_text()
    )


def main(wanted: list[str]) -> int:
    known = names()
    if unknown := [name for name in wanted if name not in known]:
        print(f"no benchmark is named {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted or known:
        print(f"\n=== {name}: python -m benchmarks.{name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode != 0:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
