"""What each verb found, as the table that the command line prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    from adatape.train.budgets import StoredBudget
    from adatape.train.fewshot import FewShotResult
    from adatape.train.launch import Evaluated, Swept, Trained
    from adatape.train.release import Released


def recipes_table(found: RecipeList) -> Table:
    rows = [(name, text.splitlines()[0], ", ".join(found.options[name])) for name, text in found.texts.items()]
    return Table(("recipe", "what", "options"), rows, words=(0, 1, 2))


def cost_table(found: ModelCost) -> Table:
    read = "" if found.tape_tokens is None else f"{found.tape_tokens} tape tokens"
    settings = " ".join(f"{key}={value}" for key, value in found.options.items())
    parts = {**found.parts, "total": {"parameters": found.parameters, "gflops": found.gflops}}
    rows = [
        (name, _millions(part["parameters"]), f"{part['gflops']:.3f}", f"{part['gflops'] / found.gflops:.1%}")
        for name, part in parts.items()
    ]
    title = " · ".join(piece for piece in (found.model, settings, read) if piece)
    return Table(("part", "parameters (M)", "GFLOPs", "share"), rows, title)


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
    notes = ["typical: mean over 8 noise images, before training"] if typical else []
    return Table(columns, rows, notes=notes, words=(0, 1, 2))


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
    return Table(("system", "adapts", "M", "paper", "GFLOPs", "paper", "÷ ours"), rows, notes=notes, words=(0, 1))


def trained_table(found: Trained) -> Table:
    result = found.result
    row = (
        f"{result['accuracy']:.2%}",
        _spread(result["length_mean"], result["length_var"]),
        f"{_millions(result['parameters'])} M",
        f"{result['gflops_mean']:.4f}",
        str(result["steps"]),
        f"{result['seconds']:.0f}",
    )
    columns = ("test accuracy", "tape length", "parameters", "GFLOPs", "steps", "seconds")
    return Table(columns, [row], notes=[f"run folder: {found.out}"], words=())


def swept_table(found: Swept) -> Table:
    figures = ("accuracy", "length_mean", "gflops", "gflops_mean", "steps")
    chosen = [name for name in found.rows[0] if name not in figures]
    rows = [
        (
            *(str(row[name]) for name in chosen),
            f"{row['accuracy']:.2%}",
            f"{row['length_mean']:.1f}",
            f"{row['gflops_mean']:.4f}",
            str(row["steps"]),
        )
        for row in found.rows
    ]
    columns = (*chosen, "test accuracy", "tape length", "GFLOPs", "steps")
    return Table(columns, rows, notes=[f"sweep folder: {found.out}"], words=range(len(chosen)))


def evaluated_table(found: Evaluated) -> Table:
    score = found.score
    gflops = (score.gflops_mean, score.gflops_p50, score.gflops_p95, found.gflops)
    row = (
        f"{score.accuracy:.2%}",
        f"{score.loss:.4f}",
        f"{score.sequence_mean:.1f}",
        str(score.sequence_max),
        f"{score.length_var:.2f}",
        *(_figure(value, ".4f") for value in gflops),
    )
    columns = ("accuracy", "loss", "sequence", "longest", "variance", "GFLOPs mean", "p50", "p95", "bound")
    return Table(columns, [row], words=())


def demo_table(found: DemoResult) -> Table:
    rows = [
        (
            system,
            f"{result['accuracy']:.2%}",
            _spread(result["length_mean"], result["length_var"]) if result["length_mean"] else "–",
            f"{_millions(result['parameters'])} M",
            f"{result['gflops'] * 1e3:.2f}",
            f"{result['seconds']:.0f} s",
        )
        for system, result in found.results.items()
    ]
    columns = ("system", "test accuracy", "tape length", "parameters", "MFLOPs", "training")
    return Table(columns, rows, "parity", [f"picture: {found.picture}"])


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
    return Table(("shots", "l2", "accuracy", "seeds"), rows, f"{found.run.name} on {found.on}", words=())


def released_table(found: Released) -> Table:
    load = f'timm.create_model("local-dir:{found.out}", pretrained=True)'
    return Table((), [], notes=[f"released to {found.out}; load it with {load}"])


def export_table(found: ExportResult) -> Table:
    rows = [
        (str(each.batch), "" if each.length is None else str(each.length), f"{each.difference:.1e}")
        for each in found.checks
    ]
    unchecked = [] if rows else ["without onnxruntime the file was not compared with the model"]
    written = f"exported to {found.out}, {found.bytes / 1e6:.2f} MB in {found.seconds:.1f} s"
    return Table(("batch", "tape", "largest difference of a logit"), rows, notes=[*unchecked, written], words=())


def budgets_table(found: BudgetComparison) -> Table:
    trained = found.trained.steps
    marks = ["trained" if row["steps"] == trained else "beyond" if row["steps"] > trained else "" for row in found.rows]
    left_out = [f"budget {steps} left out: {reason}" for steps, reason in found.left_out.items()]
    return _budgets(found.rows, marks, notes=[*left_out, f"picture: {found.picture}"])


def stored_budget_table(found: StoredBudget) -> Table:
    listed = found.frontier if found.chosen in found.frontier else [*found.frontier, found.chosen]
    threshold = "" if found.budget.threshold is None else f", threshold {found.budget.threshold:.3g}"
    notes = [
        f"budget: steps {found.budget.steps}{threshold}; accuracy {found.reported['accuracy']:.2%}, "
        f"{found.reported['gflops_mean']:.4g} GFLOPs, {found.chosen['ms_batch1']:.3f} ms for one image",
        found.chosen_on,
        f"stored in {found.config}",
    ]
    return _budgets(listed, ["chosen" if row == found.chosen else "" for row in listed], "frontier", notes)


def _budgets(rows: Sequence[dict[str, Any]], marks: Sequence[str], title: str = "", notes: Sequence[str] = ()) -> Table:
    sizes = [int(name.removeprefix("ms_batch")) for name in rows[0] if name.startswith("ms_batch")]
    unit, scale = ("GFLOPs", 1) if max(row["gflops_mean"] for row in rows) >= 0.1 else ("MFLOPs", 1000)
    cells = [
        (
            f"{row['steps']} {mark}",
            "" if row["threshold"] is None else f"{row['threshold']:.3g}",
            f"{row['accuracy']:.2%}",
            f"{row['length_mean']:.2f}",
            *(f"{row[name] * scale:.3g}" for name in ("gflops_mean", "gflops_p50", "gflops_p95")),
            *(f"{row[f'ms_batch{size}']:.3f}" for size in sizes),
        )
        for row, mark in zip(rows, marks, strict=True)
    ]
    times = ["ms alone" if size == 1 else f"ms of {size}" for size in sizes]
    return Table(("budget", "halts at", "accuracy", "length", unit, "p50", "p95", *times), cells, title, notes)


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
    columns = ("model", "mode", "batch", "ms (min–max)", "reference", "speed (min–max)", "FLOPs")
    notes = [
        f"speed, FLOPs: reference ÷ model{'; memory: model ÷ reference' if remembers else ''}",
        *dict.fromkeys(f"{name_of(row)}: {row['error']}" for row in rows if row["error"]),
        *(f"{what}: {path}" for what, path in (("results", found.out), ("picture", found.picture)) if path),
    ]
    return Table((*columns, *(["memory"] if remembers else [])), cells, _bench_title(found), notes, words=(0, 1))


def _bench_title(found: BenchResult) -> str:
    def each(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in found.rows))

    where = each("hardware") or found.environment["hardware"]
    return " · ".join([f"against {each('reference')}", where, each("precision"), f"compile {each('compile')}"])


def figures_table(found: FiguresResult) -> Table:
    from adatape.report.captions import caption

    rows = [(str(path.relative_to(found.run)), caption(name)) for name, path in found.figures.items()]
    left_out = f"{found.metrics} has damaged lines, left out here: {found.damaged_lines}"
    notes = [left_out] if found.damaged_lines else []
    return Table(("figure", "what it shows"), rows, str(found.run), notes, words=(0, 1))


def report_table(found: ReportResult) -> Table:
    from adatape.report.runs import results_table

    skipped = [f"skipped {folder}: {reason}" for folder, reason in found.skipped.items()]
    notes = [*found.missing_weights, *skipped, f"report: {found.out}"]
    heads = {"accuracy": "accuracy %", "parameters": "M parameters", "gflops_mean": "GFLOPs mean"}
    return results_table(found.rows, heads, notes)


def started_table(found: Started) -> Table:
    steps = ", ".join("–" if each is None else str(each) for each in found.latency)
    times = ", ".join(f"{ms:.1f}" for ms in found.latency.values())
    columns = ("model", "device", "steps", "ms for one sample")
    row = (found.name, found.device, steps, times)
    return Table(columns, [row], notes=[f"listening on {found.address}  (Ctrl+C stops)"], words=range(4))


def _millions(count: float) -> str:
    return f"{count / 1e6:.3f}"


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _spread(mean: float, variance: float) -> str:
    return f"{mean:.1f} ± {variance**0.5:.1f}"


def _range(row: dict[str, Any], name: str, form: str) -> str:
    if row[name] is None:
        return "–"
    return f"{row[name]:{form}} ({row[f'{name}_min']:{form}}–{row[f'{name}_max']:{form}})"
