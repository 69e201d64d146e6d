"""Entry point of `adatape` and of `python -m adatape`, as in `torchrun --nproc-per-node 8 -m adatape …`."""

import sys
import warnings
from pathlib import Path

from adatape.extras import how_to_install

_in_full = warnings.formatwarning


def short_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Ours are one line, as errors are; on a command line nobody looks for the place in the source."""
    if Path(__file__).parent in Path(filename).parents:
        return f"adatape: warning: {message}\n"
    return _in_full(message, category, filename, lineno, line)


def main() -> None:
    warnings.formatwarning = short_warning
    try:
        from adatape.cli import main as run
    except KeyboardInterrupt:
        print("adatape: stopped", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        line = how_to_install(error.name)
        if line is None:
            raise
        print(f"adatape: {line}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
