"""What the figures of a run show, in the order in which they are listed."""

from __future__ import annotations

CAPTIONS = {
    "training": "Loss, accuracy or mean AP, tape length by step; the band is one standard deviation over samples.",
    "parity": "Accuracy, tape lengths, and one sequence with the pairs that were read.",
    "quality": "Accuracy or mean AP of the one model against what it costs at several budgets.",
    "budgets": "Budgets: accuracy or mean AP against work and time, tape lengths, easy and hard samples.",
    "heatmap": "How often each patch of the image is read, in all and by step.",
    "long_tail": "How often each bank token is read, most read first; both axes are logarithmic.",
    "lengths": "Tape lengths of all samples, and of right and wrong answers.",
    "lengths_by_class": "Tape lengths by class.",
    "easy": "Samples that cost the model least.",
    "hard": "Samples that cost the model most.",
    "mistakes": "Samples that it gets wrong.",
}


def caption(name: str) -> str:
    return CAPTIONS.get(name, name)


def rank(name: str) -> tuple[int, str]:
    """Those that we know first."""
    return (list(CAPTIONS).index(name) if name in CAPTIONS else len(CAPTIONS), name)
