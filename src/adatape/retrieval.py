"""Commands of a RetrievalBank: build an index, and serve one to other processes or machines.

    python -m adatape.retrieval build values.npy index --kind ivf
    python -m adatape.retrieval serve index --port 8700

A norm other than a new reader's is passed by `adatape.build_index(…, norm=model.reader.norm)`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from adatape.banks.index import Kind, build_index
from adatape.banks.served import index_server
from adatape.report.terminal import TerminalProgress


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        "python -m adatape.retrieval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = found.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build", help="index the keys of an array (c, d) in a .npy file")
    build.add_argument("values", type=Path)
    build.add_argument("folder", type=Path, help="a new folder for the index")
    build.add_argument("--kind", choices=get_args(Kind), default="exact")
    build.add_argument("--query-width", type=int, default=64)
    build.add_argument("--cells", type=int)
    build.add_argument("--probes", type=int, default=32)
    build.add_argument("--code-bytes", type=int, default=16)
    build.add_argument("--rows", type=int, nargs=2, metavar=("START", "STOP"), help="a part of the array")
    serve = verbs.add_parser("serve", help="answer searches of an index, for RetrievalBank('http://HOST:PORT')")
    serve.add_argument("folder", type=Path)
    serve.add_argument("--host", default="127.0.0.1", help="there is no authentication: a trusted network only")
    serve.add_argument("--port", type=int, default=8700)
    return found


def main(given: Sequence[str] | None = None) -> None:
    commands = parser()
    options = vars(commands.parse_args(given))
    try:
        (_build if options.pop("verb") == "build" else _serve)(**options)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        commands.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _build(rows: list[int] | None, **options: object) -> None:
    with TerminalProgress() as progress:
        part = None if rows is None else (rows[0], rows[1])
        facts = build_index(**options, rows=part, on_progress=progress.update)  # type: ignore[arg-type]
    print(f"{options['folder']}: {facts.rows} keys of width {facts.query_width}, {facts.kind}")


def _serve(folder: Path, host: str, port: int) -> None:
    with index_server(folder, host, port) as server:
        print(f"{folder} answers at http://{host}:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
