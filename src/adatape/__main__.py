"""Entry point of `adatape` and of `python -m adatape`, as in `torchrun --nproc-per-node 8 -m adatape …`."""

import sys

from adatape.extras import how_to_install


def main() -> None:
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
