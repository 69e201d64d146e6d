"""The command `adatape`, and `python -m adatape`, which torchrun needs: `torchrun --nproc-per-node 8 -m adatape …`."""

import sys


def main() -> None:
    try:
        from adatape.cli import main as run
    except KeyboardInterrupt:
        print("adatape: stopped", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
