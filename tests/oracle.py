"""Algorithm 2 for one sample, line by line, on Python floats."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field


@dataclass
class Reading:
    tokens: list[list[float]] = field(default_factory=list)
    index: list[list[int]] = field(default_factory=list)
    weight: list[list[float]] = field(default_factory=list)
    ponder: float = 0.0
    score_gap: float = math.inf  # smallest difference that decided an order, between tokens with different keys
    halt_gap: float = math.inf  # smallest non-zero distance of the halting sum from the threshold


def read(query, bank, steps, threshold, merge, h, taken, update, ponder, ponder_at_halt) -> Reading:
    halting, read_so_far, reading = 0.0, set(taken), Reading()
    q = list(query[:h])
    while halting < threshold and len(reading.tokens) < steps:
        free = [c for c in range(len(bank)) if c not in read_so_far]
        d = {c: sum(q[j] * bank[c][j] for j in range(h)) for c in free}
        order = sorted(free, key=lambda c: (-d[c], c))
        reading.score_gap = min(reading.score_gap, _gap(order[: merge + 1], d, bank, h))
        i = order[:merge]
        largest = max(d[c] for c in i)
        e = [math.exp((d[c] - largest) / math.sqrt(h)) for c in i]
        w = [x / sum(e) for x in e]
        s = [sum(w[k] * bank[i[k]][j] for k in range(merge)) for j in range(len(bank[0]))]
        reading.tokens.append(s)
        reading.index.append(i)
        reading.weight.append(w)
        after = halting + max(w)
        if after != threshold:
            reading.halt_gap = min(reading.halt_gap, abs(after - threshold))
        halting = after
        if halting < threshold or ponder_at_halt:
            if ponder == "gini":
                reading.ponder += 1 - sum(x * x for x in w)
            elif ponder == "max":
                reading.ponder += 1 - max(w)
            else:
                reading.ponder += halting
        read_so_far.update(i)
        q = [(s[j] + q[j]) / 2 for j in range(h)] if update == "average" else s[:h]
    return reading


def _gap(order, d, bank, h) -> float:
    """The smallest score difference between tokens with different keys; equal keys are ordered by index."""
    pairs = itertools.pairwise(order)
    return min((d[a] - d[b] for a, b in pairs if list(bank[a][:h]) != list(bank[b][:h])), default=math.inf)
