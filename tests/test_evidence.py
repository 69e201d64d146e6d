"""Tables of image studies: which systems are compared, and which differences are marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from scripts import script

by_system, compared = script("research/cells.py"), script("research/margins.py")
tables, pictured = script("research/image_tables.py"), script("research/pictures.py")
Row = dict[str, Any]


def runs(name: str, accuracies: list[float], gflops: float, **result: Any) -> list[Row]:
    """A system's rows, one for each seed."""
    figures = {"gflops": 2 * gflops, "parameters": 1e6, "length_mean": 0.0, "length_var": 0.0, **result}
    return [
        {"run": f"cifar100/{name}/seed-{seed}", "result": {"accuracy": accuracy, "gflops_mean": gflops, **figures}}
        for seed, accuracy in enumerate(accuracies)
    ]


def cells(*systems: list[Row]) -> list[Any]:
    return by_system.cells([row for system in systems for row in system])


def test_the_rival_is_the_best_plain_vit_that_costs_no_more() -> None:
    every = cells(
        runs("plain-cheap", [0.50, 0.50], 0.5),
        runs("plain-same", [0.60, 0.61], 1.0),
        runs("plain-dear", [0.90, 0.90], 1.1),
        runs("avit", [0.95, 0.95], 1.0),
        runs("adatape-x", [0.65, 0.66], 1.0),
    )
    (margin,) = compared.margins(every)
    assert (margin.rival.name, margin.lead.ahead) == ("plain-same", True)
    assert margin.lead.points == pytest.approx(5)
    assert margin.lead.error == pytest.approx(100 * (2 * 0.005**2) ** 0.5)


def test_between_two_plain_vits_the_line_is_the_rival_too() -> None:
    every = cells(
        runs("plain-a", [0.50], 1.0),
        runs("plain-b", [0.60], 2.0),
        runs("adatape-x", [0.56], 1.5),
        runs("adatape-y", [0.99], 2.5),
        runs("plain-poor", [0.30], 1.4),  # beaten by a cheaper one: no point of the line
        runs("plain-twin", [0.20], 1.0),
    )
    found = {margin.ours.name: margin.beyond for margin in compared.margins(every)}
    assert found["adatape-x"].points == pytest.approx(1)
    assert found["adatape-y"] is None


def test_the_line_has_an_error_and_is_flat_where_dearer_is_no_better() -> None:
    every = cells(
        runs("plain-a", [0.48, 0.52], 1.0),
        runs("plain-b", [0.57, 0.63], 2.0),
        runs("plain-dear", [0.55, 0.55], 4.0),
        runs("adatape-x", [0.56, 0.58], 1.25),
        runs("adatape-y", [0.65, 0.65], 3.0),
    )
    found = {margin.ours.name: margin.beyond for margin in compared.margins(every)}
    assert found["adatape-x"].points == pytest.approx(4.5)
    assert found["adatape-x"].error == pytest.approx((1 + (0.75 * 2) ** 2 + (0.25 * 3) ** 2) ** 0.5)
    assert found["adatape-y"] == pytest.approx((5, 3))


def test_leads_are_shown_for_each_seed_that_both_have() -> None:
    every = cells(runs("plain-a", [0.50, 0.60, 0.70], 1.0), runs("adatape-x", [0.52, 0.61], 1.0))
    (margin,) = compared.margins(every)
    assert compared.by_seed(margin.ours, margin.rival) == pytest.approx([2, 1])
    assert "| +2.00, +1.00 |" in compared.margin_table(every)


def test_a_smaller_budget_of_one_model_has_rivals_of_its_own() -> None:
    ours = runs("adatape-x", [0.70, 0.71], 2.0, length_mean=64.0)
    for seed, row in enumerate(ours):
        row["budgets"] = [
            {"steps": steps, "accuracy": accuracy + seed / 100, "gflops_mean": cost, "length_mean": float(steps)}
            for steps, cost, accuracy in (
                (0, 0.5, 0.69),  # no tape at all
                (8, 0.9, 0.60),  # too far below the best
                (32, 1.2, 0.65),
                (56, 1.9, 0.70),  # saves too little
                (64, 2.0, 0.70),
            )
        ]
    every = cells(runs("plain-cheap", [0.50, 0.51], 1.0), runs("plain-dear", [0.60, 0.61], 2.0), ours)
    found = {each.ours.name: each for each in compared.margins(by_system.with_budgets(every))}
    assert set(found) == {"adatape-x", "adatape-x at 32"}
    assert found["adatape-x at 32"].rival.name == "plain-cheap"
    assert found["adatape-x at 32"].lead.points == pytest.approx(15)
    assert found["adatape-x"].rival.name == "plain-dear"


def test_an_adaptive_system_meets_the_best_of_ours_that_costs_no_more() -> None:
    cheap = runs("adatape-cheap", [0.50, 0.51], 1.0)
    for row, steps in zip(cheap, ((0, 4, 2, 8), (0, 4, 8)), strict=True):  # the second was scored at fewer budgets
        row["budgets"] = [{"steps": n, "accuracy": n / 100, "gflops_mean": 0.7, "length_mean": float(n)} for n in steps]
    every = cells(
        cheap,
        runs("adatape-dear", [0.90, 0.91], 1.1),
        runs("plain-x", [0.99, 0.99], 1.0),
        runs("avit", [0.60, 0.61], 1.0),
        runs("uvit", [0.40, 0.41], 1.2),
        runs("ut", [0.40, 0.41], 0.5),
        runs("ponder", [0.70, 0.71], 0.8),
    )
    found = {each.rival.name: each for each in compared.against_adaptive(every)}
    assert {name: each.ours.name for name, each in found.items()} == {
        "avit": "adatape-cheap",
        "uvit": "adatape-dear",
        "ponder": "adatape-cheap at 8",  # however far below its best
    }
    assert [cell.name for cell in by_system.at_budgets(found["avit"].ours, least=0)] == [
        f"adatape-cheap at {n}" for n in (0, 4, 8)
    ]
    assert found["avit"].lead.points == pytest.approx(-10)
    assert found["uvit"].lead.points == pytest.approx(50)
    text = compared.adaptive_table(every)
    assert "-10.00 ± 0.71 ▼" in text
    assert "**+50.00 ± 0.71**" in text


def test_from_few_images_the_rival_is_the_best_of_that_column() -> None:
    scores = {"plain-a": (0.2, 0.5), "plain-b": (0.3, 0.4), "plain-dear": (0.9, 0.9), "adatape": (0.35, 0.35)}
    systems = []
    for name, (one, five) in scores.items():
        systems.append(runs(name, [0.5, 0.5], 2.0 if name == "plain-dear" else 1.0))
        for seed, row in enumerate(systems[-1]):
            shots = [{"shots": 1, "mean": one + seed / 100}, {"shots": 5, "mean": five + seed / 100}]
            row["fewshot"] = {"pets": shots}
    every = cells(*systems)
    text = compared.few_shot_margins(every)
    assert "pets, 1 shot | pets, 5 shots" in text
    assert (
        "| cifar100 | adatape | **+5.00 ± 0.71** | -15.00 ± 0.71 ▼ |\n|  | above the line | **+5.00 ± 0.71** |" in text
    )
    assert tables.few_shots(every).count("35.50 ± 0.71") == 2


@pytest.mark.parametrize(("ours", "ahead"), [([0.62, 0.62], True), ([0.61, 0.65], False), ([0.59, 0.59], False)])
def test_ahead_means_by_more_than_two_errors(ours: list[float], ahead: bool) -> None:
    (margin,) = compared.margins(cells(runs("plain-x", [0.60, 0.60], 1.0), runs("adatape", ours, 1.0)))
    assert margin.lead.ahead == ahead


def test_one_seed_is_never_ahead() -> None:
    (margin,) = compared.margins(cells(runs("plain-x", [0.1], 1.0), runs("adatape", [0.9], 1.0)))
    assert not margin.lead.ahead


def test_one_seed_is_compared_only_where_nobody_has_more() -> None:
    once = [runs("plain-tried-once", [0.90], 1.0), runs("adatape-tried-once", [0.95], 1.0)]
    names = {cell.name for cell in by_system.comparable(cells(*once))}
    assert names == {"plain-tried-once", "adatape-tried-once"}
    every = cells(*once, runs("plain-x", [0.50, 0.51], 1.0), runs("adatape-x", [0.60, 0.61], 1.0))
    assert {cell.name for cell in by_system.comparable(every)} == {"plain-x", "adatape-x"}
    table = compared.margin_table(every)
    assert "plain-x" in table
    assert "once" not in table


def test_a_second_mean_is_told_for_each_kind_of_features() -> None:
    plain, ours = runs("plain-a", [0.5, 0.5], 1.0), runs("adatape", [0.5, 0.5], 1.0)
    assert tables.second_means(cells(plain, ours)) == ""
    for rows, kind in ((plain, "and rows after 3 blocks"), (ours, "and the tape's mean")):
        for row, score in zip(rows, (0.2, 0.3), strict=True):
            found = {"pooled alone": [{"shots": 5, "mean": 0.1}], kind: [{"shots": 5, "mean": score}]}
            row["second_means"] = {"pets": found}
    text = tables.second_means(cells(plain, ours))
    assert "| cifar100 | plain-a | and rows after 3 blocks | 2 | 25.00 ± 7.07 |" in text
    assert "| cifar100 | adatape | pooled alone | 2 | 10.00 ± 0.00 |" in text


def test_a_half_is_rounded_up_whatever_binary_makes_of_it() -> None:
    assert [by_system.rounded(value, 1) for value in (8.45, 22.75, 0.05, 2.0, 12.3449)] == [
        "8.5",
        "22.8",
        "0.1",
        "2.0",
        "12.3",
    ]


def test_the_picture_shows_every_set(tmp_path: Path) -> None:
    every = cells(runs("plainvit-8", [0.5, 0.6], 1.0), runs("selective", [0.5], 1.0))
    pictured.draw_costs(tmp_path / "one.png", every)
    pictured.draw_costs(tmp_path / "two.png", [*every, *(cell._replace(recipe="cifar10") for cell in every)])
    one, two = (Image.open(tmp_path / name).size for name in ("one.png", "two.png"))
    assert two[0] == one[0]
    assert two[1] > 1.8 * one[1]
