"""AMD GPUs as the kernel shows them under /sys/class/kfd. Only files are read: no library is needed.

What the files mean: the kernel's documentation of the amdgpu driver and of KFD topology ("Documentation/gpu/amdgpu").
"""

from pathlib import Path
from typing import TypedDict

_XGMI = 11  # io_links type of a direct connection between two GPUs; 2 is PCIe


class RawAmd(TypedDict):
    """One GPU, in the order of the KFD nodes, which is the order that ROCm counts in."""

    uuid: str
    name: str
    total: int
    free: int
    target: str
    pci: str
    processes: list[tuple[int, int]]
    links: list[tuple[str, str, int]]


def target_name(version: int) -> str:
    """The compiler's name of a chip from gfx_target_version: 90010 is gfx90a (decimal major, minor, hex step)."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def has_bf16(target: str) -> bool:
    """Chips with bfloat16 arithmetic: CDNA (gfx908 on) and RDNA 3 on (gfx11, gfx12)."""
    return target in ("gfx908", "gfx90a") or target.startswith(("gfx94", "gfx95", "gfx11", "gfx12"))


def ask(root: Path = Path("/")) -> list[RawAmd]:
    """All GPUs that ROCm would see; none without the driver. Raises OSError or ValueError if a file makes no sense."""
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    folders = sorted(nodes.iterdir(), key=lambda path: int(path.name)) if nodes.is_dir() else []
    gpus: dict[str, RawAmd] = {}
    for folder in folders:
        facts = _table(folder / "properties")
        if facts.get("simd_count", 0) == 0:  # a CPU
            continue
        gpus[folder.name] = _gpu(root, folder, facts)
    for node, gpu in gpus.items():
        for link in sorted((nodes / node / "io_links").glob("*/properties")):
            facts = _table(link)
            peer = gpus.get(str(facts.get("node_to", -1)))
            if peer is not None:
                kind = "xgmi" if facts.get("type") == _XGMI else "system"
                gpu["links"].append((peer["uuid"], kind, 1 if kind == "xgmi" else 0))
    return list(gpus.values())


def _gpu(root: Path, folder: Path, facts: dict[str, int]) -> RawAmd:
    minor = facts.get("drm_render_minor", 0)
    card = root / f"sys/class/drm/renderD{minor}/device"
    total = _number(card / "mem_info_vram_total")
    if total is None:  # before the driver is fully up, or in a container without /sys/class/drm
        banks = (_table(path) for path in (folder / "mem_banks").glob("*/properties"))
        total = sum(bank.get("size_in_bytes", 0) for bank in banks)
    used = _number(card / "mem_info_vram_used") or 0
    target = target_name(facts.get("gfx_target_version", 0))
    location, domain = facts.get("location_id", 0), facts.get("domain", 0)
    number = (_text(folder / "gpu_id") or "0").strip()
    return {
        "uuid": f"GPU-{facts.get('unique_id', 0):016x}" if facts.get("unique_id") else f"GPU-node{folder.name}",
        "name": (_text(card / "product_name") or "").strip() or f"AMD {target}",
        "total": total,
        "free": max(0, total - used),
        "target": target,
        "pci": f"{domain:04x}:{location >> 8:02x}:{location >> 3 & 0x1F:02x}.{location & 7}",
        "processes": _processes(root, number),
        "links": [],
    }


def _processes(root: Path, number: str) -> list[tuple[int, int]]:
    """(pid, bytes) of the processes that hold memory on the GPU with this KFD number."""
    found: list[tuple[int, int]] = []
    for file in sorted((root / "sys/class/kfd/kfd/proc").glob(f"*/vram_{number}")):
        held = _number(file)
        if held and file.parent.name.isdigit():
            found.append((int(file.parent.name), held))
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:  # many of these files exist on some chips and kernels only
        return None


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text(errors="replace").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
