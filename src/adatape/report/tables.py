"""What each verb found, as the table that the command line prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from adatape.evaluate.result import FIGURE_NAMES, main_figure, work_unit
from adatape.report.legend import budget_text, caption, legend
from adatape.report.table import Table

if TYPE_CHECKING:
    from adatape.evaluate.catalogue import ModelCost, ModelList
    from adatape.evaluate.recipes import RecipeList
    from adatape.export import ExportResult
    from adatape.report.bench import BenchResult
    from adatape.report.budgets import BudgetComparison
    from adatape.report.demo import DemoResult
    from adatape.report.figures import FiguresResult
    from adatape.report.page import ReportResult
    from adatape.serve.server import Started
    from adatape.train.budgets import FoundBudget, RemovedBudget
    from adatape.train.fewshot import FewShotResult
    from adatape.train.launch import Evaluated, Swept, Trained
    from adatape.train.release import Released


def _explained(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    notes: Sequence[str] = (),
    words: Sequence[int] = (0,),
) -> Table:
    """A table with a line below it that explains its columns."""
    return Table(columns, rows, title, [*(legend(columns) if rows else ()), *notes], words)


def recipes_table(found: RecipeList) -> Table:
    rows = [(name, text.splitlines()[0], ", ".join(found.options[name])) for name, text in found.texts.items()]
    return _explained(("recipe", "what", "options"), rows, words=(0, 1, 2))


def cost_table(found: ModelCost) -> Table:
    read = "" if found.tape_tokens is None else f"{found.tape_tokens} tape tokens"
    settings = " ".join(f"{key}={value}" for key, value in found.options.items())
    parts = {**found.parts, "total": {"parameters": found.parameters, "gflops": found.gflops}}
    rows = [
        (name, _millions(part["parameters"]), f"{part['gflops']:.3f}", f"{part['gflops'] / found.gflops:.1%}")
        for name, part in parts.items()
    ]
    title = " · ".join(piece for piece in (found.model, settings, read) if piece)
    return _explained(("part", "parameters (M)", "GFLOPs", "share"), rows, title)


def models_table(found: ModelList) -> Table:
    typical = any(each.gflops_typical is not None for each in found.models.values())
    rows = [
        (
            each.name,
            " ".join(f"{key}={value}" for key, value in each.options.items()),
            each.adapts,
            _millions(each.parameters),
            f"{each.gflops:.3f}",
            *([_figure(each.gflops_typical, ".3f")] if typical else []),
        )
        for each in found.models.values()
    ]
    columns = ("model", "options", "adapts", "M", "GFLOPs (bound)", *(["typical"] if typical else []))
    return _explained(columns, rows, words=(0, 1, 2))


def paper_models_table(found: ModelList) -> Table:
    rows, notes = [], []
    for label, each in found.models.items():
        assert each.paper is not None
        theirs = [f"{figure}" if figure else "" for figure in (each.paper.parameters, each.paper.gflops)]
        gap = f"{each.paper.gflops / each.gflops - 1:+.2%}" if each.paper.gflops else ""
        ours = (_millions(each.parameters), f"{each.gflops:.3f}")
        name = f"{label} *" if each.paper.note else label
        rows.append((name, each.adapts, ours[0], theirs[0], ours[1], theirs[1], gap))
        notes += [f"* {label}: {each.paper.note}"] if each.paper.note else []
    return _explained(("system", "adapts", "M", "paper", "GFLOPs", "paper", "÷ ours"), rows, notes=notes, words=(0, 1))


def trained_table(found: Trained) -> Table:
    result, name = found.result, main_figure(found.result)
    unit, (mean,) = _work([result["gflops_mean"]])
    row = (
        f"{result[name]:.2%}",
        _read(result),
        f"{_millions(result['parameters'])} M",
        mean,
        str(result["steps"]),
        f"{result['seconds']:.0f}",
    )
    columns = (f"test {FIGURE_NAMES[name]}", "tape length", "parameters", f"{unit} mean", "training steps", "seconds")
    notes = [*_by_class(result.get("average_precision")), f"run folder: {found.out}"]
    return _explained(columns, [row], notes=notes, words=())


def swept_table(found: Swept) -> Table:
    figures = ("accuracy", "mean_ap", "length_mean", "gflops", "gflops_mean", "steps")
    chosen = [name for name in found.rows[0] if name not in figures]
    main = main_figure(found.rows[0])
    unit, means = _work([row["gflops_mean"] for row in found.rows])
    rows = [
        (
            *(str(row[name]) for name in chosen),
            f"{row[main]:.2%}",
            f"{row['length_mean']:.1f}" if row["length_mean"] else "–",
            mean,
            str(row["steps"]),
        )
        for row, mean in zip(found.rows, means, strict=True)
    ]
    columns = (*chosen, f"test {FIGURE_NAMES[main]}", "length", f"{unit} mean", "training steps")
    return _explained(columns, rows, notes=[f"sweep folder: {found.out}"], words=range(len(chosen)))


def evaluated_table(found: Evaluated) -> Table:
    score = found.score
    unit, work = _work([score.gflops_mean, score.gflops_p50, score.gflops_p95, found.gflops])
    right = {"accuracy": score.accuracy}
    if score.mean_ap is not None:
        right = {"mean AP": score.mean_ap, "all labels right": score.accuracy}
    row = (
        *(f"{value:.2%}" for value in right.values()),
        f"{score.loss:.4f}",
        f"{score.sequence_mean:.1f}",
        str(score.sequence_max),
        f"{score.length_var:.2f}",
        *work,
    )
    columns = (*right, "loss", "sequence", "longest", "variance", f"{unit} mean", "p50", "p95", "bound")
    stored = [f"at the budget stored in the run: {budget_text(found.stored)}"] if found.stored else []
    return _explained(columns, [row], notes=[*_by_class(score.average_precision), *stored], words=())


def _by_class(precision: dict[str, float | None] | None) -> list[str]:
    """The average precision of each class, and which have none."""
    known = [f"{name} {value:.2%}" for name, value in (precision or {}).items() if value is not None]
    without = [name for name, value in (precision or {}).items() if value is None]
    notes = [f"average precision: {', '.join(known)}"] if known else []
    return notes + ([f"left out, since no test image has them: {', '.join(without)}"] if without else [])


def demo_table(found: DemoResult) -> Table:
    columns = ("task", "system", "test accuracy", "tape length", "parameters", "MFLOPs", "training")
    rows, notes = [], [f"picture: {path}" for path in found.pictures]
    for name, result in found.results.items():
        if name != "haystack":
            rows.append(("parity", name, *_demo_figures(result, result, result["gflops"])))
            continue
        for budget in result["budgets"]:
            read = f"{budget['steps']} window{'s' if budget['steps'] > 1 else ''}"
            system = f"adatape, floor {budget['floor']}" if budget["floor"] else f"adatape, {read}"
            rows.append((name, system, *_demo_figures(result, budget, budget["gflops_mean"])))
        notes.insert(0, f"haystack: tape length at the floor follows the number of digits, ρ {result['rho']:.2f}")
    return _explained(columns, rows, notes=notes, words=(0, 1))


def _demo_figures(result: dict[str, Any], score: dict[str, Any], gflops: float) -> tuple[str, ...]:
    return (
        f"{score['accuracy']:.2%}",
        _read(score),
        f"{_millions(result['parameters'])} M",
        f"{gflops * 1e3:.2f}",
        f"{result['seconds']:.0f} s",
    )


def fewshot_table(found: FewShotResult) -> Table:
    rows = [
        (
            str(row.shots),
            f"{row.l2:g}",
            f"{100 * row.mean:.2f}{'' if row.sd is None else f' ± {100 * row.sd:.2f}'} %",
            str(row.seeds),
        )
        for row in found.summary
    ]
    return _explained(("shots", "l2", "accuracy", "seeds"), rows, f"{found.run.name} on {found.on}", words=())


def released_table(found: Released) -> Table:
    load = f'timm.create_model("local-dir:{found.out}", pretrained=True)'
    return Table((), [], notes=[f"released to {found.out}; load it with {load}", f"licence {found.licence}"])


def export_table(found: ExportResult) -> Table:
    rows = [
        (str(each.batch), "" if each.length is None else str(each.length), f"{each.difference:.1e}")
        for each in found.checks
    ]
    unchecked = [] if rows else ["without onnxruntime the file was not compared with the model"]
    written = f"exported to {found.out}, {found.bytes / 1e6:.2f} MB in {found.seconds:.1f} s"
    return _explained(("batch", "tape", "largest difference of a logit"), rows, notes=[*unchecked, written], words=())


def budgets_table(found: BudgetComparison) -> Table:
    trained = found.trained.steps
    marks = ["trained" if row["steps"] == trained else "beyond" if row["steps"] > trained else "" for row in found.rows]
    notes = [f"budget {steps} left out: {reason}" for steps, reason in found.left_out.items()]
    if found.floor is not None:
        marks = [mark.replace("trained", "") for mark in marks]
        notes.append(f"with the floor stored in the run; `adatape budget {found.run} --reset` removes it")
    return _budgets(found.rows, marks, notes=[*notes, f"picture: {found.picture}"])


def found_budget_table(found: FoundBudget) -> Table:
    listed = found.frontier if found.chosen in found.frontier else [*found.frontier, found.chosen]
    name = main_figure(found.reported)
    kept = f"not stored; with --store, eval, fewshot, serve, export and release of {found.run} use it"
    if found.config is not None:
        kept = f"stored in {found.config}; `adatape budget {found.run} --reset` removes it"
    unit, (mean,) = _work([found.reported["gflops_mean"]])
    notes = [
        f"budget: {budget_text(found.budget)}; {FIGURE_NAMES[name]} {found.reported[name]:.2%}, "
        f"{mean} {unit}, {found.chosen['ms_batch1']:.3f} ms for one image",
        found.chosen_on,
        kept,
    ]
    return _budgets(listed, ["chosen" if row == found.chosen else "" for row in listed], "frontier", notes)


def removed_budget_table(found: RemovedBudget) -> Table:
    gone = f"removed {budget_text(found.budget)}" if found.budget else "no budget was stored"
    return Table((), [], notes=[f"{found.run}: {gone}; it is used as trained, with {budget_text(found.trained)}"])


def _budgets(rows: Sequence[dict[str, Any]], marks: Sequence[str], title: str = "", notes: Sequence[str] = ()) -> Table:
    sizes = [int(name.removeprefix("ms_batch")) for name in rows[0] if name.startswith("ms_batch")]
    main = main_figure(rows[0])
    unit, scale = work_unit(max(row["gflops_mean"] for row in rows))
    cells = [
        (
            f"{row['steps']} {mark}",
            "" if row["threshold"] is None else f"{row['threshold']:.3g}",
            f"{row[main]:.2%}",
            f"{row['length_mean']:.2f}",
            *(f"{row[name] * scale:.3g}" for name in ("gflops_mean", "gflops_p50", "gflops_p95")),
            *(f"{row[f'ms_batch{size}']:.3f}" for size in sizes),
        )
        for row, mark in zip(rows, marks, strict=True)
    ]
    times = ["ms alone" if size == 1 else f"ms of {size}" for size in sizes]
    return _explained(
        ("budget", "halts at", FIGURE_NAMES[main], "length", unit, "p50", "p95", *times), cells, title, notes
    )


def bench_table(found: BenchResult) -> Table:
    from adatape.evaluate.bench import mode_of, name_of

    rows = found.rows
    remembers = any(row["memory_ratio"] for row in rows)  # measured in training on a GPU
    shares = ("flops_ratio", "memory_ratio") if remembers else ("flops_ratio",)
    cells = [
        (
            name_of(row),
            mode_of(row),
            str(row["batch"]),
            _range(row, "ms", ".4g"),
            _figure(row["reference_ms"], ".4g"),
            _range(row, "ratio", ".3f"),
            *(_figure(row[name], ".3f") for name in shares),
        )
        for row in rows
    ]
    full = any(row.get("full_tape") for row in rows)
    columns = ("model", "mode", "batch", "ms (min–max)", "reference", "speed (min–max)", "FLOPs")
    notes = [
        f"speed, FLOPs: reference ÷ model{'; memory: model ÷ reference' if remembers else ''}",
        *(["full tape: nothing halts early; other rows are of models as they are built"] if full else []),
        *dict.fromkeys(f"{name_of(row)}: {row['error']}" for row in rows if row["error"]),
        *(f"{what}: {path}" for what, path in (("results", found.out), ("picture", found.picture)) if path),
    ]
    return _explained((*columns, *(["memory"] if remembers else [])), cells, _bench_title(found), notes, words=(0, 1))


def _bench_title(found: BenchResult) -> str:
    def each(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in found.rows))

    where = each("hardware") or found.environment["hardware"]
    return " · ".join([f"against {each('reference')}", where, each("precision"), f"compile {each('compile')}"])


def figures_table(found: FiguresResult) -> Table:
    rows = [(str(path.relative_to(found.run)), caption(name)) for name, path in found.figures.items()]
    left_out = f"{found.metrics} has damaged lines, left out here: {found.damaged_lines}"
    notes = [left_out] if found.damaged_lines else []
    if found.stored is not None:
        stored = budget_text(found.stored)
        notes.append(f"drawn at the trained budget; the one stored in the run ({stored}) is left out")
    return _explained(("figure", "what it shows"), rows, str(found.run), notes, words=(0, 1))


def report_table(found: ReportResult) -> Table:
    from adatape.report.runs import results_table

    skipped = [f"skipped {folder}: {reason}" for folder, reason in found.skipped.items()]
    notes = [*found.missing_weights, *skipped, f"report: {found.out}"]
    heads = {
        "accuracy": "accuracy %",
        "mean_ap": "mean AP %",
        "parameters": "M parameters",
        "gflops_mean": "{unit} mean",
    }
    return results_table(found.rows, heads, notes)


def started_table(found: Started) -> Table:
    steps = ", ".join("–" if each is None else str(each) for each in found.latency)
    times = ", ".join(f"{ms:.1f}" for ms in found.latency.values())
    columns = ("model", "device", "budgets", "ms for one sample")
    row = (found.name, found.device, steps, times)
    default = [] if found.default is None else [f"requests that name no budget: {budget_text(found.default)}"]
    notes = [*default, f"listening on {found.address}  (Ctrl+C stops)"]
    return _explained(columns, [row], notes=notes, words=range(4))


def _work(gflops: Sequence[float | None]) -> tuple[str, list[str]]:
    """The unit of figures that stand in one table, and the figures."""
    unit, scale = work_unit(max((value for value in gflops if value is not None), default=1.0))
    return unit, ["–" if value is None else f"{value * scale:.4g}" for value in gflops]


def _millions(count: float) -> str:
    return f"{count / 1e6:.3f}"


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _read(score: dict[str, Any]) -> str:
    """Tape tokens, mean and deviation; a model that reads none has no length."""
    mean = score["length_mean"]
    return f"{mean:.1f} ± {score['length_var'] ** 0.5:.1f}" if mean else "–"


def _range(row: dict[str, Any], name: str, form: str) -> str:
    if row[name] is None:
        return "–"
    return f"{row[name]:{form}} ({row[f'{name}_min']:{form}}–{row[f'{name}_max']:{form}})"
