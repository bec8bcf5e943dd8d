"""From what a pass over the data has seen to findings: pure, and the only place that knows when something is wrong.

Thresholds are set so that a healthy data set gives none; each stands beside its reason.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rung.launcher.data.advice import ADVICE
from rung.launcher.data.rowhash import Words
from rung.launcher.data.seen import NO_LABEL, SHOWN, Field, Hashes, Ints, Seen, Some, Tally
from rung.strategies.findings import Finding, Level

#: Values beyond this make the first layer's gradients about as large; normalised data stays within ten or so.
_FAR = 100.0
#: Columns of one field whose ranges differ by more than this: the small ones are lost beside the large ones.
_RANGES = 1e4
#: A length this many times that of nearly all others decides memory for all.
_LONG = 10
#: Classes in this proportion are worth data.imbalance.
_UNBALANCED = 10
#: Constant columns say something only once there are this many samples.
_ENOUGH = 20
#: Fewer copies than this part of all samples change nothing; they are told of, but not as a warning.
_FEW_COPIES = 0.005


@dataclass(kw_only=True, slots=True)
class Split:
    """One split as far as it was looked at: `read` of `size` samples."""

    name: str
    size: int
    seen: Seen = field(default_factory=Seen)
    hashes: Hashes = field(default_factory=Hashes)
    looked_at: int = 0
    deaths: list[tuple[int, str]] = field(default_factory=list)
    gave_up: bool = False
    own_collate: bool = False


def judge(splits: list[Split]) -> list[Finding]:
    """All findings, errors first."""
    found: list[Finding] = []
    for split in splits:
        found += _extent(split)
        found += _problems(split)
        found += _structure(split)
        for path, facts in split.seen.fields.items():
            found += _field(split, path, facts)
        found += _labels(split)
        found += _duplicates(split)
    if len(splits) > 1:
        found += _between(splits[0], splits[1])
    rank = {Level.ERROR: 0, Level.WARNING: 1, Level.OK: 2}
    return sorted(found, key=lambda f: rank[f.level])


def _finding(level: Level, subject: str, fact: str) -> Finding:
    why, fix = ADVICE.get(subject, ("", ""))
    return Finding(level=level, subject=subject, fact=fact, why=why, fix=fix)


def named(indices: list[int], count: int) -> str:
    """`sample 7`, `samples 3, 9 and 40 more`."""
    shown = indices[:8]
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return f"sample{'s' if count > 1 else ''} {', '.join(map(str, shown))}{more}"


def _extent(split: Split) -> Iterator[Finding]:
    seen, looked = split.seen, split.looked_at
    if looked >= split.size:
        fact = f"{split.name}: all {split.size:,} samples looked at"
    else:
        # No bad one among n drawn at random: fewer than 3/n are bad, with 95% confidence (the rule of three).
        share = 3 / max(looked, 1)
        fact = (
            f"{split.name}: {looked:,} of {split.size:,} samples looked at, drawn at random; what shows in none of "
            f"them is, with 95% confidence, wrong in fewer than {share:.2g} of all; --full looks at all"
        )
    yield _finding(Level.OK, "extent", fact)
    for index, how in split.deaths:
        yield _finding(Level.ERROR, "sample.kills", f"{split.name}: reading sample {index} ends the process: {how}")
    if split.gave_up and not split.deaths:
        yield _finding(Level.ERROR, "sample.kills", f"{split.name}: a process that read samples ended")
    for path, facts in seen.fields.items():
        if len(facts.lengths) > 1:
            yield _finding(Level.OK, "length", f"{split.name}: {_at(path)}{_lengths(facts)}")
    if seen.histogram:
        shown = ", ".join(f"{label}: {count:,}" for label, count in sorted(seen.histogram.items())[:20])
        yield _finding(
            Level.OK, "label.histogram", f"{split.name}: {shown}{', ...' if len(seen.histogram) > 20 else ''}"
        )


def _problems(split: Split) -> Iterator[Finding]:
    for subject, some in split.seen.problems.items():
        level = Level.WARNING if subject == "text.empty" else Level.ERROR
        yield _finding(level, subject, f"{split.name}: {named(some.indices, some.count)}: {some.text}")


def _structure(split: Split) -> Iterator[Finding]:
    """Fields, types and shapes that differ from most samples'. What a difference higher up explains is left out."""
    explained: list[str] = []
    for path in sorted(split.seen.fields, key=len):
        facts = split.seen.fields[path]
        if any(path != above and path.startswith(above) for above in explained):
            continue
        for tallies, subject, word in (
            (facts.kinds, "sample.keys", ""),
            (facts.dtypes, "sample.dtype", "type "),
            (facts.shapes, "sample.shape", "shape "),
        ):  # fmt: skip
            if len(tallies) < 2 or (subject == "sample.shape" and split.own_collate):
                continue
            usual, odd = _odd(tallies)
            least = min(odd.items(), key=lambda item: item[1].indices)
            kind = "sample.type" if subject == "sample.keys" and not least[0].startswith("the keys") else subject
            count = sum(some.count for some in odd.values())
            indices = sorted(i for some in odd.values() for i in some.indices)
            yield _finding(
                Level.ERROR, kind,
                f"{split.name}: {named(indices, count)}: {_at(path)}{word}{least[0]}, but most have {usual}",
            )  # fmt: skip
            explained.append(path)
            break


def _odd(tallies: Tally) -> tuple[str, dict[str, Some]]:
    usual = max(tallies, key=lambda name: (tallies[name].count, name))
    return usual, {name: some for name, some in tallies.items() if name != usual}


def _at(path: str) -> str:
    return f"{path}: " if path else ""


def _field(split: Split, path: str, facts: Field) -> Iterator[Finding]:
    where = f"{split.name}: {_at(path)}"
    broken = facts.broken_text
    if broken.count and facts.texts > 9 * broken.count:  # mostly text, so the rest was meant to be
        yield _finding(
            Level.ERROR, "text.utf8", f"{split.name}: {named(broken.indices, broken.count)}: {_at(path)}{broken.text}"
        )
    if len(facts.lengths) > 1:
        usual = _quantile(facts.lengths, 0.99)
        longest, index = facts.longest
        if longest > _LONG * max(usual, 1):
            yield _finding(
                Level.WARNING, "length.outlier",
                f"{where}sample {index} is {longest:,} long, and 99% are at most {usual:,}",
            )  # fmt: skip
    if facts.columns is not None and len(facts.dtypes) == 1:
        yield from _scale(where, facts)


def _scale(where: str, facts: Field) -> Iterator[Finding]:
    assert facts.columns is not None
    low, high = facts.columns
    if facts.rows >= _ENOUGH:
        constant = np.flatnonzero(low == high)
        if len(constant):
            columns = ", ".join(map(str, constant[:8])) + (" ..." if len(constant) > 8 else "")
            what = "every value is" if len(low) == 1 else f"column{'s' if len(constant) > 1 else ''} {columns} always"
            yield _finding(Level.WARNING, "feature.constant", f"{where}{what} {low[constant[0]]:g}")
    top, index = max((abs(facts.low[0]), facts.low[1]), (abs(facts.high[0]), facts.high[1]))
    ranges = (high - low)[high > low]
    if top > _FAR:
        yield _finding(
            Level.WARNING, "feature.scale",
            f"{where}values from {facts.low[0]:.4g} to {facts.high[0]:.4g} (sample {index}), "
            f"mean {facts.mean:.4g}, deviation {facts.deviation:.4g}",
        )  # fmt: skip
    elif len(ranges) > 1 and ranges.max() > _RANGES * ranges.min():
        yield _finding(
            Level.WARNING, "feature.scale",
            f"{where}the ranges of columns lie between {ranges.min():.3g} and {ranges.max():.3g}",
        )  # fmt: skip


def _quantile(lengths: dict[int, int], share: float) -> int:
    left = share * sum(lengths.values())
    for length in sorted(lengths):
        left -= lengths[length]
        if left <= 0:
            return length
    return max(lengths)


def _lengths(facts: Field) -> str:
    least, middle, most = min(facts.lengths), _quantile(facts.lengths, 0.5), facts.longest[0]
    return f"lengths {least:,} to {most:,}, half at most {middle:,}, 95% at most {_quantile(facts.lengths, 0.95):,}"


def _labels(split: Split) -> Iterator[Finding]:
    counts = {label: count for label, count in split.seen.histogram.items() if label >= 0}
    if not counts or split.name != "train" or "label.range" in split.seen.problems:
        return
    if len(counts) == 1:
        yield _finding(Level.WARNING, "label.single", f"{split.name}: every sample has label {next(iter(counts))}")
        return
    absent = [label for label in range(max(counts)) if label not in counts] if max(counts) < 10_000 else []
    if absent and len(absent) <= len(counts):
        shown = ", ".join(map(str, absent[:8])) + (" ..." if len(absent) > 8 else "")
        yield _finding(Level.WARNING, "label.absent", f"{split.name}: labels reach {max(counts)}, but none is {shown}")
    most, least = max(counts, key=lambda c: counts[c]), min(counts, key=lambda c: counts[c])
    if counts[most] >= _UNBALANCED * counts[least] and sum(counts.values()) >= 10 * len(counts):
        yield _finding(
            Level.WARNING, "label.imbalance",
            f"{split.name}: {counts[most]:,} samples have label {most}, {counts[least]:,} have label {least}",
        )  # fmt: skip


def _duplicates(split: Split) -> Iterator[Finding]:
    exact, near, indices, labels = split.hashes.arrays()
    if len(exact) == 0:
        return
    part = _part(split)
    copies, originals = _repeats(exact, indices)
    if len(copies):
        pairs = _pairs(copies, originals)
        yield _finding(
            _weight(copies, split), "duplicates.exact", f"{split.name}: {len(copies):,} copies, such as {pairs}{part}"
        )
    looks = np.flatnonzero(near != 0)
    first = np.unique(exact[looks], return_index=True)[1]
    looks = np.sort(looks[first])  # exact copies are told of already
    copies, originals = _repeats(near[looks], indices[looks])
    if len(copies):
        of = dict(zip(indices.tolist(), labels.tolist(), strict=True))
        differ = [(a, b) for a, b in zip(copies.tolist(), originals.tolist(), strict=True)
                  if NO_LABEL not in (of[a], of[b]) and of[a] != of[b]]  # fmt: skip
        if differ:
            a, b = differ[0]
            yield _finding(
                Level.WARNING, "label.conflict",
                f"{split.name}: {len(differ):,} samples nearly equal another of a different label, such as sample {a} "
                f"({of[a]}) and sample {b} ({of[b]}){part}",
            )  # fmt: skip
        if len(differ) < len(copies):
            pairs = _pairs(copies, originals)
            yield _finding(
                _weight(copies, split),
                "duplicates.near",
                f"{split.name}: {len(copies):,} near copies, such as {pairs}{part}",
            )


def _weight(copies: Ints, split: Split) -> Level:
    return Level.WARNING if len(copies) > _FEW_COPIES * split.seen.read * split.hashes.fraction else Level.OK


def _part(split: Split) -> str:
    share = split.hashes.fraction * min(1.0, split.looked_at / split.size) ** 2
    return "" if share >= 1 else f" (of the pairs there are, about {share:.2g} could be seen)"


def _repeats(hashes: Words, indices: Ints) -> tuple[Ints, Ints]:
    """Every sample that repeats one of a lower index, and that one."""
    order = np.lexsort((indices, hashes))
    hashes, indices = hashes[order], indices[order]
    starts = np.r_[True, hashes[1:] != hashes[:-1]]
    first = indices[np.maximum.accumulate(np.where(starts, np.arange(len(indices)), 0))]
    copies = np.flatnonzero(~starts)
    copies = copies[np.argsort(indices[copies])]
    return indices[copies], first[copies]


def _pairs(copies: Ints, originals: Ints) -> str:
    shown = [f"sample {a} = {b}" for a, b in zip(copies[:4].tolist(), originals[:4].tolist(), strict=True)]
    return ", ".join(shown)


def _between(train: Split, valid: Split) -> Iterator[Finding]:
    """What the two splits have in common, and should not."""
    most = max(train.hashes.halvings, valid.hashes.halvings)
    train.hashes.thin_to(most)
    valid.hashes.thin_to(most)
    exact, _, indices, _ = train.hashes.arrays()
    other, _, other_indices, _ = valid.hashes.arrays()
    shared, at, there = np.intersect1d(exact, other, return_indices=True)
    leaked = int(np.isin(other, shared).sum())
    if leaked:
        order = np.argsort(other_indices[there])
        pairs = ", ".join(f"valid {other_indices[there[n]]} = train {indices[at[n]]}" for n in order[: min(SHOWN, 4)])
        whole = train.looked_at >= train.size and valid.looked_at >= valid.size and not most
        more = "" if whole else " (of those looked at)"
        yield _finding(
            Level.WARNING, "leakage",
            f"{leaked:,} of {len(other):,} validation samples are in train too, such as {pairs}{more}",
        )  # fmt: skip
    if train.looked_at >= train.size and train.seen.histogram:
        unseen = sorted(label for label in valid.seen.histogram if label not in train.seen.histogram and label >= 0)
        if unseen:
            yield _finding(
                Level.WARNING, "label.unseen", f"valid has labels that train has not: {', '.join(map(str, unseen[:8]))}"
            )
